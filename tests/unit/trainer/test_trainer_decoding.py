"""Trainer.inference() with sampling, beams and stop strings: from the YAML's generation section to the rows."""

import json
import pathlib
import random

import numpy as np
import pytest

from mindformers_ext.predict import Tokenizer
from mindformers_ext.trainer import Trainer

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"
CASES = json.loads((CHECKPOINT / "reference.json").read_text())["cases"]
PROMPTS = [case["prompt"] for case in CASES]
SAMPLING = {"do_sample": True, "seed": 11, "temperature": 1.5, "top_k": 0}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trainer(**generation):
    return Trainer(
        {
            "run_mode": "predict",
            "checkpoint": {"load_path": str(CHECKPOINT)},
            "inference": {"max_new_tokens": 8, "batch_size": 4},
            "generation": {"eos_token_id": None, **generation},
            "predict": {"progress": False},
        }
    )


def rows(path="inference_result.jsonl"):
    return [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("options", [SAMPLING, {"num_beams": 3}, SAMPLING | {"num_beams": 2}])
def test_batch_size_changes_no_byte_of_the_ids(options):
    records = [f"{prompt} {i}" for i in range(4) for prompt in PROMPTS]
    run = trainer(**options)
    expected = run.inference(records, batch_size=1)
    for batch_size in (2, 3, 5, 20):
        assert run.inference(records, batch_size=batch_size) == expected


def test_the_same_prompt_many_times_gives_different_answers():
    answers = trainer(**SAMPLING).inference([PROMPTS[0]] * 40, batch_size=20, output="")
    assert len({tuple(ids) for _, ids in answers}) > 20


def test_the_cache_changes_no_sample():
    on, off = (trainer(**SAMPLING, use_cache=use_cache).inference(PROMPTS) for use_cache in (True, False))
    assert on == off


def test_beams_of_a_record_are_rows_with_scores_best_first():
    trainer(num_beams=4, num_return_sequences=3).inference(PROMPTS)
    found = rows()
    assert [(row["sample_idx"], row["sequence_idx"]) for row in found] == [(i, j) for i in range(5) for j in range(3)]
    scores = np.array([row["sequence_score"] for row in found]).reshape(5, 3)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_best_of_n_has_what_it_takes_to_rank_the_answers():
    trainer(**SAMPLING, num_return_sequences=4, output_logprobs=2).inference(PROMPTS[:2])
    for row in rows():
        assert len(row["logprobs"]) == len(row["top_logprobs"]) == row["num_new_tokens"] == 8
        assert all(len(pairs) == 2 for pairs in row["top_logprobs"])


def test_stop_strings_end_each_record_for_itself_and_are_cut_from_the_text():
    run = trainer()
    run.inference(PROMPTS)
    texts = [row["generated_text"] for row in rows()]
    stop = texts[1][3:6]
    run.inference(PROMPTS, stop_strings=[stop])
    for row, text in zip(rows(), texts, strict=True):
        assert row["generated_text"] == text.split(stop)[0]
        assert row["finish_reason"] == ("stop" if stop in text else "length")
        assert row.get("stop_string") == (stop if stop in text else None)
    assert rows()[1]["num_new_tokens"] < 8


def test_a_special_token_is_a_stop_string_in_a_batch():
    tokenizer = Tokenizer.from_folder(CHECKPOINT)
    special = next(i for i in range(3) if tokenizer.decode([i], False))
    bias = [[[special], 1000.0]]
    run = trainer(sequence_bias=bias, stop_strings=[tokenizer.decode([special], False)])
    run.inference(PROMPTS)
    assert [(row["generated_text"], row["finish_reason"], row["num_new_tokens"]) for row in rows()] == [
        ("", "stop", 1)
    ] * 5


def test_the_order_of_the_records_changes_no_beam():
    order = list(range(len(PROMPTS)))
    random.Random(0).shuffle(order)
    run = trainer(num_beams=3)
    expected = run.inference(PROMPTS)
    for index, (_, ids) in enumerate(run.inference([PROMPTS[i] for i in order], batch_size=3)):
        assert ids == expected[order[index]][1]


def test_a_record_that_leaves_no_token_is_an_error_row_and_the_others_are_answered():
    class Poison:
        def __call__(self, input_ids, scores):
            hit = (input_ids == CASES[2]["input_ids"][-1]).any(axis=1)
            scores[hit] = -np.inf
            return scores

    results = dict(trainer().inference(PROMPTS, logits_processor=[Poison()]))
    errors = [row for row in rows() if "error" in row]
    assert errors and all("no finite score" in row["error"] for row in errors)
    assert len(results) + len(errors) == 5 and results

"""Sampling through the Trainer, on a checkpoint that transformers wrote."""

import json
import pathlib

import pytest

from mindformers_ext.trainer import Trainer

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"
PROMPTS = [case["prompt"] for case in json.loads((CHECKPOINT / "reference.json").read_text())["cases"]]
RECORDS = [PROMPTS[index % len(PROMPTS)] for index in range(20)]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trainer(**generation):
    options = {"do_sample": True, "temperature": 1.5, "top_k": 40, "seed": 7, "eos_token_id": None} | generation
    return Trainer(
        {
            "run_mode": "predict",
            "checkpoint": {"load_path": str(CHECKPOINT)},
            "inference": {"max_new_tokens": 5, "batch_size": 20, "output": "rows.jsonl"},
            "generation": {name: value for name, value in options.items() if value != "unset"},
            "predict": {"progress": False},
        }
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("expected"))
        return trainer().inference(RECORDS)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_sampled_ids_are_the_same_for_any_batch_size(batch_size, expected):
    assert trainer().inference(RECORDS, batch_size=batch_size) == expected


def test_sampled_ids_are_the_same_without_cache_and_in_chunks(expected):
    assert trainer(use_cache=False).inference(RECORDS) == expected
    assert trainer(prefill_chunk_size=3).inference(RECORDS) == expected


def test_the_same_prompt_again_gets_another_answer(expected):
    groups = {}
    for index, ids in expected:
        groups.setdefault(index % len(PROMPTS), []).append(tuple(ids))
    assert all(len(set(answers)) == len(answers) for answers in groups.values())


def test_a_drawn_seed_is_logged_kept_in_the_summary_and_repeats_the_run(log):
    first = trainer(seed=None)
    outputs = [first.inference(RECORDS) for _ in range(2)]
    seed = first.last_summary.seed
    assert outputs[0] != outputs[1]
    assert f"seed {seed} (drawn for this run)" in log.text
    assert f"seed of sampling: {seed}" in log.text
    assert trainer(seed=seed).inference(RECORDS) == outputs[1]


def test_calls_of_one_trainer_choose_their_own_mode():
    run = trainer()
    sampled = run.inference(RECORDS)
    greedy = run.inference(RECORDS, do_sample=False)
    assert run.last_summary.seed is None
    assert greedy != sampled
    assert run.inference(RECORDS) == sampled
    assert run.inference(RECORDS, do_sample=False) == greedy
    assert run.inference(RECORDS, top_k=1) == greedy


def test_a_plugin_can_be_given_to_a_call():
    def only_seven(input_ids, scores):
        scores[:] = float("-inf")
        scores[:, 7] = 0
        return scores

    outputs = trainer().inference(RECORDS[:3], logits_processor=[only_seven])
    assert all(ids[-5:] == [7] * 5 for _, ids in outputs)


def test_a_mistake_of_a_call_is_told_before_the_weights_are_read(monkeypatch):
    run = trainer()
    monkeypatch.setattr("mindformers_ext.trainer.model.load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"generation\.temperature: expected a number from 1e-38"):
        run.inference(RECORDS, temperature=0)
    with pytest.raises(ValueError, match=r"suppress_tokens: \[99999\] are not among the model's token ids"):
        run.inference(RECORDS, suppress_tokens=[99999])

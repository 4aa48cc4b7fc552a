"""Trainer.inference() with predict.task: score, on checkpoints that transformers wrote."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from mindspore import nn, ops

from mindformers_ext.config import ConfigError, load_config
from mindformers_ext.predict import JobStoppedError
from mindformers_ext.trainer import Trainer, scoring
from mindformers_ext.trainer.validate import validate

DATA = pathlib.Path(__file__).parents[2] / "data"
CHECKPOINTS = DATA / "checkpoints"
SCORES = json.loads((DATA / "scores.json").read_text(encoding="utf-8"))
FAMILIES = sorted(SCORES["families"])
QUESTIONS = [{"instruction": one["prompt"], "choices": one["choices"]} for one in SCORES["questions"]]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(family="qwen3", batch_size=2, inference=None, **predict):
    return {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(CHECKPOINTS / family)},
        "inference": {"batch_size": batch_size, "output": "o.jsonl"} | (inference or {}),
        "predict": {"task": "score", "progress": False} | predict,
    }


def cases(family="qwen3"):
    return json.loads((CHECKPOINTS / family / "reference.json").read_text())["cases"]


def rows(path="o.jsonl"):
    return [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_nll_of_every_prompt_is_that_of_transformers_alone_and_in_a_batch(family):
    expected = cases(family)
    trainer = Trainer(config(family))
    for batch_size in (1, 5):
        trainer.inference([case["prompt"] for case in expected], batch_size=batch_size, resume=False)
        for row, case in zip(rows(), expected, strict=True):
            assert [-value for value in row["token_logprobs"]] == pytest.approx(case["nll"], abs=5e-4)
            assert row["nll"] == pytest.approx(np.mean(case["nll"]), abs=5e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_and_rolled_texts_are_those_of_transformers_with_shared_prompts_and_without(family):
    expected = SCORES["families"][family]
    for share_prefix in (True, False):
        trainer = Trainer(config(family, target_field="choices", share_prefix=share_prefix, resume=False))
        trainer.inference(QUESTIONS)
        for row, one in zip(rows(), expected["questions"], strict=True):
            # Rows have four decimals.
            assert row["loglikelihood"] == pytest.approx(one["loglikelihood"], abs=1.5e-4)
            assert (row["best"], row["best_norm"]) == (one["best"], one["best_norm"])
            assert row["is_greedy"] == one["is_greedy"]
            for ours, theirs in zip(row["token_logprobs"], one["token_logprobs"], strict=True):
                assert ours == pytest.approx(theirs, abs=1.5e-4)
    Trainer(config(family, rolling=True, resume=False)).inference(SCORES["texts"])
    assert [row["loglikelihood"] for row in rows()] == pytest.approx(expected["texts"], abs=1e-3)


def test_metrics_say_what_the_run_found_and_the_output_is_returned():
    trainer = Trainer(config(target_field="choices", answer_field="right"))
    right = [one["best"] for one in SCORES["families"]["qwen3"]["questions"]]
    data = [fields | {"right": index} for fields, index in zip(QUESTIONS, right, strict=True)]
    outputs = trainer.inference([*data, {"instruction": "x", "choices": 5, "right": 0}])
    assert outputs == [(row["sample_idx"], row["loglikelihood"]) for row in rows()[:5]]
    assert rows()[5]["error_type"] == "schema"
    metrics = json.loads(pathlib.Path("o.jsonl.metrics.json").read_text())
    assert metrics["task"] == "score" and "decoding" not in metrics
    assert metrics["scores"] == trainer.last_summary.scores and metrics["scores"]["acc"] == 1.0
    assert metrics["records"]["failed"] == 1
    assert trainer.inference([*data, {"instruction": "x", "choices": 5, "right": 0}]) == outputs
    assert trainer.last_summary.num_resumed == 6 and trainer.last_summary.scores["acc"] == 1.0


def test_a_record_at_fault_is_lost_alone(monkeypatch):
    trainer = Trainer(config(target_field="choices", batch_size=5))
    original = scoring.score_groups

    def failing(model, groups, *rest, **options):
        if any(len(group) == 2 for group in groups):
            raise MemoryError("out of memory")
        return original(model, groups, *rest, **options)

    monkeypatch.setattr(scoring, "score_groups", failing)
    trainer.inference(QUESTIONS)
    assert [row.get("error_type") for row in rows()] == [None, None, None, "oom", None]
    expected = [one["loglikelihood"] for one in SCORES["families"]["qwen3"]["questions"]]
    assert [row["loglikelihood"] for row in rows() if "error" not in row] == [
        pytest.approx(values, abs=1e-4) for index, values in enumerate(expected) if index != 3
    ]


def test_a_run_that_was_stopped_goes_on_and_writes_the_same_file(monkeypatch):
    Trainer(config(target_field="choices", inference={"output": "whole.jsonl"})).inference(QUESTIONS)
    original = scoring.score_groups
    calls = []

    def stopping(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise JobStoppedError("SIGTERM was received")
        return original(*arguments, **options)

    monkeypatch.setattr(scoring, "score_groups", stopping)
    with pytest.raises(JobStoppedError):
        Trainer(config(target_field="choices")).inference(QUESTIONS)
    finished = len(rows("o.jsonl.journal")) - 1
    assert 0 < finished < len(QUESTIONS)
    again = Trainer(config(target_field="choices", batch_size=1, share_prefix=False))
    again.inference(QUESTIONS)
    assert again.last_summary.num_resumed == finished
    for ours, whole in zip(rows(), rows("whole.jsonl"), strict=True):
        assert ours.keys() == whole.keys()
        assert ours["loglikelihood"] == pytest.approx(whole["loglikelihood"], abs=2e-4)
        assert (ours["best"], ours["is_greedy"]) == (whole["best"], whole["is_greedy"])


def test_another_target_is_another_job(monkeypatch):
    def stopping(*arguments, **options):
        raise JobStoppedError("SIGTERM was received")

    first = Trainer(config(target_field="choices", batch_size=1))
    first.inference(QUESTIONS[:1], output="")  # the weights are read
    original = scoring.score_groups
    answers = iter([original, stopping])
    monkeypatch.setattr(scoring, "score_groups", lambda *given, **options: next(answers)(*given, **options))
    with pytest.raises(JobStoppedError):
        first.inference(QUESTIONS)
    with pytest.raises(ValueError, match='predict.target_delimiter was "", is " "'):
        Trainer(config(target_field="choices", target_delimiter=" ")).inference(QUESTIONS)


def test_a_training_trainer_scores_with_the_weights_of_the_moment():
    settings = {
        "run_mode": "train",
        "training": {"steps": 2, "local_batch_size": 2, "global_batch_size": 2},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-2},
        "checkpoint": {"load_path": str(CHECKPOINTS / "qwen3"), "save_path": "saved"},
        "train_dataset": {"dataloader": {"type": "TextDataset", "path": "t.txt", "seq_length": 16}},
        "predict": {"task": "score", "progress": False},
    }
    pathlib.Path("t.txt").write_text("the cat and the dog\n" * 20, encoding="utf-8")
    trainer = Trainer(settings)
    before = trainer.inference(["the cat and the dog"])
    trainer.train()
    (after,) = trainer.inference(["the cat and the dog"])
    assert after[1] > before[0][1]


class Successor(nn.Cell):
    """A model of somebody else: logits of all positions, no cache, no mask."""

    def construct(self, input_ids):
        return ops.one_hot((input_ids + 1) % 320, 320) * 4.0


def test_a_model_of_the_callers_own_is_scored_through_its_logits():
    trainer = Trainer(config(target_field="t", batch_size=1), model=Successor())
    ((_, found),) = trainer.inference([{"instruction": "a", "t": "bcx"}], output="")
    normaliser = np.log(np.exp(4) + 319)
    assert found == pytest.approx(2 * 4 - 3 * normaliser, abs=1e-3)


def test_a_tokenizer_without_a_prefix_token_is_refused_before_the_model_is_built(tmp_path):
    shutil.copytree(CHECKPOINTS / "qwen3", tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer_config.json").write_text("{}")
    settings = config(rolling=True) | {"checkpoint": {"load_path": str(tmp_path / "copy")}}
    for check in (Trainer, lambda tree: validate(load_config(tree))):
        with pytest.raises(ValueError, match="neither a bos_token nor an eos_token"):
            check(settings)


def test_what_has_no_effect_is_named():
    settings = config(skip_special_tokens=False, refill=True, inference={"max_new_tokens": 5})
    settings["generation"] = {"do_sample": True, "seed": 3, "prefill_chunk_size": 4}
    (warning,) = load_config(settings).warnings
    assert warning == (
        "no effect with predict.task: score: inference.max_new_tokens, generation.do_sample, generation.seed, "
        "predict.skip_special_tokens, predict.refill"
    )
    settings = config(task="generate", target_field="t", rolling=True, share_prefix=False)
    (warning,) = load_config(settings).warnings
    assert warning == "no effect with predict.task: generate: predict.target_field, predict.rolling"


def test_a_delimiter_without_a_target_is_named():
    assert load_config(config(target_delimiter=" ")).warnings == [
        "no effect without predict.target_field: predict.target_delimiter"
    ]


@pytest.mark.parametrize("wanted", ["auto", True, False])
def test_a_model_without_a_cache_cannot_share_and_says_why_if_that_was_asked_for(wanted, caplog):
    class NoCache(nn.Cell):
        def construct(self, input_ids):
            return input_ids

    with caplog.at_level("WARNING", "mindformers_ext"):
        assert scoring.shares_contexts(wanted, NoCache()) is False
    told = "predict.share_prefix: every prompt is computed as a whole: NoCache.construct takes no past_key_values"
    assert (told in " ".join(caplog.messages)) is (wanted is True)


def test_arguments_without_effect_are_named(caplog):
    trainer = Trainer(config())
    with caplog.at_level("WARNING", "mindformers_ext"):
        trainer.inference(["the cat"], max_new_tokens=3, output="", temperature=2.0)
    told = " ".join(caplog.messages)
    assert "no effect with predict.task: score: temperature" in told
    assert "no effect with predict.task: score: max_new_tokens" in told


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"answer_field": "a"}, "predict.answer_field: needs predict.target_field"),
        ({"truncation": "left"}, "predict.truncation: needs predict.target_field"),
        ({"truncation": "right", "target_field": "t"}, "predict.truncation: expected"),
        ({"rolling": True, "target_field": "t"}, "predict.rolling: excludes target_field"),
        ({"target_field": ""}, "predict.target_field: expected"),
        ({"task": "rank"}, "predict.task: expected"),
        ({"share_prefix": "yes please"}, "predict.share_prefix: expected"),
        ({"share_prompts": False}, "predict.share_prompts: unknown key; did you mean predict.share_prefix"),
    ],
)
def test_keys_that_cannot_work_are_refused_when_the_yaml_is_read(keys, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config(**keys))

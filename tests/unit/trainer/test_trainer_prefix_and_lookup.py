"""A run shares what its prompts have in common and decodes ahead, and writes what it writes without."""

import json
import pathlib

import pytest

from mindformers_ext.config import ConfigError
from mindformers_ext.trainer import Trainer

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
HEADER = "Answer in one word. The sky is blue, the sun is warm, the sea is deep, the snow is cold. Now, what is this?"
PROMPTS = [f"{HEADER} {rest}" for rest in ("a", "one and two", "the quick brown fox", "b", "x y")]


def run(tmp_path, family="qwen3", generation=None, **predict):
    """Rows and metrics of a run."""
    output = tmp_path / "out.jsonl"
    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(CHECKPOINTS / family)},
        "inference": {"input_data": PROMPTS, "max_new_tokens": 6, "batch_size": 2, "output": str(output)},
        "generation": {"eos_token_id": None, **(generation or {})},
        "predict": {"progress": False, "resume": False, **predict},
    }
    config["inference"]["batch_size"] = predict.pop("batch_size", 2)
    config["predict"].pop("batch_size", None)
    Trainer(config).inference()
    return output.read_bytes(), json.loads((tmp_path / "out.jsonl.metrics.json").read_text())


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_run_shares_its_header_unless_told_otherwise(tmp_path, batch_size):
    plain, metrics = run(tmp_path, share_prefix=False, batch_size=batch_size)
    assert metrics["shared_prefixes"] == {"shared_tokens": 0, "computed_tokens": 0, "bytes": 0}
    shared, metrics = run(tmp_path, batch_size=batch_size)
    assert shared == plain
    counts = metrics["shared_prefixes"]
    assert counts["shared_tokens"] >= 3 * counts["computed_tokens"] > 3 * 32
    assert counts["bytes"] > 0


def test_why_nothing_is_shared_is_said_once_if_it_was_asked_for(tmp_path, log):
    run(tmp_path, generation={"use_cache": False})
    assert "share_prefix" not in log.text
    run(tmp_path, generation={"use_cache": False}, share_prefix=True)
    assert [line for line in log.messages if "share_prefix" in line] == [
        "predict.share_prefix: every prompt is computed as a whole: use_cache is false, so nothing is remembered of a "
        "prompt"
    ]


def test_a_wrong_value_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"share_prefix.*(true|auto)"):
        run(tmp_path, share_prefix="always")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens"),
        ({"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 0}, "max_matching_ngram_size"),
        ({"prompt_lookup_num_tokens": 2, "num_beams": 2}, "set num_beams to 1"),
        ({"prompt_lookup_num_tokens": 2, "use_cache": False}, "without a cache drafts save nothing"),
    ],
)
def test_options_of_lookup_that_cannot_be_are_refused(tmp_path, options, problem):
    with pytest.raises(ConfigError, match=problem):
        run(tmp_path, generation=options)


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "seed": 3, "temperature": 0.3}])
def test_lookup_writes_the_same_file_and_counts_its_drafts(tmp_path, sampled):
    plain, metrics = run(tmp_path, generation=sampled)
    assert metrics["prompt_lookup"] == {"drafted": 0, "accepted": 0}
    ahead, metrics = run(tmp_path, generation={"prompt_lookup_num_tokens": 3, **sampled})
    assert ahead == plain
    assert metrics["prompt_lookup"]["drafted"] > 0
    assert metrics["decode"]["tokens"] == 5 * 5


def test_an_option_without_effect_is_named(tmp_path, log):
    run(tmp_path, generation={"max_matching_ngram_size": 3})
    assert "max_matching_ngram_size has no effect without prompt_lookup_num_tokens" in log.text


def test_several_rows_of_a_model_that_takes_nothing_back_are_refused_before_the_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_load_inference_checkpoint", lambda self: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=r"generation\.prompt_lookup_num_tokens: .* \(inference\.batch_size: 1\)"):
        run(tmp_path, "qwen3_5", {"prompt_lookup_num_tokens": 3})


def test_a_job_goes_on_with_lookup_and_sharing_changed(tmp_path):
    run(tmp_path)
    rows, _ = run(tmp_path, generation={"prompt_lookup_num_tokens": 3}, share_prefix=False, resume=True)
    assert len(rows.splitlines()) == len(PROMPTS)

"""The metrics file beside an output says what the run was and did."""

import json
import pathlib

import pytest

from mindformers_ext.trainer import Trainer

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"


def config(output, **predict):
    return {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(CHECKPOINT)},
        "inference": {
            "max_new_tokens": 4,
            "batch_size": 2,
            "output": str(output),
            "input_data": ["one", "", "two", "x"],
        },
        "generation": {"do_sample": True, "seed": 5, "top_k": 3, "eos_token_id": None},
        "predict": {"progress": False, **predict},
    }


def test_the_file_counts_what_the_output_holds(tmp_path):
    output = tmp_path / "out.jsonl"
    Trainer(config(output)).inference()
    metrics = json.loads((tmp_path / "out.jsonl.metrics.json").read_text())
    assert metrics["records"] == {"total": 4, "answered": 3, "failed": 1}
    assert (metrics["finish_reasons"], metrics["errors"]) == ({"length": 3}, {"schema": 1})
    assert metrics["tokens"]["new"] == 12
    assert metrics["decode"]["tokens"] == 9  # the first token of an answer comes from the prefill
    assert (metrics["seed"], metrics["batch_size"], metrics["layout"]["tp"]) == (5, 2, 1)
    assert metrics["decoding"]["top_k"] == {"value": 3, "origin": "yaml"}
    assert metrics["traffic"] == {}
    (rank,) = metrics["ranks"]
    assert rank["weight_bytes"] == 4 * 217_920
    assert rank["forwards"] == 2 * 4  # two batches of four tokens
    heads, dim, layers, longest = 2, 32, 4, 128
    assert 0 < rank["cache_bytes"] <= 2 * layers * 2 * heads * dim * longest * 4
    assert rank["peak_memory_bytes"] > rank["weight_bytes"]
    assert 0 < metrics["latency_seconds"]["p50"] <= metrics["latency_seconds"]["max"] <= metrics["wall_seconds"]
    assert metrics["versions"]["mindspore"]


def test_no_file_where_none_is_wanted_or_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(config(tmp_path / "out.jsonl", metrics_file=False))
    trainer.inference()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    trainer.config.predict.metrics_file = True
    trainer.inference(output="")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_output_whose_metrics_would_replace_a_folder_is_refused(tmp_path):
    (tmp_path / "out.jsonl.metrics.json").mkdir()
    with pytest.raises(ValueError, match=r"out\.jsonl\.metrics\.json"):
        Trainer(config(tmp_path / "out.jsonl"))

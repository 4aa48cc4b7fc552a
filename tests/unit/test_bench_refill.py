"""scripts/bench_refill.py draws what it says, and measures the same answers on both sides."""

import argparse
import importlib
import pathlib

import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_refill")


@pytest.mark.parametrize(("kind", "mean"), [("uniform", 132), ("log-uniform", 72)])
def test_lengths_are_within_their_bounds_and_repeatable(bench, kind, mean):
    drawn = bench.draw_lengths(kind, 4000, 8, 256, seed=1)
    assert min(drawn) == 8 and max(drawn) in (255, 256)
    assert abs(np.mean(drawn) - mean) < 5
    assert drawn == bench.draw_lengths(kind, 4000, 8, 256, seed=1)


def test_both_sides_are_measured(bench):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = bench.random_model("qwen3", "float32", **shape, **heads)
    options = argparse.Namespace(prompt_length=5, longest=20, batch_size=3, runs=1)
    found = bench.measure(model, [2, 20, 3, 1, 9, 2, 2, 14], options)
    assert found["refill"]["forwards"] - 8 < found["batches"]["forwards"] - 3
    assert found["ratio"] > 0 and found["refill"]["cache_bytes"] > 0

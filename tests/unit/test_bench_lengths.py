"""scripts/bench_lengths.py knows every family, and its table shows what was measured."""

import argparse
import importlib
import pathlib

import pytest

from mindformers_ext.models import transformer_config
from mindformers_ext.models.families import FAMILIES

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_lengths")


def test_every_family_has_a_small_shape(bench):
    configs = [transformer_config({"model_type": family, **shape}) for family, shape in bench.SHAPES.items()]
    assert {config.model_type for config in configs} == set(FAMILIES)
    assert all(config.hidden_size <= 512 and config.num_layers <= 8 for config in configs)


def test_table_shows_costs_relative_to_the_first_length(bench):
    rows = [
        {"family": "qwen3", "batch_size": 4, "step_ms": 2.0, "cache_bytes_per_token": 8192.0},
        {"family": "qwen3", "batch_size": 4, "step_ms": 3.0, "cache_bytes_per_token": 1024.4},
    ]
    assert bench.table_row(rows) == "| qwen3 | 4 | 2.00 | x 1.50 | 8,192 | 1,024 |"
    lines = bench.header([64, 512]).splitlines()
    assert lines[0].startswith("| family | batch | step after 64, ms | after 512 |")
    assert [line.count("|") for line in lines] == [7, 7]


def test_cache_bytes_are_those_of_one_token(bench):
    options = argparse.Namespace(steps=1, runs=1)
    measured = bench.measure(bench.random_model("qwen3", "float32", **bench.SHAPES["qwen3"]), 2, 3, options)
    layers, heads, dim = (bench.COMMON[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    assert measured["cache_bytes_per_token"] == 4 * 2 * layers * heads * dim
    assert measured["step_ms"] > 0

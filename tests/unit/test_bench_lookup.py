"""The models and prompts of scripts/bench_lookup.py and scripts/bench_prefix.py are what they say."""

import argparse
import importlib
import json
import pathlib

import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


def test_the_copier_answers_with_the_text_of_its_prompt_and_drafts_are_right():
    bench, shape = importlib.import_module("bench_lookup"), importlib.import_module("bench_generate").SHAPE
    small = {"num_hidden_layers": 2, "vocab_size": 600, "intermediate_size": 64, "rope_theta": 1e6}
    model = bench.random_model("qwen3", "float32", **shape | small)
    bench.make_copier(model, np.random.default_rng(0))
    options = argparse.Namespace(prompts=3, spans=3, span=11, batch_size=2)
    prompts, texts = bench.make_prompts(options, small["vocab_size"])
    for lookup in (None, 5):
        answers, stats = bench.timed(model, prompts, options, lookup)
        assert answers == texts
    assert stats.accepted_tokens > 0.8 * stats.drafted_tokens > 0


def test_prompts_share_their_header_and_ids_are_the_same():
    bench = importlib.import_module("bench_prefix")
    folder = pathlib.Path(__file__).parents[1] / "data" / "checkpoints" / "qwen3"
    keys = json.loads((folder / "config.json").read_text())
    model = bench.random_model(keys.pop("model_type"), "float32", **keys)
    options = argparse.Namespace(prompts=5, header=40, rest=4, new_tokens=2, batch_size=2)
    prompts = bench.make_prompts(options, keys["vocab_size"])
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 1 and len({tuple(prompt) for prompt in prompts}) == 5
    (_, shared, stats), (_, whole, _) = (bench.timed(model, prompts, options, share) for share in (True, False))
    assert shared == whole
    assert stats.prefix_tokens == 40 and stats.shared_tokens > 4 * 38

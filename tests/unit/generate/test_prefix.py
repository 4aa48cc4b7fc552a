"""Prompts that begin alike share the state of their beginning, and get the tokens that they get without."""

import functools
import json
import pathlib

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.checkpoint import load_weights
from mindformers_ext.generate import GenerationConfig, GenerationStats, generate_rows
from mindformers_ext.generate.prefix import PrefixCache, shared_prefix, sharing_obstacle
from mindformers_ext.models import transformer_config
from mindformers_ext.models.gpt_model import GPTModel

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())


@functools.cache
def load(family):
    folder = CHECKPOINTS / family
    model = GPTModel(transformer_config({}, json.loads((folder / "config.json").read_text())))
    load_weights(folder, model.weight_layout(), model.set_weight)
    model.set_train(False)
    return model


def random_ids(seed, count):
    return np.random.default_rng(seed).integers(3, 90, count).tolist()


def answers(model, prompts, prefixes=None, stats=None, **options):
    config = GenerationConfig(**{"max_new_tokens": 6} | options)
    return [row.token_ids for row in generate_rows(model, prompts, config, stats, prefixes=prefixes)]


HEADER = random_ids(0, 21)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_with_a_header_get_the_tokens_that_they_get_without(family):
    model, stats = load(family), GenerationStats()
    prefixes = PrefixCache(model, stats, least=4)
    batches = [
        [HEADER + random_ids(10, 5), HEADER + random_ids(11, 1), HEADER + random_ids(12, 9)],  # a rest of one token
        [HEADER + random_ids(13, 3)],
        [HEADER + random_ids(14, 2), HEADER + random_ids(15, 2)],
        [HEADER, HEADER + random_ids(16, 4)],  # one prompt begins the other
        [HEADER, HEADER],
        [random_ids(17, 9), random_ids(18, 30)],  # nothing in common
        [HEADER + random_ids(19, 4)],
    ]
    for prompts in batches:
        assert answers(model, prompts, prefixes, stats) == answers(model, prompts)
    assert stats.shared_tokens >= 20 * 9
    assert 0 < stats.prefix_tokens <= 3 * len(HEADER)
    assert stats.prefix_bytes > 0

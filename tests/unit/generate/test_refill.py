"""Rows that are replaced one by one get the tokens that they get in batches."""

import functools
import json
import pathlib

import numpy as np
import pytest
from stubs import Hashed, Sum

from mindformers_ext.checkpoint import load_weights
from mindformers_ext.generate import GenerationConfig, GenerationStats, generate_rows
from mindformers_ext.generate.refill import RefilledBatch, refill_obstacle
from mindformers_ext.models import transformer_config
from mindformers_ext.models.gpt_model import GPTModel

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())


@functools.cache
def load(family):
    folder = CHECKPOINTS / family
    model = GPTModel(transformer_config({}, json.loads((folder / "config.json").read_text())))
    load_weights(folder, model.weight_layout(), model.set_weight)
    return model


def prompts_of(count, vocab, longest=40, seed=5):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, count)
    return [random.integers(1, vocab, length).tolist() for length in lengths]


def refilled(model, prompts, config, size, decode=None, num_steps=None, stats=None):
    """Answers of all prompts, by index; the same as `generate_rows` gives."""
    batch = RefilledBatch(model, config, size, stats or GenerationStats(), decode)
    found, next_one, under_way = {}, 0, 0
    while next_one < len(prompts) or under_way:
        new = range(next_one, min(next_one + batch.room, len(prompts)))
        next_one, under_way = next_one + len(new), under_way + len(new)
        assert under_way <= size
        done = batch.advance([prompts[i] for i in new], list(new), num_steps, next_one < len(prompts))
        under_way -= len(done)
        for index, rows in done:
            assert index not in found
            found[index] = rows
    return [row for index in sorted(found) for row in found[index]]


def in_batches(model, prompts, config, size, decode=None):
    rows = []
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        rows += generate_rows(model, part, config, record_ids=range(start, start + len(part)), decode=decode)
    return rows


# Ids that end an answer, so many that answers have very different lengths.
OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "top_k": 20},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "sequences": {"do_sample": True, "seed": 4, "num_return_sequences": 3},
    "no-cache": {"use_cache": False, "do_sample": True, "seed": 9},
    "pieces": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
def test_pairs_of_keys_and_values_give_the_answers_of_batches(size, options):
    model, prompts = Hashed(3), prompts_of(20, 9, longest=12)
    config = GenerationConfig(max_new_tokens=30, eos_token_id=[2], output_logprobs=2, **options)
    expected = in_batches(model, prompts, config, 4)
    assert len({len(row.token_ids) for row in expected}) > 3
    found = refilled(model, prompts, config, size)
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    assert found == expected


@pytest.mark.parametrize("options", [o for n, o in OPTIONS.items() if n != "no-cache"], ids=[n for n in OPTIONS if n != "no-cache"])
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_answers_of_batches(family, size, options):
    model = load(family)
    vocab = model.config.vocab_size
    prompts = prompts_of(14, vocab)
    ends = list(range(0, vocab, 12))
    config = GenerationConfig(max_new_tokens=40, eos_token_id=ends, **options)
    expected = in_batches(model, prompts, config, 4)
    assert len({len(row.token_ids) for row in expected}) > 5
    found = refilled(model, prompts, config, size)
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    assert [row.finish_reason for row in found] == [row.finish_reason for row in expected]

"""Penalties, EOS lists and beams equal transformers on checkpoints it wrote, alone and in one left-padded batch."""

import numpy as np
import pytest
from checkpoint_models import FAMILIES, load_with_cases

from mindformers_ext.generate import GenerationConfig, generate_rows

NUM_CASES = 5
BATCHES = ["alone", "in one batch"]


def answers(family, number, batch, **options):
    """The rows of case ``number``, whose prompt runs alone or with the other four."""
    model, cases = load_with_cases(family)
    config = GenerationConfig(max_new_tokens=24, **options)
    prompts = [case["input_ids"] for case in cases]
    each = config.num_return_sequences
    if batch == "alone":
        return generate_rows(model, [prompts[number]], config)
    return generate_rows(model, prompts, config)[each * number : each * (number + 1)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("number", range(NUM_CASES))
@pytest.mark.parametrize("family", FAMILIES)
class TestLikeTransformers:
    def test_repetition_penalty(self, family, number, batch):
        (row,) = answers(family, number, batch, repetition_penalty=1.3)
        assert row.token_ids == load_with_cases(family)[1][number]["repetition_penalty_1.3"]

    def test_eos_list(self, family, number, batch):
        expected = load_with_cases(family)[1][number]["eos_list"]
        (row,) = answers(family, number, batch, eos_token_id=expected["eos_token_id"])
        assert (row.token_ids, row.finish_reason) == (expected["ids"], "eos")

    @pytest.mark.parametrize("entry", range(3))
    def test_beams(self, family, number, batch, entry):
        expected = load_with_cases(family)[1][number]["beams"][entry]
        options = {name: expected[name] for name in ("length_penalty", "early_stopping", "eos_token_id")}
        rows = answers(family, number, batch, num_beams=4, num_return_sequences=3, pad_token_id=1, **options)
        longest = max(len(row.token_ids) for row in rows)
        assert [row.token_ids + [1] * (longest - len(row.token_ids)) for row in rows] == expected["sequences"]
        np.testing.assert_allclose([row.score for row in rows], expected["scores"], atol=1e-4, rtol=5e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_without_a_cache_are_the_same(family):
    model, cases = load_with_cases(family)
    prompts = [case["input_ids"] for case in cases[:3]]
    options = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 3}
    cached, recomputed = (
        generate_rows(model, prompts, GenerationConfig(**options, use_cache=use_cache)) for use_cache in (True, False)
    )
    assert [row.token_ids for row in cached] == [row.token_ids for row in recomputed]


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"repetition_penalty": 1.3}], ids=["beams", "greedy"])
def test_the_pad_id_does_not_matter(options):
    def ids(pad):
        rows = (answers("qwen3", number, "in one batch", pad_token_id=pad, **options) for number in range(2))
        return [row.token_ids for case in rows for row in case]

    frequent = load_with_cases("qwen3")[1][0]["greedy"][0]
    assert ids(0) == ids(2) == ids(frequent)

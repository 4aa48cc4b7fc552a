"""Prompts that begin alike share the state of their beginning, and get the tokens that they get without."""

import pathlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_models import FAMILIES, load
from mindspore import Tensor
from stubs import Sum

from mindformers_ext.generate import GenerationConfig, GenerationStats, generate_rows
from mindformers_ext.generate.prefix import PrefixCache, shared_prefix, sharing_obstacle


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
    assert stats.shared_tokens >= 7 * len(HEADER)
    assert 0 < stats.prefix_tokens <= 3 * len(HEADER)
    assert stats.prefix_bytes > 0


def test_a_header_is_found_again_with_one_prompt_at_a_time():
    model, stats = load("qwen3"), GenerationStats()
    prefixes = PrefixCache(model, stats, least=4)
    for seed in range(4):
        prompts = [HEADER + random_ids(seed, 4)]
        assert answers(model, prompts, prefixes, stats) == answers(model, prompts)
    assert stats.prefix_tokens == len(HEADER)  # by the second prompt, which knows of the first
    assert stats.shared_tokens == 3 * len(HEADER)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "deepseek_v4"])
def test_what_two_prompts_have_in_common_by_chance_costs_no_header(family):
    model, stats = load(family), GenerationStats()
    prefixes = PrefixCache(model, stats, least=4)
    for seed in range(5):
        more = HEADER + random_ids(seed, 2)  # a little more than the header
        prompts = [more + random_ids(10 + seed, 3), more + random_ids(20 + seed, 5)]
        assert answers(model, prompts, prefixes, stats) == answers(model, prompts)
    assert stats.prefix_tokens <= 2 * len(HEADER) + 2


@pytest.mark.parametrize(("rows", "states"), [(2, 2), (1, 1)])
def test_the_last_two_states_are_kept_if_they_have_no_more_tokens_than_a_batch(rows, states):
    model, stats = load("qwen3"), GenerationStats()
    prefixes = PrefixCache(model, stats, least=4)
    headers = [random_ids(seed, 12) for seed in range(4)]
    for header in headers:
        for _ in range(3 - rows):  # alone, a prompt is known to begin like another from the second one on
            answers(model, [header + [5], header + [6, 7]][:rows], prefixes, stats, max_new_tokens=1)
    one = shared_prefix(model, headers[0]).cache.nbytes
    assert stats.prefix_bytes == states * one
    assert stats.prefix_tokens == 4 * 12


def test_prompts_too_much_alike_for_a_forward_of_their_own_are_computed_as_a_whole():
    model, stats = load("qwen3"), GenerationStats()
    prefixes = PrefixCache(model, stats)
    prompts = [random_ids(0, 31) + random_ids(1, 3), random_ids(0, 31) + random_ids(2, 4)]
    assert answers(model, prompts, prefixes, stats) == answers(model, prompts)
    assert (stats.shared_tokens, stats.prefix_tokens) == (0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "seed": 2, "num_return_sequences": 2},
        {"prefill_chunk_size": 3},
        {"repetition_penalty": 1.3, "eos_token_id": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "deepseek_v4"])
def test_every_way_of_decoding_starts_from_a_shared_state(family, options):
    model, stats = load(family), GenerationStats()
    prefixes = PrefixCache(model, stats, least=4)
    prompts = [HEADER + random_ids(seed, 1 + 3 * seed) for seed in range(3)]
    assert answers(model, prompts, prefixes, stats, **options) == answers(model, prompts, **options)
    # Rows with a shorter rest read again what they lack beside the longest one, if their keys can be cut there.
    again = 3 + 6 if family == "qwen3" else 0
    assert stats.shared_tokens == 3 * len(HEADER) - again


def test_a_batch_that_fails_frees_what_was_shared_and_the_next_one_goes_on():
    model, stats = load("qwen3"), GenerationStats()
    prefixes, calls = PrefixCache(model, stats, least=4), []
    prompts = [HEADER + [5, 6], HEADER + [7]]

    def fails():
        calls.append(None)
        if len(calls) == 2:  # the header is computed, the rest is not
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        generate_rows(model, prompts, GenerationConfig(max_new_tokens=2), before_forward=fails, prefixes=prefixes)
    assert answers(model, prompts, prefixes, stats) == answers(model, prompts)
    assert stats.prefix_tokens == 2 * len(HEADER)


class _Unit:
    """A group of two processes, of which the other one found something else."""

    size = 2

    def all_gather(self, found):
        return np.stack((found, found + 1))


def test_processes_that_kept_different_states_start_anew_together():
    model, stats = load("qwen3"), GenerationStats()
    prefixes = PrefixCache(model, stats, least=4)
    prompts = [HEADER + [5, 6], HEADER + [7]]
    answers(model, prompts, prefixes, stats)
    prefixes._unit = _Unit()
    assert answers(model, prompts, prefixes, stats) == answers(model, prompts)
    assert stats.prefix_tokens == 2 * len(HEADER)


def test_the_reasons_why_nothing_is_shared():
    assert sharing_obstacle(load("qwen3")) is None
    assert "use_cache is false" in sharing_obstacle(load("qwen3"), use_cache=False)
    assert "Sum has no new_cache()" in sharing_obstacle(Sum())
    split = SimpleNamespace(
        new_cache=None, model_shard=SimpleNamespace(context=SimpleNamespace(cp=SimpleNamespace(size=2)))
    )
    assert "context parallelism" in sharing_obstacle(split)
    with pytest.raises(ValueError, match="cannot share a prefix: Sum has no"):
        shared_prefix(Sum(), [1, 2])


def test_without_a_cache_prompts_are_computed_as_a_whole():
    model, stats = load("qwen3"), GenerationStats()
    prompts = [HEADER + [5, 6], HEADER + [7]]
    prefixes = PrefixCache(model, stats, least=4)
    assert answers(model, prompts, prefixes, stats, use_cache=False) == answers(model, prompts)
    assert stats.shared_tokens == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_example_of_the_page_continues_one_prompt_in_several_ways(family):
    page = (pathlib.Path(__file__).parents[3] / "docs" / "batch_jobs.md").read_text(encoding="utf-8")
    (code,) = (
        body for body in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if "prefix" in body
    )
    model = load(family)
    rows = [random_ids(seed, 7) for seed in range(4)]
    names = {
        "shared_prefix": shared_prefix,
        "model": model,
        "prompt_ids": HEADER,
        "continuations": Tensor(np.array(rows, np.int32)),
    }
    for _ in range(2):  # the state of the prefix is not used up
        exec(code, names)
        for row, logits in zip(rows, names["logits"].asnumpy(), strict=True):
            whole = model(Tensor(np.array([HEADER + row], np.int32)))["logits"].asnumpy()[0]
            np.testing.assert_allclose(logits, whole[len(HEADER) :], atol=2e-4)

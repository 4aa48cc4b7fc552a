"""Rows that are replaced one by one get the tokens that they get in batches."""

from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_models import FAMILIES, load
from mindspore import Tensor, nn
from stubs import Hashed, Sum

from mindformers_ext.generate import GenerationConfig, GenerationStats, generate_rows
from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.generate.prefix import PrefixCache
from mindformers_ext.generate.refill import RefilledBatch, refill_obstacle


def prompts_of(count, vocab, longest, seed=5):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, count)
    return [random.integers(1, vocab, length).tolist() for length in lengths]


def letters(prompt_ids, new_ids):
    """The text of ids, for stop strings."""
    return "".join(chr(97 + token % 26) for token in new_ids)


def refilled(model, prompts, config, size, num_steps=None, stats=None, prefixes=None):
    """The answers of all prompts in their order, as `generate_rows` gives them."""
    batch = RefilledBatch(model, config, size, stats or GenerationStats(), letters, prefixes=prefixes)
    found, begun = {}, 0
    while len(found) < len(prompts):
        new = range(begun, min(begun + batch.room, len(prompts)))
        begun += len(new)
        done = batch.advance([prompts[i] for i in new], list(new), num_steps, begun < len(prompts))
        assert not found.keys() & {index for index, _ in done}
        found |= dict(done)
    return [row for index in sorted(found) for row in found[index]]


def in_batches(model, prompts, config, size):
    rows = []
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        rows += generate_rows(model, part, config, record_ids=range(start, start + len(part)), decode=letters)
    return rows


OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "top_k": 20},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 3, "bad_words_ids": [[5, 1]]},
    "stop-strings": {"stop_strings": ["b", "ha"], "min_new_tokens": 2, "do_sample": True, "seed": 1},
    "sequences": {"do_sample": True, "seed": 4, "num_return_sequences": 3},
    "no-cache": {"use_cache": False, "do_sample": True, "seed": 9},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_any_size_gives_the_answers_of_batches(options):
    model, prompts = Hashed(3), prompts_of(20, 9, longest=12)
    config = GenerationConfig(max_new_tokens=20, eos_token_id=[2], output_logprobs=2, **options)
    expected = in_batches(model, prompts, config, 4)
    assert len({len(row.token_ids) for row in expected}) > 3
    for size in (1, 2, 3, 5, 20):
        assert refilled(model, prompts, config, size) == expected


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, "stop-strings") for family in FAMILIES] + [("qwen3", "greedy"), ("deepseek_v4", "penalties")],
)
def test_every_kind_of_cache_gives_the_answers_of_batches(family, name):
    model = load(family)
    vocab = model.config.vocab_size
    prompts = prompts_of(8, vocab, longest=40)
    # So many ids end an answer that answers have very different lengths.
    ends = list(range(0, vocab, 15))
    config = GenerationConfig(max_new_tokens=20, eos_token_id=ends, prefill_chunk_size=16, **OPTIONS[name])
    expected = [(row.token_ids, row.finish_reason) for row in in_batches(model, prompts, config, 4)]
    assert len({len(ids) for ids, _ in expected}) > 3
    found = refilled(model, prompts, config, 3)
    assert [(row.token_ids, row.finish_reason) for row in found] == expected


@pytest.mark.parametrize("family", ["deepseek_v4", "qwen3_5", "deepseek_v3"])
def test_long_prompts_come_in_and_pads_are_taken_away(family, monkeypatch):
    """Both move every row of the cache."""
    shifts = []
    shift = BatchForward._shift
    monkeypatch.setattr(BatchForward, "_shift", lambda self, by: (shifts.append(by), shift(self, by)))
    model = load(family)
    vocab = model.config.vocab_size
    few = prompts_of(5, vocab, longest=4)
    prompts = [*few, [5] * 60, *few, [3, 4] * 45, *few]
    config = GenerationConfig(max_new_tokens=12, eos_token_id=list(range(0, vocab, 9)), do_sample=True, seed=2)
    expected = [generate_rows(model, [prompt], config, record_ids=[i])[0] for i, prompt in enumerate(prompts)]
    found = refilled(model, prompts, config, 3)
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    assert min(shifts) < 0 < max(shifts)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v4"])
def test_records_that_come_later_share_the_beginning_of_those_before(family):
    model, stats = load(family), GenerationStats()
    header = prompts_of(1, model.config.vocab_size, longest=40)[0] * 2
    prompts = [[*header, 5, index + 3] for index in range(5)]
    config = GenerationConfig(max_new_tokens=6, eos_token_id=list(range(0, model.config.vocab_size, 9)))
    expected = in_batches(model, prompts, config, 1)
    found = refilled(model, prompts, config, 2, stats=stats, prefixes=PrefixCache(model, stats, least=4))
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    assert stats.shared_tokens >= 4 * len(header)


def test_a_failure_frees_the_shared_beginnings():
    model, stats = load("qwen3"), GenerationStats()
    prefixes, calls = PrefixCache(model, stats, least=4), []

    def fail_late():
        calls.append(None)
        if len(calls) == 4:
            raise MemoryError

    batch = RefilledBatch(model, GenerationConfig(max_new_tokens=9), 2, stats, None, lambda: fail_late, prefixes)
    prompts = [[*range(1, 20), 3], [*range(1, 20), 4, 5]]
    with pytest.raises(MemoryError):
        batch.advance(prompts, [0, 1])
    assert stats.prefix_bytes > 0 and not prefixes._kept
    batch.reset(2)
    found = dict(batch.advance(prompts, [0, 1]))
    assert [found[index][0] for index in (0, 1)] == in_batches(model, prompts, GenerationConfig(max_new_tokens=9), 1)


def test_a_number_of_steps_ends_a_stretch_whatever_is_done():
    model, prompts = Hashed(4), prompts_of(15, 9, longest=6)
    config = GenerationConfig(max_new_tokens=20, eos_token_id=[2])
    assert refilled(model, prompts, config, 4, num_steps=3) == in_batches(model, prompts, config, 4)


def test_it_takes_fewer_forwards_than_batches_and_counts_the_same_tokens():
    model, prompts = Hashed(3), prompts_of(30, 9, longest=6)
    config = GenerationConfig(max_new_tokens=40, eos_token_id=[2], do_sample=True, seed=8)
    plain, refill = GenerationStats(), GenerationStats()
    for start in range(0, 30, 5):
        generate_rows(model, prompts[start : start + 5], config, plain, record_ids=range(start, start + 5))
    refilled(model, prompts, config, 5, stats=refill)
    steps = plain.forwards - 6
    assert refill.forwards - 30 < 0.7 * steps
    assert (refill.prefill_tokens, refill.decode_tokens) == (plain.prefill_tokens, plain.decode_tokens)
    assert refill.cache_bytes > 0


def test_the_cache_stays_as_small_as_the_longest_row_allows():
    model, config = load("qwen3"), GenerationConfig(max_new_tokens=30, eos_token_id=list(range(0, 320, 9)))
    stats, alone = GenerationStats(), GenerationStats()
    prompts = prompts_of(40, model.config.vocab_size, longest=100)
    refilled(model, prompts, config, 4, stats=stats)
    generate_rows(model, [[1] * 100] * 4, GenerationConfig(max_new_tokens=30), alone)
    assert stats.cache_bytes <= 4 / 3 * alone.cache_bytes + 1024


def test_after_a_reset_records_can_come_again():
    model, config = Hashed(3), GenerationConfig(max_new_tokens=9)
    batch = RefilledBatch(model, config, 3, GenerationStats())
    batch.advance([[1], [2, 3]], [0, 1], 2)
    assert batch.room == 1
    batch.reset(2)
    assert batch.room == 2
    ((index, rows),) = batch.advance([[2, 3]], [1])
    assert index == 1 and rows == in_batches(model, [[2, 3]], config, 1)


def test_a_batch_that_has_shrunk_grows_again():
    model, prompts = Hashed(3), [[1], [2, 3], [4, 4, 4], [5], [6, 7], [8]]
    config = GenerationConfig(max_new_tokens=30, eos_token_id=[2], do_sample=True, seed=6)
    batch = RefilledBatch(model, config, 6, GenerationStats())
    found = dict(batch.advance(prompts[:4], range(4), 6, more_to_come=False))
    assert 2 <= len(found) < 4
    found |= dict(batch.advance(prompts[4:], [4, 5], 30))
    assert [found[index][0] for index in range(6)] == in_batches(model, prompts, config, 6)


def test_what_is_not_possible_says_why():
    class Unmasked(nn.Cell):
        def construct(self, input_ids, position_ids):
            return Tensor(np.zeros((*input_ids.shape, 3), np.float32))

    assert refill_obstacle(Sum(), GenerationConfig(), 8) is None
    assert "beams" in refill_obstacle(Sum(), GenerationConfig(num_beams=2), 8)
    assert "lookup" in refill_obstacle(Sum(), GenerationConfig(prompt_lookup_num_tokens=3), 8)
    assert "max_time" in refill_obstacle(Sum(), GenerationConfig(max_time=9.0), 8)
    assert "takes no attention_mask" in refill_obstacle(Unmasked(), GenerationConfig(), 8)
    split = Sum()
    split.model_shard = SimpleNamespace(context=SimpleNamespace(cp=SimpleNamespace(size=2)))
    assert "more than its part of the cache" in refill_obstacle(split, GenerationConfig(), 8)
    many = GenerationConfig(output_logprobs=1000, max_new_tokens=4096)
    assert refill_obstacle(Sum(), many, 4) is None
    assert "output_logprobs 1000 of 8 prompts" in refill_obstacle(Sum(), many, 8)

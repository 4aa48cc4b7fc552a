"""Sampling: the right distribution, and noise that depends on nothing but what is drawn."""

from types import SimpleNamespace

import numpy as np
import pytest
from rowtools import context
from stubs import BOS, EOS, A, B, Bigram, Sum, bigram_table

from mindformers_ext.generate import GenerationConfig, generate_rows, generation
from mindformers_ext.generate.noise import fresh_seed, row_keys, uniform
from mindformers_ext.generate.sampler import greedy_sample, sample, top_k_sample, top_p_sample

# 0.999 quantiles of the chi-square distribution by degrees of freedom.
CHI_SQUARE = {1: 10.828, 2: 13.816, 5: 20.515, 9: 27.877, 99: 148.230}
PROBS = np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])


def chi_square(counts, probs):
    expected = np.asarray(probs) * np.sum(counts)
    return ((np.asarray(counts) - expected) ** 2 / expected).sum()


def rows_of(scores, count):
    return np.repeat(np.asarray(scores, np.float32)[None], count, axis=0)


@pytest.mark.parametrize("seed", [0, 1, 7, 2**32 - 1])
@pytest.mark.parametrize("over", ["records", "sequences", "steps", "seeds"])
def test_2000_draws_follow_the_distribution_along_every_index(seed, over):
    scores, many, none = rows_of(np.log(PROBS), 2000), np.arange(2000), np.zeros(2000, int)
    if over in ("records", "sequences"):
        records, sequences = (many, none) if over == "records" else (none, many)
        where = context(*[[0]] * 2000, records=records, sequences=sequences, step=3)
        drawn = sample(scores, where, seed)
    elif over == "steps":
        drawn = [sample(scores[:1], context([0], step=step), seed)[0] for step in range(2000)]
    else:
        drawn = [sample(scores[:1], context([0]), other)[0] for other in range(seed % 1000, seed % 1000 + 2000)]
    assert chi_square(np.bincount(drawn, minlength=6), PROBS) < CHI_SQUARE[5]


def test_long_rows_are_drawn_from_the_same_distribution():
    # 100 groups of 50 tokens; a row of 5000 takes the way of chunks, and of candidates when most are banned.
    scores = np.repeat(np.log(np.arange(1, 101)), 50).astype(np.float32)
    where = context(*[[0]] * 4000)
    counts = np.bincount(sample(rows_of(scores, 4000), where, 5) // 50, minlength=100)
    assert chi_square(counts, np.arange(1, 101) / 5050) < CHI_SQUARE[99]
    few = np.full(5000, -np.inf, np.float32)
    few[[10, 4000, 4999]] = np.log([0.5, 0.3, 0.2])
    drawn = sample(rows_of(few, 4000), where, 5)
    assert chi_square([np.sum(drawn == token) for token in (10, 4000, 4999)], [0.5, 0.3, 0.2]) < CHI_SQUARE[2]


def test_banned_tokens_change_no_noise_of_the_others():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(50, 3000)).astype(np.float32)
    where = context(*[[0]] * 50)
    drawn = sample(scores, where, 3)
    banned = scores.copy()
    banned[rng.random(scores.shape) < 0.95] = -np.inf
    banned[np.arange(50), drawn] = scores[np.arange(50), drawn]
    assert (sample(banned, where, 3) == drawn).all()


def test_consecutive_draws_are_independent():
    scores = rows_of(np.zeros(2), 4000)
    steps = [sample(scores, context(*[[0]] * 4000, step=step), 1) for step in (0, 1)]
    pairs = np.bincount(2 * steps[0] + steps[1], minlength=4)
    assert chi_square(pairs, [0.25] * 4) < 16.266  # 3 degrees of freedom
    neighbours = np.bincount(2 * steps[0][:-1] + steps[0][1:], minlength=4)
    assert chi_square(neighbours, [0.25] * 4) < 16.266


def test_uniform_noise_is_uniform_and_never_0_or_1():
    noise = uniform(row_keys(0, np.arange(20), np.zeros(20, int), 0), np.arange(1000)[None])
    assert noise.shape == (20, 1000) and noise.min() > 0 and noise.max() < 1
    assert chi_square(np.histogram(noise, 10, (0, 1))[0], [0.1] * 10) < CHI_SQUARE[9]


def split_mix(seed, index):
    """The number at ``index`` of the SplitMix64 sequence that starts at ``seed``, in plain integers."""
    bits = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def test_noise_of_a_token_is_a_fixed_function():
    # A seed must repeat a run in a later version, too.
    noise = uniform(row_keys(7, np.array([0, 1, 0]), np.array([0, 0, 1]), 2), np.array([[0, 151935]]))
    start = split_mix(7, -1)
    for row, (record, sequence) in enumerate([(0, 0), (1, 0), (0, 1)]):
        key = split_mix(split_mix(split_mix(start, record), sequence), 2)
        assert noise[row].tolist() == [((split_mix(key, token) >> 12) + 0.5) / 2**52 for token in (0, 151935)]


def test_a_row_is_drawn_the_same_alone_and_in_any_company():
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(20, 40)).astype(np.float32)
    records, sequences = rng.permutation(20), rng.integers(0, 3, 20)
    together = sample(scores, context(*[[0]] * 20, records=records, sequences=sequences, step=4), 9)
    for size in (1, 2, 3, 5):
        for start in range(0, 20, size):
            part = slice(start, start + size)
            where = context(*[[0]] * len(scores[part]), records=records[part], sequences=sequences[part], step=4)
            assert (sample(scores[part], where, 9) == together[part]).all()


@pytest.mark.parametrize("row", [[-np.inf] * 3, [np.nan, 0, 0], [np.inf, 0, 0]])
def test_a_row_without_a_finite_best_score_is_an_error(row):
    scores = np.array([[0.0, 1.0, 2.0], row], np.float32)
    for choose in (greedy_sample, lambda scores: sample(scores, context([0], [0]), 1)):
        with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
            choose(scores)


def test_extreme_scores_are_drawn_from_without_a_warning():
    with np.errstate(all="raise", under="ignore"):
        drawn = sample(np.array([[3e38, -3e38, 0.0], [-1e30, -2e30, -3e30]], np.float32), context([0], [0]), 1)
    assert drawn.tolist() == [0, 0]


def test_scores_that_swallow_the_noise_still_give_the_best():
    scores = rows_of([-1e17, -np.inf, 3e15], 2000)
    assert set(sample(scores, context(*[[0]] * 2000), 1)) == {2}


def test_two_equal_best_tokens_are_both_drawn_with_top_k_1_but_greedy_takes_the_lowest():
    scores = rows_of([0.0, 5.0, 5.0, 1.0], 50)
    assert set(top_k_sample(scores, 1, seed=3)) == {1, 2}
    assert set(greedy_sample(scores)) == {1}


def test_thin_functions_draw_legal_tokens_only():
    scores = rows_of(np.log(PROBS), 500)
    assert set(top_k_sample(scores, 3)) == {0, 1, 2}
    assert set(top_k_sample(scores, 0)) == set(range(6))
    assert set(top_p_sample(scores, 0.6)) == {0, 1}
    assert set(top_p_sample(scores, 1.0, temperature=0.01)) == {0}
    drawn = top_p_sample(rows_of(np.log([0.3, 0.1, 0.1, 0.5]), 500), 0.8)
    assert set(drawn) == {0, 3}
    counts = [np.sum(drawn == token) for token in (0, 3)]
    assert chi_square(counts, [0.375, 0.625]) < CHI_SQUARE[1]


def test_fresh_seeds_differ():
    assert len({fresh_seed() for _ in range(20)}) > 15


# The same through the decode loop. Bigram keeps no cache, Sum keeps one.

NOISY = bigram_table({token: [0.1, 0.1, 0.2, 0.2, 0.2, 0.2] for token in range(6)})
PROMPTS = [[BOS] * (1 + index % 4) + [A, B][index % 2 :] for index in range(20)]


def answers(model, prompts, records, batch_size, **options):
    config = GenerationConfig(**{"do_sample": True, "seed": 11, "max_new_tokens": 8, "eos_token_id": EOS} | options)
    result = {}
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        rows = generate_rows(model, prompts[part], config, record_ids=records[part])
        for index, row in enumerate(rows):
            record = records[part][index // config.num_return_sequences]
            result.setdefault(record, []).append(row.token_ids)
    return result


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 4, "temperature": 0.7, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"num_return_sequences": 3, "top_p": 0.9, "min_new_tokens": 2},
    ],
    ids=["plain", "penalties", "three answers"],
)
def test_answers_are_the_same_for_any_batch_size(batch_size, options):
    records = list(range(20))
    assert answers(Bigram(NOISY), PROMPTS, records, batch_size, **options) == answers(
        Bigram(NOISY), PROMPTS, records, 20, **options
    )


@pytest.mark.parametrize("use_cache", [True, False])
def test_answers_are_the_same_for_shuffled_records_and_with_or_without_cache(use_cache):
    options = {"temperature": 5.0, "top_k": 0, "eos_token_id": 3}
    order = np.random.default_rng(3).permutation(20).tolist()
    prompts = [[1 + index % 7, index % 5] for index in range(20)]
    expected = answers(Sum(), prompts, list(range(20)), 20, **options)
    assert len({tuple(rows[0]) for rows in expected.values()}) > 10
    shuffled = [prompts[index] for index in order]
    assert answers(Sum(), shuffled, order, 4, use_cache=use_cache, **options) == expected


@pytest.mark.parametrize("pad", [0, EOS, A])
def test_the_pad_id_changes_no_sampled_answer(pad):
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "temperature": 2.0}
    records = list(range(20))
    expected = answers(Bigram(NOISY), PROMPTS, records, 1, pad_token_id=5, **options)
    assert answers(Bigram(NOISY), PROMPTS, records, 20, pad_token_id=pad, **options) == expected


def test_one_prompt_200_times_gets_different_answers():
    found = answers(Bigram(NOISY), [[BOS]] * 200, list(range(200)), 200, eos_token_id=None)
    assert len({tuple(rows[0]) for rows in found.values()}) > 190


def test_sequences_of_one_record_differ_and_the_first_is_that_of_a_single_answer():
    many = answers(Bigram(NOISY), [[BOS]], [4], 1, num_return_sequences=5, eos_token_id=None)[4]
    assert len({tuple(tokens) for tokens in many}) == 5
    assert answers(Bigram(NOISY), [[BOS]], [4], 1, eos_token_id=None)[4] == many[:1]


def test_a_seed_repeats_and_no_seed_does_not():
    first = answers(Bigram(NOISY), [[BOS]] * 5, list(range(5)), 5, eos_token_id=None)
    assert answers(Bigram(NOISY), [[BOS]] * 5, list(range(5)), 5, eos_token_id=None) == first
    assert answers(Bigram(NOISY), [[BOS]] * 5, list(range(5)), 5, eos_token_id=None, seed=12) != first
    runs = [answers(Bigram(NOISY), [[BOS]] * 5, list(range(5)), 5, eos_token_id=None, seed=None) for _ in range(3)]
    assert runs[0] != runs[1] or runs[1] != runs[2]


def test_processes_that_hold_parts_of_a_model_choose_with_the_seed_of_the_first(monkeypatch):
    unit = SimpleNamespace(all_gather_object=lambda seed: [77, seed])
    monkeypatch.setattr(generation, "layout_of", lambda model: SimpleNamespace(unit=unit))
    config = GenerationConfig(do_sample=True, max_new_tokens=2)
    assert generation.with_one_seed(config, None).seed == 77 and config.seed is None
    for settled in (config.updated(seed=3), config.updated(do_sample=False)):
        assert generation.with_one_seed(settled, None) is settled


def test_greedy_decoding_runs_the_processors():
    table = bigram_table({BOS: [0.1, 0.1, 0.1, 0.5, 0.1, 0.1], A: [0.1, 0.1, 0.1, 0.5, 0.1, 0.1]})
    config = GenerationConfig(max_new_tokens=4)
    assert generate_rows(Bigram(table), [[BOS]], config)[0].token_ids == [A] * 4
    for options in ({"no_repeat_ngram_size": 1}, {"repetition_penalty": 5.0}):
        answer = generate_rows(Bigram(table), [[BOS]], config.updated(**options))[0].token_ids
        assert len(set(answer)) > 1, options

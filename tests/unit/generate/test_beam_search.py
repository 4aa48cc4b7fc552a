"""Beam search against transformers' golden table, a plain oracle, and itself in other batches."""

import numpy as np
import pytest
from beam_oracle import transformers_beams, vllm_beams
from hypothesis import given, settings
from hypothesis import strategies as st
from stubs import BOS, EOS, A, B, Bigram, C, Hashed, Sum, bigram_table

from mindformers_ext.generate import GenerationConfig, generate_rows

LONG = {"length_penalty": 2.0}
BY_LENGTH = [[A, EOS], [B, C, EOS], [A, B, C, EOS]]
# early_stopping, length_penalty, sequences, scores, forwards
GOLDEN = [
    (True, 1.0, [[A, B, C, EOS], [A, EOS], [B, C, EOS]], [-0.8483, -0.8574, -0.9000], 4),
    (False, 1.0, [[A, B, C, EOS], [A, EOS], [B, C, EOS]], [-0.8483, -0.8574, -0.9000], 4),
    ("never", 1.0, [[A, B, C, EOS], [A, EOS], [B, C, EOS]], [-0.8483, -0.8574, -0.9000], 5),
    *[(mode, 0.0, BY_LENGTH, [-1.7148, -2.7001, -3.3932], 4) for mode in (True, False, "never")],
    *[(mode, -1.0, BY_LENGTH, [-3.4296, -8.1002, -13.5729], 4) for mode in (True, False, "never")],
    (True, 2.0, [[A, B, C, EOS], [A, B, A, EOS], [B, C, EOS]], [-0.2121, -0.2463, -0.3000], 4),
    *[
        (mode, 2.0, [[B, A, B, C, EOS], [A, B, A, B, C], [A, B, A, B, A]], [-0.1970, -0.2016, -0.2058], 5)
        for mode in (False, "never")
    ],
]


def search(prompts=((BOS,),), model=None, **options):
    options = {"num_beams": 3, "max_new_tokens": 5, "eos_token_id": EOS} | options
    options = {"num_return_sequences": options["num_beams"]} | options
    return generate_rows(model or Bigram(), prompts, GenerationConfig(**options))


def results(rows):
    return [(row.token_ids, pytest.approx(row.score, rel=1e-5, abs=1e-5)) for row in rows]


@pytest.mark.parametrize(("early_stopping", "length_penalty", "sequences", "scores", "forwards"), GOLDEN)
def test_golden_table(early_stopping, length_penalty, sequences, scores, forwards):
    model = Bigram()
    rows = search(model=model, early_stopping=early_stopping, length_penalty=length_penalty)
    assert [row.token_ids for row in rows] == sequences
    np.testing.assert_allclose([row.score for row in rows], scores, atol=6e-5)
    assert len(model.calls) == forwards
    assert [row.sequence_idx for row in rows] == [0, 1, 2]
    assert [row.finish_reason for row in rows] == ["eos" if s[-1] == EOS else "length" for s in sequences]


@pytest.mark.parametrize(
    ("options", "sequences", "scores"),
    [
        ({"num_beams": 2, "min_new_tokens": 3}, [[A, B, C, EOS], [A, B, A, EOS]], [-0.8483, -0.9851]),
        (
            {"num_beams": 2, "max_new_tokens": 3, "forced_eos_token_id": EOS},
            [[A, B, EOS], [B, C, EOS]],
            [-0.6324, -0.7068],
        ),
        ({"eos_token_id": [EOS, C]}, [[A, EOS], [A, B, C], [A, B, A, EOS]], [-0.8574, -0.9378, -0.9851]),
    ],
)
def test_golden_cases_with_processors_and_an_eos_list(options, sequences, scores):
    rows = search(**options)
    assert [row.token_ids for row in rows] == sequences
    np.testing.assert_allclose([row.score for row in rows], scores, atol=6e-5)


prompts = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), min_size=1, max_size=4)
common = {
    "model": st.integers(0, 10**6).map(Hashed),
    "batch": prompts,
    "num_beams": st.integers(2, 5),
    "length_penalty": st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
    "eos": st.sampled_from([[], [2], [2, 5], [2, 5, 0]]),
}


@settings(max_examples=60, deadline=None)
@given(**common, early_stopping=st.sampled_from([True, False, "never"]))
def test_every_prompt_of_a_batch_gets_what_plain_beam_search_gives(
    model, batch, num_beams, length_penalty, eos, early_stopping
):
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    rows = search(batch, model, num_beams=num_beams, eos_token_id=eos or None, max_new_tokens=6, **options)
    expected = [
        beam for prompt in batch for beam in transformers_beams(model.logprobs, prompt, num_beams, 6, eos, **options)
    ]
    assert results(rows) == expected


@settings(max_examples=40, deadline=None)
@given(**common)
def test_vllm_scores_are_those_of_plain_beam_search(model, batch, num_beams, length_penalty, eos):
    options = {"length_penalty": length_penalty}
    rows = search(
        batch,
        model,
        num_beams=num_beams,
        eos_token_id=eos or None,
        max_new_tokens=5,
        beam_score="vllm",
        **options,
    )
    expected = [beam for prompt in batch for beam in vllm_beams(model.logprobs, prompt, num_beams, 5, eos, **options)]
    assert results(rows) == expected


def test_with_a_long_prompt_vllm_ranks_short_answers_higher_than_transformers():
    prompt = [[B] * 49 + [BOS]]
    ours, vllm = search(prompt), search(prompt, beam_score="vllm")
    assert ours[0].token_ids == [A, B, C, EOS]
    assert vllm[0].token_ids == [A, EOS]


def test_length_penalty_chooses_between_short_and_long():
    assert search(length_penalty=-1.0)[0].token_ids == [A, EOS]
    assert search(length_penalty=2.0)[0].token_ids == [B, A, B, C, EOS]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("num_beams", [2, 4, 8])
def test_beams_take_their_cache_and_positions_along_in_a_left_padded_batch(use_cache, num_beams):
    batch = [[3], [1, 2, 3, 4, 5], [7, 7], [9, 1, 1], [4], [10, 2], [6, 6, 6, 6], [8]]
    options = {"num_beams": num_beams, "max_new_tokens": 6, "eos_token_id": [4, 9], "use_cache": use_cache}
    together = results(search(batch, Sum(), **options))
    alone = [beam for prompt in batch for beam in results(search([prompt], Sum(), **options))]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    # each sequence's score is that of its own tokens: a beam with another's cache would have another sum
    for index, (tokens, score) in enumerate(together):
        assert sum_score(batch[index // num_beams], tokens) == score


def sum_score(prompt, tokens):
    ids, total = list(prompt), 0.0
    for token in tokens:
        target = sum((i + 1) * t for i, t in enumerate(ids)) % Sum.vocab
        logits = -np.abs(np.arange(Sum.vocab) - target).astype(float)
        total += logits[token] - np.log(np.exp(logits).sum())
        ids.append(token)
    return total / len(tokens)


def test_one_forward_a_step_holds_the_beams_of_all_prompts():
    model = Bigram()
    search([[BOS], [A, B], [C]], model, num_beams=4, eos_token_id=None)
    assert [len(call["ids"]) for call in model.calls] == [3, 12, 12, 12, 12]


def test_a_prompt_that_is_done_leaves_the_forward():
    model = Bigram()
    search([[BOS], [C]] * 4, model, num_beams=2, max_new_tokens=5, early_stopping=True)
    rows = [len(call["ids"]) for call in model.calls]
    assert rows[1] == 16 and rows[-1] < 16


@pytest.mark.parametrize("num_beams", [2, 3, 8])
def test_the_logprobs_of_a_beam_add_up_to_its_score(num_beams):
    for row in search([[BOS], [A, B]], num_beams=num_beams, output_logprobs=2, length_penalty=1.5):
        assert sum(row.logprobs) / len(row.token_ids) ** 1.5 == pytest.approx(row.score, rel=1e-5)
        assert len(row.logprobs) == len(row.top_logprobs) == len(row.token_ids)
        for pairs in row.top_logprobs:
            assert pairs[0][1] >= pairs[1][1]


def test_alternatives_of_a_beam_are_those_of_the_tokens_before_it():
    row = search(output_logprobs=2, num_beams=3)[1]
    assert row.token_ids == [A, EOS]
    assert [[token for token, _ in pairs] for pairs in row.top_logprobs] == [[A, B], [EOS, B]]
    assert row.top_logprobs[1][0][1] == pytest.approx(row.logprobs[1])


def test_fewer_sequences_are_returned_than_searched_for():
    best = search(num_return_sequences=1)
    assert results(best) == results(search())[:1]


def test_more_beams_than_tokens_never_give_a_sequence_twice():
    rows = search(num_beams=8, max_new_tokens=3)
    assert len({tuple(row.token_ids) for row in rows}) == 8


def test_fewer_possible_sequences_than_asked_for_is_an_error_that_names_the_rows():
    options = {"num_beams": 4, "max_new_tokens": 1}
    with pytest.raises(FloatingPointError, match=r"fewer than 4 sequences of rows \[1\] have a finite score"):
        table = np.full((6, 6), 0.0, np.float32)
        table[A, 2:] = -np.inf
        search([[B], [A]], Bigram(table), **options)


def test_a_model_that_gives_nan_is_an_error():
    table = bigram_table()
    table[A] = np.nan
    with pytest.raises(FloatingPointError, match="no finite score"):
        search(model=Bigram(table))


def test_processors_see_the_beams_own_tokens():
    rows = search(no_repeat_ngram_size=1, num_beams=4, eos_token_id=None, max_new_tokens=4)
    assert all(len(set(row.token_ids)) == 4 and BOS not in row.token_ids for row in rows)


class TestSampling:
    options = {"do_sample": True, "seed": 3, "num_beams": 3, "max_new_tokens": 6, "top_k": 4}

    def test_answers_do_not_depend_on_the_batch(self):
        batch = [[BOS], [A, B], [C], [B, B, B]]
        together = results(search(batch, **self.options))
        config = GenerationConfig(**self.options, num_return_sequences=3, eos_token_id=EOS)
        alone = [
            row for i, prompt in enumerate(batch) for row in generate_rows(Bigram(), [prompt], config, record_ids=[i])
        ]
        assert results(alone) == together

    def test_seeds_give_different_answers(self):
        found = {tuple(search(**self.options | {"seed": seed})[0].token_ids) for seed in range(20)}
        assert len(found) > 1

    def test_only_tokens_that_the_filters_leave_are_drawn(self):
        for seed in range(20):
            for row in search(**self.options | {"seed": seed, "top_k": 1, "num_beams": 2, "eos_token_id": None}):
                # with beams two tokens more than asked for survive: the EOS count plus one
                assert row.token_ids[0] in (A, B)

    def test_scores_are_sums_of_the_processed_logprobs(self):
        for row in search(**self.options, temperature=0.7, output_logprobs=0):
            assert sum(row.logprobs) / len(row.token_ids) == pytest.approx(row.score, rel=1e-5)
            assert row.top_logprobs == [[]] * len(row.token_ids)


def test_a_streamer_cannot_follow_beams():
    with pytest.raises(ValueError, match="num_beams > 1"):
        generate_rows(Bigram(), [[BOS]], GenerationConfig(num_beams=2, max_new_tokens=2), streamer=object())

"""Processors that look at the history and at the place in the answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowtools import context, kept, process

from mindformers_ext.generate import GenerationConfig, LogitsProcessor
from mindformers_ext.generate.plugins import call_criterion
from mindformers_ext.generate.processors import build_processors
from mindformers_ext.generate.sampler import _apply_repetition_penalty

fast = settings(max_examples=100, deadline=None, derandomize=True)


def banned(scores):
    return [np.flatnonzero(np.isneginf(row)).tolist() for row in scores]


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores_once():
    assert process({"repetition_penalty": 2.0}, [2, -2, 1], [[0, 1, 0]]).tolist() == [[1, -4, 1]]
    assert process({"repetition_penalty": 2}, [[8.0] * 6], [[5, 5, 5, 5]]).tolist() == [[8, 8, 8, 8, 8, 4]]


def test_repetition_penalty_counts_the_prompt_and_no_partner_of_the_batch():
    scores = process({"repetition_penalty": 2.0, "pad_token_id": 1}, [[2.0] * 4] * 2, [[3], [0, 0, 2]])
    assert scores.tolist() == [[2, 2, 2, 1], [1, 2, 1, 2]]


def test_an_id_that_the_scores_do_not_have_is_no_history():
    assert process({"repetition_penalty": 2.0, "no_repeat_ngram_size": 1}, [2, 2], [[7, 1]]).tolist() == [[2, -np.inf]]


histories = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=4)


@fast
@given(histories, st.floats(0.1, 5), st.randoms())
def test_repetition_penalty_is_that_of_plain_loops(rows, penalty, random):
    scores = np.array([[random.uniform(-3, 3) for _ in range(5)] for _ in rows], np.float32)
    expected = scores.copy()
    for row, history in zip(expected, rows, strict=True):
        for token in set(history):
            row[token] = row[token] * np.float32(penalty) if row[token] < 0 else row[token] / np.float32(penalty)
    np.testing.assert_array_equal(process({"repetition_penalty": penalty}, scores, rows), expected)


@fast
@given(histories, st.integers(1, 4))
def test_no_repeat_ngram_is_that_of_plain_loops(rows, size):
    expected = []
    for history in rows:
        grams = {tuple(history[i : i + size]) for i in range(len(history) - size + 1)}
        tail = tuple(history[len(history) - size + 1 :])
        expected.append([token for token in range(5) if (*tail, token) in grams])
    assert banned(process({"no_repeat_ngram_size": size}, np.zeros((len(rows), 5)), rows)) == expected


@pytest.mark.parametrize(
    ("size", "history", "expected"),
    [(3, [1, 2, 3, 1, 2], [3]), (1, [1, 2, 1], [1, 2]), (4, [1, 2, 3], []), (2, [4, 4], [4])],
)
def test_no_repeat_ngram_bans_what_would_complete_a_repetition(size, history, expected):
    assert banned(process({"no_repeat_ngram_size": size}, np.zeros(5), [history])) == [expected]


def test_a_ngram_does_not_reach_from_one_row_into_the_next():
    assert banned(process({"no_repeat_ngram_size": 2}, np.zeros((2, 5)), [[1, 2], [3, 2]])) == [[], []]


def test_sequence_bias_holds_where_the_history_ends_with_the_prefix():
    options = {"sequence_bias": [[[3], 1.0], [[4, 5], -2.0]]}
    scores = process(options, np.zeros((3, 6)), [[1, 4], [4, 1], [4]])
    assert scores.tolist() == [[0, 0, 0, 1, 0, -2], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, -2]]


def test_biases_of_one_token_add_up_and_the_prefix_may_be_long():
    options = {"sequence_bias": {(2,): 1, (1, 2): 0.5, (0, 1, 2): 0.25, (9, 9, 9, 2): 8}}
    assert process(options, np.zeros((3, 10)), [[0, 1], [1], [0]])[:, 2].tolist() == [1.75, 1.5, 1.0]


def test_bad_words_are_banned_where_they_would_be_completed_but_no_eos_alone():
    options = {"bad_words_ids": [[2], [4, 5], [3]], "eos_token_id": 2}
    assert banned(process(options, np.zeros((2, 6)), [[1, 4], [4, 1]])) == [[3, 5], [3]]


@pytest.mark.parametrize(
    ("options", "new", "ends"),
    [
        ({"min_new_tokens": 2}, 1, []),
        ({"min_new_tokens": 2}, 2, [2, 9]),
        ({"min_length": 4}, 0, []),
        ({"min_length": 4}, 1, [2, 9]),
        ({"min_length": 0, "min_new_tokens": 0}, 0, [2, 9]),
    ],
)
def test_no_eos_of_the_list_before_the_least_length(options, new, ends):
    scores = process(options | {"eos_token_id": [2, 9]}, np.zeros(10), [[0] * (3 + new)], prompt=3)
    assert sorted(set(kept(scores)[0]) & {2, 9}) == ends
    assert set(range(10)) - {2, 9} <= set(kept(scores)[0])


def test_least_length_without_eos_leaves_every_token():
    assert kept(process({"min_new_tokens": 5}, np.zeros(4), prompt=1)) == [[0, 1, 2, 3]]


def test_an_eos_id_beyond_the_scores_can_never_come_and_does_no_harm():
    assert banned(process({"min_new_tokens": 5, "eos_token_id": [1, 99]}, np.zeros(4), prompt=1)) == [[1]]


def test_the_last_possible_token_is_forced_in_every_row_by_its_own_budget():
    options = {"forced_eos_token_id": [2, 3], "max_length": 5}
    scores = process(options, [[1.0, 2, 3, 4]] * 2, [[0, 0, 0, 1], [0, 0]], prompt=2)
    assert scores.tolist() == [[-np.inf, -np.inf, 0, 0], [1, 2, 3, 4]]
    options = {"forced_eos_token_id": 2, "max_new_tokens": 1}
    assert kept(process(options, np.zeros(4), [[0, 0]])) == [[2]]


def test_invalid_scores_become_the_ends_of_float32():
    highest = np.finfo(np.float32).max
    scores = process({"remove_invalid_values": True}, [np.nan, np.inf, -np.inf, 1])
    assert scores.tolist() == [[0, highest, -highest, 1]]


def test_exponential_decay_raises_eos_after_its_start():
    options = {"exponential_decay_length_penalty": [1, 1.5], "eos_token_id": 2}
    scores = [0, 0, -2.0, 0]
    assert process(options, scores, [[0] * 5], prompt=2)[0, 2] == pytest.approx(-2 + 2 * (1.5**2 - 1))
    assert process(options, scores, [[0] * 3], prompt=2)[0, 2] == -2
    assert process(options, [0, 0, 2.0, 0], [[0] * 5], prompt=2)[0, 2] == pytest.approx(2 * 1.5**2)


@pytest.mark.filterwarnings("error")
def test_exponential_decay_leaves_a_banned_eos_banned_and_never_overflows():
    options = {"exponential_decay_length_penalty": [0, 10.0], "eos_token_id": [0, 1]}
    scores = process(options, [-np.inf, 1.0], [[0] * 502], prompt=2)
    assert scores.tolist() == [[-np.inf, np.finfo(np.float32).max]]


def test_suppressed_tokens_never_come_or_never_begin():
    options = {"suppress_tokens": [1], "begin_suppress_tokens": [2, 3]}
    assert banned(process(options, np.zeros((2, 5)), [[0, 0], [0, 0, 0]], prompt=2)) == [[1, 2, 3], [1]]


def test_processors_come_in_the_order_of_transformers():
    # remove_invalid_values comes after the bans of repetition and before suppress_tokens.
    options = {"no_repeat_ngram_size": 1, "remove_invalid_values": True, "suppress_tokens": [1]}
    scores = process(options, np.zeros(3), [[0]])
    assert scores.tolist() == [[np.finfo(np.float32).min, -np.inf, 0]]
    # The bias comes before the penalty, so the penalty scales it.
    assert process({"sequence_bias": [[[0], 4.0]], "repetition_penalty": 2.0}, [0, 0], [[0]]).tolist() == [[2, 0]]


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words_ids": [[1], [6]]},
        {"sequence_bias": [[[6, 1], 1.0]]},
        {"suppress_tokens": [6]},
        {"begin_suppress_tokens": [6]},
        {"forced_eos_token_id": 6},
    ],
    ids=str,
)
def test_ids_that_the_model_does_not_have_are_refused_by_name(options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))}: \[6\] are not among the model's token ids 0 to 5"):
        process(options, np.zeros(6))


class TestPlugins:
    def test_a_plugin_sees_left_padded_ids_and_the_scores_of_all_rows(self):
        calls = []

        class Ban(LogitsProcessor):
            def __call__(self, input_ids, scores):
                calls.append((input_ids.tolist(), scores.shape, scores.dtype))
                scores[:, 0] = -np.inf
                return scores

        options = {"logits_processor": [Ban()], "pad_token_id": 3}
        assert banned(process(options, np.zeros((2, 4)), [[1], [1, 2, 2]])) == [[0], [0]]
        assert calls == [([[3, 3, 1], [1, 2, 2]], (2, 4), np.float32)]

    def test_a_plugin_comes_after_the_penalties_and_before_the_filters(self):
        def favour(input_ids, scores):
            assert scores[0, 0] == 1.0  # halved by the penalty
            return np.where(np.arange(3) == 2, 9.0, scores)

        options = {"logits_processor": favour, "repetition_penalty": 2.0, "do_sample": True, "top_k": 1}
        assert kept(process(options, [2, 1, 1])) == [[2]]

    def test_what_a_plugin_keeps_is_not_changed_by_later_processors(self):
        own = np.array([[3.0, 2.0, 1.0]], np.float32)
        options = {"logits_processor": [lambda ids, scores: own], "do_sample": True, "top_k": 1}
        process(options, [0, 0, 0])
        assert own.tolist() == [[3, 2, 1]]

    @pytest.mark.parametrize("result", [None, 3, np.zeros((1, 2)), np.zeros(3), "no", np.array([["a", "b", "c"]])])
    def test_a_wrong_result_is_refused_with_the_name_of_the_plugin(self, result):
        class Broken(LogitsProcessor):
            def __call__(self, input_ids, scores):
                return result

        with pytest.raises(ValueError, match=r"logits_processor: Broken must return numbers of shape \(1, 3\), not "):
            process({"logits_processor": [Broken()]}, np.zeros(3))

    def test_a_criterion_of_a_wrong_shape_is_refused_with_its_name(self):
        def half(input_ids, scores):
            return [True]

        with pytest.raises(
            ValueError, match=r"stopping_criteria: .*half must return booleans of shape \(2,\), not list"
        ):
            call_criterion(half, np.zeros((2, 3)), np.zeros((2, 4)))
        assert call_criterion(lambda ids, scores: [True, False], np.zeros((2, 3)), np.zeros((2, 4))).tolist() == [1, 0]

    def test_the_base_class_says_what_is_missing(self):
        with pytest.raises(NotImplementedError, match="LogitsProcessor must define __call__"):
            process({"logits_processor": [LogitsProcessor()]}, np.zeros(3))


def test_nothing_to_do_is_false_and_costs_no_copy():
    processors = build_processors(GenerationConfig(), 5)
    scores = np.zeros((1, 5), np.float32)
    assert not processors and processors(scores, context([0])) is scores


def test_apply_repetition_penalty_skips_pads():
    logits = np.full((2, 4), 2.0, np.float32)
    ids, mask = np.array([[0, 0, 3], [0, 1, 1]]), np.array([[0, 0, 1], [1, 1, 1]])
    assert _apply_repetition_penalty(logits, ids, 2.0, mask).tolist() == [[2, 2, 2, 1], [1, 1, 2, 2]]
    assert _apply_repetition_penalty(logits, ids, 2.0).tolist() == [[1, 2, 2, 1], [1, 1, 2, 2]]
    assert (logits == 2).all()

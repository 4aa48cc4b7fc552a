"""The best candidates of a row, however long it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_ext.generate.topk import log_sum_exp, top_candidates


@settings(deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([1, 5, 255, 256, 1000, 3000, 9001]), st.integers(1, 40),
    st.sampled_from([2, 50, 10**6]),
)  # fmt: skip
def test_candidates_are_those_of_a_stable_sort(seed, rows, size, count, levels):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, (rows, size)).astype(np.float32)  # few levels: many ties
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    values, indices = top_candidates(scores, count)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(scores, expected, axis=1))


def test_log_sum_exp_is_exact_for_scores_far_from_zero_and_counts_no_banned_token():
    scores = np.array([[1000.0, 1000.0, -np.inf], [-1000.0, -1000.0, -np.inf]], np.float32)
    np.testing.assert_allclose(log_sum_exp(scores)[:, 0], np.array([1000, -1000]) + np.log(2), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_a_row_without_a_finite_best_score_is_refused(bad):
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        log_sum_exp(np.array([[0.0, 1.0], [bad, bad]], np.float32))

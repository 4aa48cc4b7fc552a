"""Scores of tokens from parts of a vocabulary."""

import numpy as np
import pytest

from mindformers_ext.ops import token_scores
from mindformers_ext.ops.token_scores import BEST, HIGHEST, SUM, TARGET

LOGITS = np.random.default_rng(3).normal(scale=4, size=(5, 700)).astype(np.float32)
TARGETS = np.array([0, 699, 350, 349, 7])


def test_a_whole_vocabulary_gives_the_log_softmax():
    scores = token_scores(LOGITS, TARGETS)
    exact = LOGITS.astype(np.float64)
    expected = exact[np.arange(5), TARGETS] - np.log(np.exp(exact).sum(1))
    np.testing.assert_allclose(scores[:, TARGET] - scores[:, HIGHEST] - np.log(scores[:, SUM]), expected, atol=1e-5)
    assert scores[:, BEST].astype(int).tolist() == LOGITS.argmax(1).tolist()


def test_a_part_says_which_of_its_ids_is_best_and_knows_its_own_targets_only():
    scores = token_scores(LOGITS[:, 350:], TARGETS, first=350)
    assert scores[:, BEST].astype(int).tolist() == (LOGITS[:, 350:].argmax(1) + 350).tolist()
    assert np.isneginf(scores[:, TARGET]).tolist() == [True, False, False, True, True]
    assert scores[1:3, TARGET].tolist() == LOGITS[[1, 2], [699, 350]].tolist()


def test_several_targets_may_follow_one_row():
    rows = np.array([2, 2, 0])
    scores = token_scores(LOGITS, np.array([5, 6, 5]), rows=rows)
    assert scores[:, TARGET].tolist() == LOGITS[[2, 2, 0], [5, 6, 5]].tolist()
    assert scores[0, :3].tolist() == scores[1, :3].tolist() != scores[2, :3].tolist()


def test_of_equal_logits_the_lowest_id_is_best():
    assert token_scores(np.ones((1, 6), np.float32), np.array([4]))[0, BEST] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_no_number_stays_none(bad):
    logits = LOGITS[:1].copy()
    logits[0, 3] = bad
    highest, total, _, target = token_scores(logits, np.array([5]))[0]
    assert not np.isfinite(target - highest - np.log(total))

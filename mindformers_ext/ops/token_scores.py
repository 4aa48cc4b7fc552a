"""What is needed of a row of logits to know the probability of one token, wherever the rest of the vocabulary is."""

from __future__ import annotations

import numpy as np

# Columns of what `token_scores` returns, and values of a block that stays in a core's cache.
HIGHEST, SUM, BEST, TARGET = range(4)
_CACHED = 2**18


def token_scores(logits: np.ndarray, targets: np.ndarray, first: int = 0, rows: np.ndarray | None = None) -> np.ndarray:
    """Returns what joins with the same of other parts of the vocabulary to log-probabilities.

    Args:
        logits: of a part of the vocabulary, float32 ``[R, V_local]``.
        targets: int ``[N]``, ids within the whole vocabulary.
        first: id of the first column.
        rows: int ``[N]``, the row of each target; None: target i belongs to row i.

    Returns:
        float32 ``[N, 4]``: the highest logit of the row, the sum of ``exp(logit - highest)``, the id of the highest
        (the lowest of equal ones; exact below 2^24), and the target's logit, -inf where that is in another part. A row
        with nan has nan for its highest logit.
    """
    best = logits.argmax(axis=1)  # nan counts as the highest
    highest = np.take_along_axis(logits, best[:, None], axis=1)
    sums = np.empty_like(highest)
    step = max(_CACHED // logits.shape[1], 1)
    with np.errstate(invalid="ignore"):
        for start in range(0, len(logits), step):
            part = slice(start, start + step)
            shifted = logits[part] - highest[part]
            np.exp(shifted, out=shifted)
            shifted.sum(axis=1, keepdims=True, out=sums[part])
    rows = np.arange(len(targets)) if rows is None else rows
    columns = targets - first
    inside = (columns >= 0) & (columns < logits.shape[1])
    found = np.where(inside, logits[rows, np.where(inside, columns, 0)], np.float32(-np.inf))
    return np.stack((highest[rows, 0], sums[rows, 0], (best[rows] + first).astype(np.float32), found), axis=1)

"""The best candidates of long rows of scores, without sorting the rows."""

from __future__ import annotations

import numpy as np

_BLOCKS = (512, 32)
_CACHED = 2**18  # elements of a block of rows that stay in a core's cache


def top_candidates(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the highest scores of each row, best first; of equal scores the lower index comes first.

    Works on maxima of blocks: the ``count`` best elements of a row lie in the ``count`` blocks whose maxima are best,
    as each of those has an element that precedes everything outside them. So one fast pass over the row is enough.

    Args:
        scores: ``[R, N]`` without nan.
        count: how many; at most N are returned.

    Returns:
        Values ``[R, count]`` and their indices int64 ``[R, count]``.
    """
    count = min(count, scores.shape[1])
    indices = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    values = scores
    for size in _BLOCKS:
        if values.shape[1] > 4 * count * size:
            places = _in_best_blocks(values, count, size)
            values, indices = (np.take_along_axis(array, places, axis=1) for array in (values, indices))
    # `indices` rise along a row, so a stable sort leaves equal scores in the order of their indices.
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(indices, order, axis=1)


def _in_best_blocks(values: np.ndarray, count: int, size: int) -> np.ndarray:
    """Places int64 ``[R, M]``, rising, of the ``count`` best blocks of ``size`` and of what is left over at the end."""
    num_rows, length = values.shape
    whole = length // size * size
    maxima = values[:, :whole].reshape(num_rows, -1, size).max(axis=2)
    best = np.sort(np.argsort(-maxima, axis=1, kind="stable")[:, :count], axis=1)
    places = (best[:, :, None] * size + np.arange(size)).reshape(num_rows, -1)
    rest = np.broadcast_to(np.arange(whole, length), (num_rows, length - whole))
    return np.concatenate((places, rest), axis=1)


def log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """Returns ``ln sum exp`` of each row, float32 ``[R, 1]``; -inf entries count nothing.

    Raises:
        FloatingPointError: a row has no finite score, or has nan.
    """
    highest = scores.max(axis=1, keepdims=True)
    check_finite(highest[:, 0])
    sums = np.empty_like(highest)
    step = max(_CACHED // scores.shape[1], 1)
    for start in range(0, len(scores), step):
        rows = slice(start, start + step)
        shifted = scores[rows] - highest[rows]
        np.exp(shifted, out=shifted)
        shifted.sum(axis=1, keepdims=True, out=sums[rows])
    return highest + np.log(sums)


def check_finite(best: np.ndarray) -> None:
    """Refuses rows whose best score ``[R]`` is no number.

    Raises:
        FloatingPointError: names the rows.
    """
    if not np.isfinite(best).all():
        rows = np.flatnonzero(~np.isfinite(best)).tolist()
        raise FloatingPointError(f"the model gave no finite score for the next token of rows {rows}")

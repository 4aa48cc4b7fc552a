"""The best candidates of long rows of scores, without sorting the rows."""

from __future__ import annotations

import numpy as np

_BLOCK = 256


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
    size = scores.shape[1]
    count = min(count, size)
    num_blocks = size // _BLOCK
    if num_blocks <= 2 * count:
        return _sorted(scores, np.broadcast_to(np.arange(size), scores.shape), count)
    whole = num_blocks * _BLOCK
    blocks = scores[:, :whole].reshape(len(scores), num_blocks, _BLOCK)
    maxima = blocks.max(axis=2)
    best = np.sort(np.argsort(-maxima, axis=1, kind="stable")[:, :count], axis=1)
    indices = (best[:, :, None] * _BLOCK + np.arange(_BLOCK)).reshape(len(scores), -1)
    tail = np.broadcast_to(np.arange(whole, size), (len(scores), size - whole))
    indices = np.concatenate((indices, tail), axis=1)
    return _sorted(np.take_along_axis(scores, indices, axis=1), indices, count)


def _sorted(values: np.ndarray, indices: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    # `indices` rise along a row, so a stable sort leaves equal scores in the order of their indices.
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(indices, order, axis=1)


def log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """Returns ``ln sum exp`` of each row, float32 ``[R, 1]``; -inf entries count nothing.

    Raises:
        FloatingPointError: a row has no finite score, or has nan.
    """
    highest = scores.max(axis=1, keepdims=True)
    check_finite(highest[:, 0])
    shifted = scores - highest
    np.exp(shifted, out=shifted)
    return highest + np.log(shifted.sum(axis=1, keepdims=True))


def check_finite(best: np.ndarray) -> None:
    """Refuses rows whose best score ``[R]`` is no number.

    Raises:
        FloatingPointError: names the rows.
    """
    if not np.isfinite(best).all():
        rows = np.flatnonzero(~np.isfinite(best)).tolist()
        raise FloatingPointError(f"the model gave no finite score for the next token of rows {rows}")

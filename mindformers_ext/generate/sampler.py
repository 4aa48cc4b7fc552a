"""The choice of the next token from float32 scores on the host."""

from __future__ import annotations

import numpy as np


def greedy_sample(scores: np.ndarray) -> np.ndarray:
    """Returns the ids int64 ``[B]`` of the highest scores of ``[B, V]``; ties go to the lowest id.

    Raises:
        FloatingPointError: a row has no finite score, or has nan.
    """
    ids = scores.argmax(axis=1)
    best = scores[np.arange(len(ids)), ids]
    if not np.isfinite(best).all():
        rows = np.flatnonzero(~np.isfinite(best)).tolist()
        raise FloatingPointError(f"the model gave no finite score for the next token of rows {rows}")
    return ids

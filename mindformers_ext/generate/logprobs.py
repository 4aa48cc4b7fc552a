"""Log-probabilities of chosen tokens and of their best alternatives."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindformers_ext.generate.topk import log_sum_exp, top_candidates

Recorded = dict[str, np.ndarray]


def record_logprobs(logits: np.ndarray, chosen: np.ndarray, count: int) -> Recorded:
    """Log-probabilities under the model itself, before any processor.

    Args:
        logits: float32 ``[R, V]``.
        chosen: int ``[R]``.
        count: how many alternatives.

    Returns:
        ``logprobs`` float32 ``[R]``, ``top_ids`` int32 and ``top_logprobs`` float32 ``[R, count]``.
    """
    normaliser = log_sum_exp(logits)
    values, ids = top_candidates(logits, count)
    return {
        "logprobs": np.take_along_axis(logits, chosen[:, None], axis=1)[:, 0] - normaliser[:, 0],
        "top_ids": ids.astype(np.int32),
        "top_logprobs": values - normaliser,
    }


def as_fields(records: Recorded) -> dict[str, Any]:
    """The fields of a `GeneratedRow` from one row's records ``[T]``, ``[T, n]`` and ``[T, n]``, or from none."""
    if not records:
        return {}
    pairs = zip(records["top_ids"].tolist(), records["top_logprobs"].tolist(), strict=True)
    return {
        "logprobs": records["logprobs"].tolist(),
        "top_logprobs": [list(zip(ids, values, strict=True)) for ids, values in pairs],
    }

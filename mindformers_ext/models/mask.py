"""The additive attention bias of one forward."""

from __future__ import annotations

import numpy as np

# Added to the score of a key that must not be seen. Finite, so that a row without any visible key (a pad's own
# row) gives finite numbers instead of nan; its exponential is exactly 0 beside any visible key.
MASKED = np.finfo(np.float32).min


def attention_bias(mask: np.ndarray | None, batch: int, length: int, past: int, slots: int) -> np.ndarray:
    """Builds the bias of a causal forward over new and cached tokens.

    Args:
        mask: None for a batch without pads; ``[B, past + S]`` with 1 for a real token and 0 for a pad; or additive
            floats ``[B or 1, 1, S, past + S]``, used as they are.
        batch: rows B.
        length: new tokens S.
        past: tokens in the cache before them.
        slots: width T of the key buffer; slots from ``past + S`` on are masked.

    Returns:
        float32 ``[B or 1, 1, S, T]``: 0 or `MASKED`, or the given additive values.

    Raises:
        ValueError: the mask has another shape.
    """
    total = past + length
    if mask is not None:
        check_mask(mask, batch, length, past)
    if mask is not None and mask.ndim == 4:
        mask = np.ascontiguousarray(mask, np.float32)
        if slots == total:
            return mask
        bias = np.full((*mask.shape[:3], slots), MASKED, np.float32)
        bias[..., :total] = mask
        return bias
    visible = (np.arange(slots) <= past + np.arange(length)[:, None])[None]
    if mask is not None:
        real = np.zeros((len(mask), slots), bool)
        real[:, :total] = mask != 0
        visible = visible & real[:, None]
    return np.where(visible, np.float32(0), MASKED)[:, None]


def check_mask(mask: np.ndarray, batch: int, length: int, past: int) -> None:
    """Refuses a mask that is not of a shape that `attention_bias` takes.

    Raises:
        ValueError: names the shapes.
    """
    total = past + length
    if mask.ndim == 4:
        fits = np.issubdtype(mask.dtype, np.floating) and mask.shape[0] in (1, batch)
        fits = fits and mask.shape[1:] == (1, length, total)
    else:
        fits = mask.shape == (batch, total)
    if not fits:
        raise ValueError(
            f"attention_mask of shape {mask.shape} and type {mask.dtype} does not fit {batch} rows of {past} cached "
            f"and {length} new tokens: give [{batch}, {total}] with 1 and 0, or additive floats [{batch}, 1, {length}, "
            f"{total}]"
        )

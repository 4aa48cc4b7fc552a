"""The masks and positions of a left-padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.models.mask import attention_bias

__all__ = ["GenerationConfig", "build_causal_mask", "build_position_ids", "left_pad"]


def build_causal_mask(length: int, past: int = 0) -> np.ndarray:
    """Returns the additive mask float32 ``[1, 1, length, past + length]``: 0 where a token may look."""
    return attention_bias(None, 1, length, past, past + length)


def build_position_ids(attention_mask: np.ndarray) -> np.ndarray:
    """Returns positions int32 ``[B, S]`` that start at 0 at the first real token; pads get 0.

    Args:
        attention_mask: ``[B, S]``, 1 for a real token and 0 for a pad.
    """
    return np.maximum(np.cumsum(attention_mask != 0, axis=1) - 1, 0).astype(np.int32)


def _build_combined_mask(attention_mask: np.ndarray, length: int) -> np.ndarray:
    """Joins causality and padding for the last ``length`` of the tokens that ``attention_mask`` ``[B, T]`` covers.

    Returns:
        Additive float32 ``[B, 1, length, T]``.
    """
    total = attention_mask.shape[1]
    return attention_bias(attention_mask, len(attention_mask), length, total - length, total)


def left_pad(prompts: Sequence[Sequence[int]], filler: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 ids ``[B, longest]`` padded on the left, and the mask ``[B, longest]`` (1 real, 0 pad)."""
    longest = max(map(len, prompts))
    ids = np.full((len(prompts), longest), filler, np.int32)
    mask = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def right_pad(rows: Sequence[Sequence[int]], filler: int = 0) -> np.ndarray:
    """Returns int32 ids ``[B, longest]`` padded on the right."""
    ids = np.full((len(rows), max(map(len, rows))), filler, np.int32)
    for row, given in enumerate(rows):
        ids[row, : len(given)] = given
    return ids

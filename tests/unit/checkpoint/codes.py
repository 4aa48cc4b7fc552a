"""Codes of 8 and 4 bits and the numbers they stand for, by other means than the tables under test."""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """The same exponent and mantissa as in a float16, whose bias is 8 larger; only 0x7f and 0xff differ, being NaN."""
    bits = codes.astype(np.uint16)
    halves = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).view(np.float16)
    return np.where((codes & 0x7F) == 0x7F, np.float32(np.nan), halves.astype(np.float32) * 256)


def e5m2(codes: np.ndarray) -> np.ndarray:
    """The upper byte of a float16."""
    return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


def e8m0(codes: np.ndarray) -> np.ndarray:
    return np.exp2(codes.astype(np.float64) - 127).astype(np.float32)


def unpacked(codes: np.ndarray) -> np.ndarray:
    """Two E2M1 values a byte, the low four bits first."""
    return np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], -1)


def spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One factor a value."""
    wide = np.repeat(np.repeat(scales, block[0], axis=-2), block[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def random_codes(*shape: int, top: int = 0x7F) -> np.ndarray:
    """Codes of finite values of both signs."""
    generator = np.random.default_rng(len(shape))
    return (generator.integers(0, top, shape) + 128 * generator.integers(0, 2, shape)).astype(np.uint8)

"""Tables of rotary position embeddings, with the scalings that published checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindformers_ext.models.config import RopeParameters, TransformerConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(rope: RopeParameters, dim: int, max_position_embeddings: int) -> tuple[np.ndarray, float]:
    """Angular frequency of every pair of a head, and the factor for cos and sin.

    Sources: RoPE (arXiv 2104.09864, section 3.4), position interpolation (arXiv 2306.15595), YaRN (arXiv
    2309.00071, sections 3.2 and 3.4), Llama 3.1's rule (arXiv 2407.21783 and its released code).

    Args:
        rope: type and parameters.
        dim: size of a head.
        max_position_embeddings: used where the parameters do not give the original length.

    Returns:
        float32 ``[dim / 2]`` and the attention factor.

    Raises:
        ValueError: unknown type, or a parameter of the type is missing.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = (1.0 / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
    if rope.rope_type == "default":
        return frequencies, 1.0
    if rope.rope_type == "linear":
        return frequencies / np.float32(_required(rope, "factor")), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies, max_position_embeddings), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, frequencies, dim, max_position_embeddings)
    raise ValueError(f"model: rope_type {rope.rope_type!r} is not supported; known are {', '.join(ROPE_TYPES)}")


def _required(rope: RopeParameters, key: str) -> float:
    value = rope.scaling.get(key)
    if value is None:
        raise ValueError(f"model: rope_type {rope.rope_type!r} needs {key} among its rope parameters")
    return float(value)


def _llama3(rope: RopeParameters, frequencies: np.ndarray, max_position_embeddings: int) -> np.ndarray:
    factor, low, high = (_required(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope.scaling.get("original_max_position_embeddings") or max_position_embeddings)
    wavelengths = 2 * np.pi / frequencies
    smooth = ((original / wavelengths - low) / (high - low)).astype(np.float32)
    blended = (1 - smooth) * frequencies / np.float32(factor) + smooth * frequencies
    scaled = np.where(wavelengths > original / low, frequencies / np.float32(factor), blended)
    return np.where(wavelengths < original / high, frequencies, scaled).astype(np.float32)


def _yarn(
    rope: RopeParameters, frequencies: np.ndarray, dim: int, max_position_embeddings: int
) -> tuple[np.ndarray, float]:
    parameters = rope.scaling
    original = float(parameters.get("original_max_position_embeddings") or max_position_embeddings)
    factor = float(parameters.get("factor") or max_position_embeddings / original)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_of(float(parameters.get("beta_fast") or 32))
    high = dimension_of(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    blended = frequencies / np.float32(factor) * ramp + frequencies * (1 - ramp)
    return blended.astype(np.float32), _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return _mscale(factor, float(parameters["mscale"])) / _mscale(factor, float(parameters["mscale_all_dim"]))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_mscale(rope: RopeParameters) -> float:
    """Factor of queries and keys of latent attention in all their dimensions: DeepSeek-V3's released code.

    Raises:
        ValueError: ``mscale_all_dim`` stands without ``factor``.
    """
    weight = rope.scaling.get("mscale_all_dim")
    if rope.rope_type == "default" or not weight:
        return 1.0
    return _mscale(_required(rope, "factor"), float(weight))


class RotaryTable:
    """cos and sin of every position, computed once and grown on demand.

    Args:
        rope: type and parameters.
        dim: size of a head.
        max_position_embeddings: see `inverse_frequencies`.
    """

    def __init__(self, rope: RopeParameters, dim: int, max_position_embeddings: int) -> None:
        self._frequencies, self._factor = inverse_frequencies(rope, dim, max_position_embeddings)
        self._cos = self._sin = np.empty((0, dim), np.float32)

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns cos and sin, float32 ``[..., dim]``, of integer positions ``[...]``."""
        needed = int(positions.max(initial=0)) + 1
        if needed > len(self._cos):
            self._grow(max(needed, 2 * len(self._cos), 256))
        return self._cos[positions], self._sin[positions]

    def _grow(self, length: int) -> None:
        angles = np.arange(length, dtype=np.float32)[:, None] * self._frequencies
        angles = np.concatenate((angles, angles), -1)
        self._cos = np.cos(angles) * np.float32(self._factor)
        self._sin = np.sin(angles) * np.float32(self._factor)


def rotary_tables(config: TransformerConfig) -> dict[str, RotaryTable]:
    """Returns the tables that a model's layers look up, by kind: ``main``, and ``compress`` where there are blocks."""
    dim, longest = config.rotary_dim, config.max_position_embeddings
    tables = {"main": RotaryTable(config.rope, dim, longest)}
    if config.sparse_attention is not None:
        tables["compress"] = RotaryTable(config.sparse_attention.compress_rope, dim, longest)
    return tables

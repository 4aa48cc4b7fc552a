"""Between HuggingFace's separate projections and the fused ones of this package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindformers_ext.models.weights import WeightMapping


def copied(name: str, source: str, *shape: int) -> WeightMapping:
    """A parameter that is one HuggingFace tensor as it is."""
    return WeightMapping(name, shape, (source,), (shape,), lambda tensors: tensors[0], lambda parameter: [parameter])


def fused_qkv(
    name: str, sources: tuple[str, str, str], groups: int, heads: int, dim: int, columns: tuple[int, ...]
) -> WeightMapping:
    """Query, key and value projections fused group by group: ``heads`` query heads, one key, one value.

    Args:
        name: the fused parameter.
        sources: names of q, k and v.
        groups: key-value heads.
        heads: query heads of one group.
        dim: size of a head.
        columns: ``(hidden_size,)`` for weights, ``()`` for biases.
    """
    query, single = groups * heads * dim, groups * dim

    def to_parameter(tensors: Sequence[np.ndarray]) -> np.ndarray:
        parts = [tensor.reshape(groups, -1, *columns) for tensor in tensors]
        return np.concatenate(parts, axis=1).reshape(-1, *columns)

    def to_hf(parameter: np.ndarray) -> list[np.ndarray]:
        rows = parameter.reshape(groups, (heads + 2) * dim, *columns)
        parts = np.split(rows, [heads * dim, (heads + 1) * dim], axis=1)
        return [np.ascontiguousarray(part.reshape(-1, *columns)) for part in parts]

    shapes = ((query, *columns), (single, *columns), (single, *columns))
    return WeightMapping(name, (query + 2 * single, *columns), sources, shapes, to_parameter, to_hf)


def interleaved_gate_up(name: str, sources: tuple[str, str], size: int, columns: tuple[int, ...]) -> WeightMapping:
    """Gate and up projections whose rows alternate: gate 0, up 0, gate 1, up 1, ...

    Args:
        name: the fused parameter.
        sources: names of gate and up.
        size: rows of each.
        columns: ``(hidden_size,)`` for weights, ``()`` for biases.
    """

    def to_parameter(tensors: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(tensors, axis=1).reshape(-1, *columns)

    def to_hf(parameter: np.ndarray) -> list[np.ndarray]:
        return [np.ascontiguousarray(parameter[offset::2]) for offset in (0, 1)]

    shape = (size, *columns)
    return WeightMapping(name, (2 * size, *columns), sources, (shape, shape), to_parameter, to_hf)

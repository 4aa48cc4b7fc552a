"""From stored values to the memory of a parameter, piece by piece and through any strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# Values that are in work at a time: what is mapped or decoded beside the parameter stays this small.
PIECE = 1 << 21
# Side of the squares in which a transposed target is written: both sides of a square stay in the cache.
_TILE = 256

# A run of values of at least this number is worth a mapping of its own.
_RUN = 1 << 14

Index = tuple[Any, ...]
Convert = Callable[[np.ndarray, np.ndarray], None]  # (stored values, target of the same shape)


def pieces(shape: tuple[int, ...], limit: int = PIECE) -> Iterator[tuple[Index, int, int]]:
    """Cuts an array of a shape into parts that are contiguous in C order, of at most ``limit`` values.

    Yields:
        (index of the part, position of its first value in C order, number of values).
    """
    count = math.prod(shape)
    if count <= limit:
        if count:
            yield (...,), 0, count
        return
    inner = math.prod(shape[1:])
    if inner > limit:
        for row in range(shape[0]):
            for index, first, size in pieces(shape[1:], limit):
                yield (row, *index), row * inner + first, size
        return
    step = limit // inner
    for row in range(0, shape[0], step):
        rows = min(step, shape[0] - row)
        yield (slice(row, row + rows),), row * inner, rows * inner


def stretches(shape: tuple[int, ...], box: tuple[slice, ...], limit: int = PIECE) -> Iterator[tuple[Index, int, int]]:
    """Cuts a box of an array into parts, each inside a stretch of the array of at most ``limit`` values.

    Args:
        shape: of the array, which lies in C order.
        box: begin and end along every axis.
        limit: values of a stretch.

    Yields:
        (index of the part within the box, position of the first value of its stretch in the array, number of values of
        the stretch). `part_of` cuts the part out of it.
    """
    lengths = tuple(cut.stop - cut.start for cut in box)
    inner = math.prod(shape[1:])
    if lengths[1:] == shape[1:]:
        start = box[0].start * inner if box else 0
        for index, first, count in pieces(lengths, limit):
            yield index, start + first, count
        return
    if inner > limit or math.prod(lengths[1:]) >= _RUN:
        for row in range(lengths[0]):
            for index, first, count in stretches(shape[1:], box[1:], limit):
                yield (row, *index), (box[0].start + row) * inner + first, count
        return
    step = limit // inner
    for row in range(0, lengths[0], step):
        rows = min(step, lengths[0] - row)
        yield (slice(row, row + rows),), (box[0].start + row) * inner, rows * inner


def part_of(stretch: np.ndarray, part: tuple[int, ...], shape: tuple[int, ...], box: tuple[slice, ...]) -> np.ndarray:
    """Returns the part of a box that lies in a stretch, a view of shape ``part``; see `stretches`."""
    if not part:
        return stretch.reshape(())
    after = len(shape) - len(part) + 1
    index = (slice(None), *box[after:])
    return stretch.reshape(part[0], *shape[after:])[index]


def scatter(source: np.ndarray, target: np.ndarray, convert: Convert) -> None:
    """Converts into a target of any strides; a transposed one is written in squares, several times as fast."""
    if target.ndim < 2 or target.strides[-1] == target.itemsize:
        convert(source, target)
        return
    rows, columns = target.shape[-2:]
    for lead in np.ndindex(target.shape[:-2]):
        for row in range(0, rows, _TILE):
            for column in range(0, columns, _TILE):
                square: Index = (*lead, slice(row, row + _TILE), slice(column, column + _TILE))
                tile = source[square]
                if source.dtype != target.dtype:
                    tile = np.empty(tile.shape, target.dtype)
                    convert(source[square], tile)
                target[square] = tile


def widen_into(bits: np.ndarray, target: np.ndarray) -> None:
    """Writes bfloat16 bits (uint16) as the float32 of the same values."""
    np.left_shift(bits, np.uint32(16), out=target.view(np.uint32), dtype=np.uint32)


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Turns bfloat16 bits (uint16, any shape) into the float32 array of the same values, exactly."""
    values = np.empty(bits.shape, np.float32)
    widen_into(bits, values)
    return values

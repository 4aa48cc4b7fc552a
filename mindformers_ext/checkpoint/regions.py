"""Which values of a stored tensor a process needs for its part of a parameter, and where in the part they belong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mindformers_ext.parallel.plan import Range, Region

Box = tuple[slice, ...]


def boxes_inside(
    view: np.ndarray, parameter: np.ndarray, region: Region, part: np.ndarray
) -> list[tuple[Box, np.ndarray]] | None:
    """Cuts out of a view into a parameter what lies in a region of it.

    Only the addresses of ``view`` and ``parameter`` count; neither is read or written.

    Args:
        view: an array in the memory of ``parameter``.
        parameter: the whole parameter, C-contiguous.
        region: a part of it.
        part: array of ``region.shape``, C-contiguous.

    Returns:
        Boxes of the view that together cover what it shares with the region once, each with the array of its shape in
        the memory of ``part`` where its values belong. None if an axis of the view runs along several dimensions of
        the parameter at once, or backwards.
    """
    if not view.size or not part.size:
        return []
    offset = (_address(view) - _address(parameter)) // parameter.itemsize
    origin = [int(position) for position in np.unravel_index(offset, parameter.shape)]
    axes = _axes_by_dimension(view, parameter, origin)
    if axes is None:
        return None
    found: list[tuple[Box, np.ndarray]] = []
    for whole, here in region.boxes():
        choices = [
            _runs(there.start - first, there.stop - first, [(step, view.shape[axis]) for axis, step in along])
            for there, first, along in zip(whole, origin, axes, strict=True)
        ]
        starts = [
            (held.start + first - there.start) * stride
            for there, held, first, stride in zip(whole, here, origin, part.strides, strict=True)
        ]
        for runs in itertools.product(*choices):
            box = [slice(0, 1)] * view.ndim
            strides = [part.itemsize] * view.ndim
            start = sum(starts)
            for along, ranges, stride in zip(axes, runs, part.strides, strict=True):
                for (axis, step), (begin, end) in zip(along, ranges, strict=True):
                    box[axis], strides[axis] = slice(begin, end), step * stride
                    start += begin * step * stride
            shape = tuple(cut.stop - cut.start for cut in box)
            found.append((tuple(box), np.ndarray(shape, part.dtype, part, start, strides)))
    return found


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _axes_by_dimension(
    view: np.ndarray, parameter: np.ndarray, origin: Sequence[int]
) -> list[list[tuple[int, int]]] | None:
    """For each dimension of the parameter the axes of a view that run along it, with their steps, longest step first.

    Axes of size 1 run nowhere. None if the axes leave their dimension.
    """
    axes: list[list[tuple[int, int]]] = [[] for _ in parameter.shape]
    last = list(origin)
    for axis in sorted(range(view.ndim), key=lambda axis: -view.strides[axis]):
        size, stride = view.shape[axis], view.strides[axis]
        if size == 1:
            continue
        sizes = zip(parameter.shape, parameter.strides, strict=True)
        dim = next((dim for dim, (length, width) in enumerate(sizes) if length > 1 and stride >= width), None)
        if dim is None or stride % parameter.strides[dim]:
            return None
        step = stride // parameter.strides[dim]
        axes[dim].append((axis, step))
        last[dim] += (size - 1) * step
    return axes if all(end < length for end, length in zip(last, parameter.shape, strict=True)) else None


def _runs(first: int, stop: int, axes: Sequence[tuple[int, int]]) -> list[tuple[Range, ...]]:
    """Covers the indices whose positions lie in ``[first, stop)`` with products of one range per axis.

    Args:
        first: the first position that is wanted; index 0 is at position 0.
        stop: the position after the last one.
        axes: step and size of each axis, longest step first.
    """
    if not axes:
        return [()] if first <= 0 < stop else []
    (step, size), rest = axes[0], axes[1:]
    reach = sum((count - 1) * inner for inner, count in rest)
    begin, end = max(0, -(-(first - reach) // step)), min(size, -(-stop // step))
    if not rest:
        return [((begin, end),)] if begin < end else []
    found: list[tuple[Range, list[tuple[Range, ...]]]] = []
    for index in range(begin, end):
        inner = _runs(first - index * step, stop - index * step, rest)
        if found and found[-1][1] == inner:
            found[-1] = ((found[-1][0][0], index + 1), inner)
        else:
            found.append(((index, index + 1), inner))
    return [(outer, *run) for outer, inner in found for run in inner]

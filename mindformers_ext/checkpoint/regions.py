"""Which rows of a stored tensor a process needs for its part of a parameter."""

from __future__ import annotations

import numpy as np

from mindformers_ext.parallel.plan import Range, Region


def rows_inside(view: np.ndarray, parameter: np.ndarray, region: Region) -> list[Range]:
    """Returns the runs of rows of a view into a parameter that touch a region of it.

    Every axis of the view runs along one dimension of the parameter, perhaps with others that split the dimension.

    Args:
        view: an array in the memory of ``parameter``.
        parameter: the whole parameter, C-contiguous.
        region: a part of it.
    """
    if not view.size or not view.ndim:
        return [(0, len(view))] if view.ndim and view.size else []
    axes = [_axis(stride, size, parameter) for stride, size in zip(view.strides, view.shape, strict=True)]
    offset = view.__array_interface__["data"][0] - parameter.__array_interface__["data"][0]
    dim, step = axes[0]
    begin = offset % (parameter.strides[dim - 1] if dim else parameter.nbytes) // parameter.strides[dim]
    # What the other axes add along the same dimension.
    reach = sum(
        (size - 1) * other_step
        for (other, other_step), size in zip(axes[1:], view.shape[1:], strict=True)
        if other == dim
    )
    lowest = begin + np.arange(len(view)) * step
    needed = np.zeros(len(view), bool)
    for first, last in region.ranges[dim]:
        needed |= (lowest < last) & (lowest + reach >= first)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], needed, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _axis(stride: int, size: int, parameter: np.ndarray) -> Range:
    """The dimension that an axis runs along, and its step there in elements of the dimension."""
    if size == 1:
        return parameter.ndim - 1, 0
    for dim, (length, width) in enumerate(zip(parameter.shape, parameter.strides, strict=True)):
        if length > 1 and stride >= width:
            return dim, stride // width
    return parameter.ndim - 1, stride // parameter.itemsize

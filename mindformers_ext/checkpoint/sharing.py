"""Which process writes which piece of a parameter, worked out from what every process holds of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindformers_ext.checkpoint.errors import CheckpointError
from mindformers_ext.parallel.plan import Range, Region

Box = tuple[Range, ...]  # begin and end along every dimension


@dataclass(frozen=True)
class Held:
    """What a process holds of a tensor.

    Attributes:
        dtype: numpy's name of the type.
        region: the part.
    """

    dtype: str
    region: Region


@dataclass(frozen=True)
class SharedTensor:
    """A tensor as a checkpoint stores it: cut into equal pieces along some dimensions, each in the file of its writers.

    Attributes:
        name: of the tensor.
        dtype: numpy's name of the type.
        shape: of the whole.
        cuts: number of pieces along each dimension; pieces count in C order.
        holders: the ranks that hold a piece, by piece.
        writers: the ranks that write it, by piece.
        joined: the processes hold parts that are no such pieces; the one writer gets the whole from them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    writers: tuple[tuple[int, ...], ...]
    joined: bool = False

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of each piece."""
        return tuple(length // count for length, count in zip(self.shape, self.cuts, strict=True))


def share_tensors(everyone: Sequence[Mapping[str, Held]], remove_redundancy: bool) -> list[SharedTensor]:
    """Decides who writes what; every process that knows what all of them hold decides the same.

    Args:
        everyone: for each rank what it holds, by name.
        remove_redundancy: each piece is written once, by the rank that has least to write; otherwise by every holder.

    Raises:
        CheckpointError: processes disagree about a tensor, or a part of it is held by none.
    """
    names = dict.fromkeys(name for held in everyone for name in held)
    grids = [_grid(name, {rank: held[name] for rank, held in enumerate(everyone) if name in held}) for name in names]
    loads = [0] * len(everyone)
    writers: dict[str, list[tuple[int, ...]]] = {grid.name: [()] * len(grid.holders) for grid in grids}
    chosen = []
    for grid in grids:
        size = math.prod(grid.piece_shape) * np.dtype(grid.dtype).itemsize
        for piece, holders in enumerate(grid.holders):
            if remove_redundancy or grid.joined:
                chosen.append((len(holders), -size, grid.name, piece, holders))
                continue
            writers[grid.name][piece] = holders
            for rank in holders:
                loads[rank] += size
    # Pieces that few ranks hold come first, and large ones before small ones, so that the loads end alike.
    for _, minus_size, name, piece, holders in sorted(chosen):
        writer = min(holders, key=lambda rank: (loads[rank], rank))
        loads[writer] -= minus_size
        writers[name][piece] = (writer,)
    return [_with_writers(grid, tuple(writers[grid.name])) for grid in grids]


def _with_writers(grid: SharedTensor, writers: tuple[tuple[int, ...], ...]) -> SharedTensor:
    # Of a tensor that is joined nobody holds what is written before its writer has it.
    return replace(grid, writers=writers, holders=writers if grid.joined else grid.holders)


def _grid(name: str, held: Mapping[int, Held]) -> SharedTensor:
    """Describes a tensor without its writers."""
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, one in held.items():
        kinds.setdefault((one.dtype, one.region.full), rank)
    if len(kinds) > 1:
        shown = " and ".join(f"{dtype} {list(shape)} on rank {rank}" for (dtype, shape), rank in kinds.items())
        raise CheckpointError(f"{name} cannot be saved: it is {shown}")
    ((dtype, shape),) = kinds
    cuts = _cuts(shape, {one.region.ranges for one in held.values()})
    if cuts is None:
        owners_of_cells(name, {rank: one.region for rank, one in held.items()})
        return SharedTensor(name, dtype, shape, (1,) * len(shape), (tuple(sorted(held)),), (), joined=True)
    holders: list[list[int]] = [[] for _ in range(math.prod(cuts))]
    for rank in sorted(held):
        holders[_piece_number(shape, cuts, held[rank].region)].append(rank)
    return SharedTensor(name, dtype, shape, cuts, tuple(map(tuple, holders)), ())


def _cuts(shape: tuple[int, ...], parts: set[tuple[tuple[Range, ...], ...]]) -> tuple[int, ...] | None:
    """Numbers of equal pieces along the dimensions, if the parts are the pieces of such a grid."""
    if any(len(pieces) != 1 for ranges in parts for pieces in ranges):
        return None
    cuts = []
    for dim, length in enumerate(shape):
        found = sorted({ranges[dim][0] for ranges in parts})
        step = length // len(found)
        if found != [(step * index, step * (index + 1)) for index in range(len(found))] or step * len(found) != length:
            return None
        cuts.append(len(found))
    return tuple(cuts) if math.prod(cuts) == len(parts) else None


def _piece_number(shape: tuple[int, ...], cuts: tuple[int, ...], region: Region) -> int:
    number = 0
    for length, count, pieces in zip(shape, cuts, region.ranges, strict=True):
        number = number * count + (pieces[0][0] * count // length if length else 0)
    return number


def owners_of_cells(name: str, regions: Mapping[int, Region]) -> dict[int, list[Box]]:
    """Cuts a tensor so that each process holds a cell wholly or not at all; gives each cell to its lowest holder.

    Args:
        name: of the tensor, for the error.
        regions: what each rank holds, whatever it looks like.

    Returns:
        The cells of each rank that has some; together they are the tensor, once.

    Raises:
        CheckpointError: no process holds some cell.
    """
    shape = next(iter(regions.values())).full
    edges = []
    for dim, length in enumerate(shape):
        ends = {end for region in regions.values() for piece in region.ranges[dim] for end in piece}
        edges.append(sorted(ends | {0, length}))
    spans = [list(itertools.pairwise(ends)) for ends in edges]
    owner = np.full([len(one) for one in spans], -1)
    for rank in sorted(regions):
        index = np.ix_(*(_held_spans(one, pieces) for one, pieces in zip(spans, regions[rank].ranges, strict=True)))
        owner[index] = np.where(owner[index] < 0, rank, owner[index])
    if (owner < 0).any():
        cell = [spans[dim][place] for dim, place in enumerate(np.argwhere(owner < 0)[0])]
        raise CheckpointError(f"{name} cannot be saved: no process holds {cell} of {list(shape)}")
    cells: dict[int, list[Box]] = {}
    for place in np.ndindex(owner.shape):
        box = tuple(spans[dim][index] for dim, index in enumerate(place))
        cells.setdefault(int(owner[place]), []).append(box)
    return cells


def _held_spans(spans: Sequence[Range], pieces: Sequence[Range]) -> list[int]:
    return [
        index for index, (begin, end) in enumerate(spans) if any(low <= begin and end <= high for low, high in pieces)
    ]


def place_in_part(region: Region, cell: Box) -> tuple[slice, ...]:
    """Returns where a cell, which lies inside one piece of a region along every dimension, is in the part."""
    found = []
    for pieces, (begin, end) in zip(region.ranges, cell, strict=True):
        start = 0
        for low, high in pieces:
            if low <= begin and end <= high:
                break
            start += high - low
        found.append(slice(start + begin - low, start + end - low))
    return tuple(found)

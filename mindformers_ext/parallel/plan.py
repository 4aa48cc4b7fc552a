"""Which part of a parameter a process holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

Range = tuple[int, int]


def split_evenly(length: int, parts: int, index: int, unit: int = 1) -> Range:
    """Returns where part ``index`` of ``parts`` begins and ends; sizes differ by one unit at most.

    Args:
        length: of the whole, a multiple of ``unit``.
        parts: number of parts.
        index: which one.
        unit: elements that stay together.
    """
    units = length // unit
    return units * index // parts * unit, units * (index + 1) // parts * unit


@dataclass(frozen=True)
class Block:
    """Rows that are split among processes.

    Attributes:
        size: number of rows.
        unit: rows that stay together, e.g. a head; 0 for rows that every process has.
        copied: with more processes than units, several have a copy of one, as of a key that query heads share.
    """

    size: int
    unit: int = 1
    copied: bool = False

    def range(self, parts: int, index: int) -> Range:
        """Returns what process ``index`` of ``parts`` holds."""
        if not self.unit:
            return 0, self.size
        units = self.size // self.unit
        if self.copied and units < parts:
            begin = units * index // parts * self.unit
            return begin, begin + self.unit
        return split_evenly(self.size, parts, index, self.unit)


@dataclass(frozen=True)
class Shard:
    """How an axis of processes splits one dimension of a parameter.

    Attributes:
        dim: the dimension.
        unit: elements that stay together, e.g. the size of a head; of a dimension without blocks.
        blocks: blocks that lie behind each other in the dimension, or in each group of it; each is split by itself.
        groups: the dimension consists of so many equal groups of blocks, as a fused projection does that is ordered by
            key-value heads. Groups are split first; processes that share one split its blocks.
    """

    dim: int
    unit: int = 1
    blocks: tuple[Block, ...] = ()
    groups: int = 1

    def ranges(self, length: int, parts: int, index: int) -> tuple[Range, ...]:
        """Returns what process ``index`` of ``parts`` holds of a dimension of ``length``."""
        size = length // self.groups
        if self.groups >= parts:
            begin, end = split_evenly(self.groups, parts, index)
            if self.groups > 1:
                return ((begin * size, end * size),)
        sharing = parts // self.groups
        start, found = index // sharing * size, []
        for block in self.blocks or (Block(size, self.unit),):
            begin, end = block.range(sharing, index % sharing)
            if begin < end:
                found.append((start + begin, start + end))
            start += block.size
        return tuple(found) or ((0, 0),)


@dataclass(frozen=True)
class FirstOnly:
    """A parameter that counts once in a sum over the axis, as the bias of a row-parallel projection: index 0 has it."""


Rule = Shard | FirstOnly
Plan = Sequence[tuple[str, Rule]]


@dataclass(frozen=True)
class Region:
    """The part of a parameter that a process holds: for each dimension, ranges that it joins.

    Attributes:
        full: shape of the whole parameter.
        ranges: begin and end of each piece, by dimension.
    """

    full: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """The region of a process that holds everything."""
        return cls(shape, tuple(((0, size),) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(end - begin for begin, end in pieces) for pieces in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Whether the part is everything."""
        return self.shape == self.full

    @property
    def size(self) -> int:
        """Elements of the part."""
        return math.prod(self.shape)

    def narrowed(self, dim: int, pieces: Sequence[Range]) -> Region:
        """Returns the region of a part of this part: ``pieces`` counts within it, along ``dim``."""
        indices = _indices(self.ranges[dim])
        kept = np.concatenate([indices[begin:end] for begin, end in pieces]) if pieces else indices[:0]
        ranges = list(self.ranges)
        ranges[dim] = _as_ranges(kept)
        return Region(self.full, tuple(ranges))

    def take(self, array: np.ndarray) -> np.ndarray:
        """Returns this part of the whole array, C-contiguous; a view where it is one piece from the start on."""
        for dim, pieces in enumerate(self.ranges):
            before: tuple[slice, ...] = (slice(None),) * dim
            parts = [array[before + (slice(begin, end),)] for begin, end in pieces]
            array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)
        return np.ascontiguousarray(array)

    def boxes(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Returns the rectangular pieces: slices of the whole, and slices of the part where each of them lies."""
        found: list[tuple[tuple[slice, ...], tuple[slice, ...]]] = [((), ())]
        for pieces in self.ranges:
            grown = []
            start = 0
            for begin, end in pieces:
                there, here = slice(begin, end), slice(start, start + end - begin)
                grown += [((*whole, there), (*part, here)) for whole, part in found]
                start += end - begin
            found = grown
        return found


def _indices(pieces: Sequence[Range]) -> np.ndarray:
    return np.concatenate([np.arange(begin, end) for begin, end in pieces]) if pieces else np.arange(0)


def _as_ranges(indices: np.ndarray) -> tuple[Range, ...]:
    if not indices.size:
        return ((0, 0),)
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks))


def rule_of(plan: Plan, name: str) -> Rule | None:
    """Returns the first rule whose shell pattern matches the parameter's name; None: every process has it whole."""
    return next((rule for pattern, rule in plan if fnmatchcase(name, pattern)), None)


def split_region(region: Region, rule: Rule | None, parts: int, index: int) -> Region | None:
    """Returns what is left of a region on process ``index`` of an axis; None where it holds nothing of it."""
    if rule is None or parts == 1:
        return region
    if isinstance(rule, FirstOnly):
        return region if index == 0 else None
    length = region.shape[rule.dim]
    return region.narrowed(rule.dim, rule.ranges(length, parts, index))


def plan_regions(
    shapes: Mapping[str, tuple[int, ...]], axes: Sequence[tuple[Plan | Callable[[str], Rule | None], int, int]]
) -> dict[str, Region]:
    """Works out what a process holds of every parameter.

    Args:
        shapes: of the whole parameters.
        axes: for each axis its plan, its number of processes and this process' index; applied in this order.

    Returns:
        The region of each parameter that the process holds something of.
    """
    regions = {}
    for name, shape in shapes.items():
        region: Region | None = Region.whole(shape)
        for plan, parts, index in axes:
            rule = plan(name) if callable(plan) else rule_of(plan, name)
            region = None if region is None else split_region(region, rule, parts, index)
        if region is not None:
            regions[name] = region
    return regions

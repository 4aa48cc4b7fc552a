"""Which tokens of a sequence a process computes, and which it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor

from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.parallel.plan import split_evenly


@dataclass(frozen=True)
class SequenceShare:
    """The tokens of one forward that a process computes.

    Attributes:
        group: the processes.
        ulysses: those of them that exchange heads for tokens: neighbours.
        colossal: those of them that gather keys, one out of each group of neighbours.
        past: slots before this forward.
        total: new slots of the whole sequence.
        is_split: whether each process has a part of them; otherwise every process has all.
        bias: gives the bias of all new tokens over each other.
    """

    group: Group
    ulysses: Group
    colossal: Group
    past: int
    total: int
    is_split: bool
    bias: Callable[[], Tensor] | None = None

    def part(self, index: int) -> tuple[int, int]:
        """First and last + 1 of the new slots of a process."""
        return split_evenly(self.total, self.group.size, index) if self.is_split else (0, self.total)

    @property
    def own(self) -> tuple[int, int]:
        """First and last + 1 of the new slots of this process."""
        return self.part(self.group.rank)

    @property
    def length(self) -> int:
        """Number of new slots of this process."""
        begin, end = self.own
        return end - begin

    def block(self, index: int) -> tuple[int, int]:
        """First and last + 1 of the new slots of the processes that exchange heads, of group ``index`` of these."""
        size = self.ulysses.size
        return self.part(index * size)[0], self.part(index * size + size - 1)[1]

    def kept(self) -> np.ndarray:
        """Which of the new tokens that this process computes it keeps in its cache, counted among them."""
        begin, end = self.own
        if self.is_split:
            return np.arange(end - begin)
        slots = np.arange(self.past, self.past + self.total)
        return np.flatnonzero(slots % self.group.size == self.group.rank)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Joins the parts of all processes along ``dim``, whose size is `length` here."""
        return _joined(part, dim, self.group, [self.part(index) for index in range(self.group.size)])

    def gather_blocks(self, block: Tensor, dim: int) -> Tensor:
        """Joins the `block` of every group that exchanges heads along ``dim``."""
        return _joined(block, dim, self.colossal, [self.block(index) for index in range(self.colossal.size)])

    def last(self, hidden: Tensor, batch: int, kept: int) -> Tensor:
        """Returns the last ``kept`` tokens of each row, float32 ``[B * kept, W]``, from those here."""
        begin, end = self.own
        first = self.total - kept
        rows = hidden.asnumpy().reshape(batch, end - begin, -1)
        found = np.zeros((batch, kept, rows.shape[-1]), np.float32)
        if end > first:
            found[:, max(begin - first, 0) : end - first] = rows[:, max(first - begin, 0) :]
        return Tensor.from_numpy(self.group.all_reduce(found).reshape(batch * kept, -1))


def _joined(part: Tensor, dim: int, group: Group, ranges: list[tuple[int, int]]) -> Tensor:
    array = np.moveaxis(part.asnumpy(), dim, 0)
    joined = np.concatenate(group.all_gather_parts(array, [end - begin for begin, end in ranges]))
    return Tensor.from_numpy(np.ascontiguousarray(np.moveaxis(joined, 0, dim)))


def share_of(
    context: ParallelContext, past: int, length: int, bias: Callable[[], Tensor] | None = None
) -> SequenceShare | None:
    """Returns how processes share the tokens of a forward: they split the first ones, if each gets at least one.

    Args:
        context: the place of this process.
        past: tokens before.
        length: new tokens.
        bias: see `SequenceShare`.

    Returns:
        None where one process has the sequence.
    """
    group = context.cp
    if group.size == 1:
        return None
    is_split = past == 0 and length >= group.size
    return SequenceShare(group, context.ulysses, context.colossal, past, length, is_split, bias)

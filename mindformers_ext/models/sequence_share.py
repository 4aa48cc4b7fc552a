"""Which tokens of a sequence a process computes, and which it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor

from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.plan import split_evenly


@dataclass(frozen=True)
class SequenceShare:
    """The tokens of one forward that a process computes.

    Attributes:
        group: the processes.
        past: slots before this forward.
        total: new slots of the whole sequence.
        is_split: whether each process has a part of them; otherwise every process has all.
        method: ``colossal`` (keys are gathered) or ``ulysses`` (heads are exchanged), for split tokens.
        bias: gives the bias of all new tokens over each other.
    """

    group: Group
    past: int
    total: int
    is_split: bool
    method: str
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

    def kept(self) -> np.ndarray:
        """Which of the new tokens that this process computes it keeps in its cache, counted among them."""
        begin, end = self.own
        if self.is_split:
            return np.arange(end - begin)
        slots = np.arange(self.past, self.past + self.total)
        return np.flatnonzero(slots % self.group.size == self.group.rank)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Joins the parts of all processes along ``dim``, whose size is `length` here."""
        array = np.moveaxis(part.asnumpy(), dim, 0)
        sizes = [end - begin for begin, end in map(self.part, range(self.group.size))]
        joined = np.concatenate(self.group.all_gather_parts(array, sizes))
        return Tensor.from_numpy(np.ascontiguousarray(np.moveaxis(joined, 0, dim)))

    def last(self, hidden: Tensor, batch: int, kept: int) -> Tensor:
        """Returns the last ``kept`` tokens of each row, float32 ``[B * kept, W]``, from those here."""
        begin, end = self.own
        first = self.total - kept
        rows = hidden.asnumpy().reshape(batch, end - begin, -1)
        found = np.zeros((batch, kept, rows.shape[-1]), np.float32)
        if end > first:
            found[:, max(begin - first, 0) : end - first] = rows[:, max(first - begin, 0) :]
        return Tensor.from_numpy(self.group.all_reduce(found).reshape(batch * kept, -1))


def share_of(
    group: Group, past: int, length: int, method: str, bias: Callable[[], Tensor] | None = None
) -> SequenceShare | None:
    """Returns how processes share the tokens of a forward: they split the first ones, if each gets at least one.

    Args:
        group: the processes.
        past: tokens before.
        length: new tokens.
        method: see `SequenceShare`.
        bias: see `SequenceShare`.

    Returns:
        None for a group of one process.
    """
    if group.size == 1:
        return None
    return SequenceShare(group, past, length, past == 0 and length >= group.size, method, bias)

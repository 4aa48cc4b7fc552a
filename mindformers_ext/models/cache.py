"""What a layer remembers of the tokens it has seen, written in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.parallel.collectives import Group

# Buffers start at this many slots and double: attention never reads more than twice what is filled.
_FIRST_CAPACITY = 128


@dataclass(frozen=True)
class RowCopy:
    """A row of one state that another state takes over.

    Attributes:
        source: its number in the state that it comes from, where it has no pads.
        target: its number in the state that takes it.
        start: slot of its first token there.
        count: how many of its tokens are taken, the first ones.
    """

    source: int
    target: int
    start: int
    count: int


class LayerState:
    """State of one layer for the rows of a batch: the interface that every kind of layer fills.

    Attributes:
        max_length: most tokens that a row will ever hold.
        length: tokens that each row holds, pads included; the layer counts it on.
        can_crop: whether it can forget its last tokens.
    """

    can_crop: ClassVar[bool] = False

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        raise NotImplementedError

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` tokens in all.

        Raises:
            ValueError: ``length`` exceeds ``max_length``.
        """
        if length > self.max_length:
            raise ValueError(f"the cache was made for {self.max_length} tokens a row and cannot hold {length}")

    def reorder(self, rows: np.ndarray, shared: int = 0) -> None:
        """Makes row ``i`` a copy of what was row ``rows[i]``; fewer or more rows than before are fine.

        Args:
            rows: int ``[new B]``.
            shared: the first so many tokens of both rows are known to be equal and are not copied: beams of one
                prompt differ in their last tokens only.
        """
        raise NotImplementedError

    def crop(self, length: int) -> None:
        """Forgets all tokens from ``length`` on.

        Raises:
            ValueError: this kind of state cannot take tokens back.
        """
        raise NotImplementedError

    def limit(self, max_length: int) -> None:
        """Changes how many tokens a row will ever hold; there are no more than these yet."""
        self.max_length = max_length

    def shift(self, by: int) -> None:
        """Puts so many pads in front of every row, or, negative, takes them away, so that `length` changes by as many.

        Of a row that has fewer pads to take away, first tokens are lost; its state is of no use then.
        """
        raise NotImplementedError

    def take_rows(self, rows: np.ndarray, source: Any) -> None:
        """Makes rows those of another state of this kind, whose last tokens are then the last ones here.

        Args:
            rows: int ``[n]``, rows of this state.
            source: state of n rows. What it holds beyond `length` tokens are pads; a row that holds less gets pads in
                front.
        """
        raise NotImplementedError

    def take(self, source: Any, copies: Sequence[RowCopy], length: int) -> None:
        """Takes over rows of another state of the same layer, whose memory stays its own.

        Args:
            source: a state of the same class.
            copies: which rows go where. A state that cannot be cropped takes all tokens of a row, or none.
            length: tokens that each row holds then, pads included.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Frees the buffers."""
        raise NotImplementedError


class SlotState(LayerState):
    """Buffers ``[B, heads, capacity, D]`` with one slot a token, which grow by doubling.

    Args:
        batch_size: rows B.
        shapes: heads and D of each buffer.
        max_length: most tokens a row will ever hold.
    """

    can_crop = True

    def __init__(self, batch_size: int, shapes: Sequence[tuple[int, int]], max_length: int) -> None:
        super().__init__(max_length)
        self.buffers = [zeros(batch_size, heads, 0, dim) for heads, dim in shapes]

    @property
    def capacity(self) -> int:
        """Slots that are allocated now."""
        return self.buffers[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.size * buffer.itemsize for buffer in self.buffers)

    def reserve(self, length: int) -> None:
        """See `LayerState.reserve`."""
        super().reserve(length)
        if length <= self.capacity:
            return
        capacity = max(_FIRST_CAPACITY, self.capacity)
        while capacity < length:
            capacity *= 2
        self.buffers = [self._resized(buffer, min(capacity, self.max_length)) for buffer in self.buffers]

    def append(self, *values: Tensor) -> None:
        """Appends the values ``[B, heads, S, D]`` of new tokens, one tensor a buffer."""
        length = self.length + values[0].shape[2]
        self.reserve(length)
        for buffer, new in zip(self.buffers, values, strict=True):
            ops.write_slots(buffer, self.length, new)
        self.length = length

    def reorder(self, rows: np.ndarray, shared: int = 0) -> None:
        """See `LayerState.reorder`."""
        if len(rows) == self.buffers[0].shape[0]:
            for buffer in self.buffers:
                ops.move_rows(buffer, rows, shared, self.length)
        else:
            self.buffers = [Tensor.from_numpy(buffer.asnumpy()[rows]) for buffer in self.buffers]

    def crop(self, length: int) -> None:
        """See `LayerState.crop`."""
        self.length = min(self.length, length)

    def shift(self, by: int) -> None:
        """See `LayerState.shift`."""
        self.reserve(self.length + by)
        for buffer in self.buffers:
            ops.shift_slots(buffer, by, self.length)
        self.length += by

    def take_rows(self, rows: np.ndarray, source: SlotState) -> None:
        """See `LayerState.take_rows`."""
        count = min(self.length, source.length)
        for buffer, other in zip(self.buffers, source.buffers, strict=True):
            ops.put_rows(buffer, rows, self.length, other, source.length - count, source.length)

    def take(self, source: SlotState, copies: Sequence[RowCopy], length: int) -> None:
        """See `LayerState.take`."""
        self.reserve(length)
        for row in copies:
            for buffer, given in zip(self.buffers, source.buffers, strict=True):
                copy_slots(buffer, row, given, row.count)
        self.length = length

    def rearrange(self, slots: np.ndarray) -> None:
        """Makes slot ``t`` of row ``i`` what was slot ``slots[i, t]``, int ``[B, T]``; others are forgotten."""
        length = slots.shape[1]
        for buffer in self.buffers:
            moved = np.take_along_axis(buffer.asnumpy(), slots[:, None, :, None], axis=2)
            ops.write_slots(buffer, 0, Tensor.from_numpy(moved))
        self.length = length

    def clear(self) -> None:
        """See `LayerState.clear`."""
        self.buffers = [zeros(*buffer.shape[:2], 0, buffer.shape[3]) for buffer in self.buffers]
        self.length = 0

    def _resized(self, buffer: Tensor, capacity: int) -> Tensor:
        batch, heads, _, dim = buffer.shape
        grown = np.zeros((batch, heads, capacity, dim), np.float32)
        grown[:, :, : self.length] = buffer.asnumpy()[:, :, : self.length]
        return Tensor.from_numpy(grown)


class KeyValueState(SlotState):
    """Keys and values of one attention layer.

    Args:
        batch_size: rows B.
        heads: key-value heads.
        dim: size of a head.
        max_length: most tokens a row will ever hold.
    """

    def __init__(self, batch_size: int, heads: int, dim: int, max_length: int) -> None:
        super().__init__(batch_size, ((heads, dim), (heads, dim)), max_length)

    @property
    def key(self) -> Tensor:
        """Keys ``[B, heads, capacity, D]``."""
        return self.buffers[0]

    @property
    def value(self) -> Tensor:
        """Values ``[B, heads, capacity, D]``."""
        return self.buffers[1]

    def extend(self, count: int) -> int:
        """Makes room for ``count`` more tokens, which the caller writes; returns the slot of the first of them."""
        start = self.length
        self.reserve(start + count)
        self.length = start + count
        return start

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values ``[B, heads, S, D]``.

        Returns:
            What there is to attend to: ``key`` and ``value`` themselves when they are the first, else the whole
            buffers, whose slots from `length` on hold zeros or stale values and have to be masked.
        """
        first = self.length == 0
        self.append(key, value)
        return (key, value) if first else (self.key, self.value)


def copy_slots(buffer: Tensor, row: RowCopy, given: Tensor, count: int) -> None:
    """Writes the first ``count`` slots of a row of ``given`` ``[B, N, T, ...]`` into ``buffer``, in place."""
    values = np.ascontiguousarray(given.asnumpy()[row.source : row.source + 1, :, :count])
    ops.write_slots(ops.view_rows(buffer, row.target, row.target + 1), row.start, Tensor.from_numpy(values))


def view_rows(state: Any, begin: int, end: int) -> Any:
    """Returns the state of some rows, whose buffers are those of ``state``: what is written to one is in the other.

    Numbers that all rows share, such as `LayerState.length`, are copies: see `take_numbers`.
    """
    view = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(view, name, ops.view_rows(value, begin, end))
        elif isinstance(value, list):
            setattr(view, name, [ops.view_rows(buffer, begin, end) for buffer in value])
        elif _is_state(value):
            setattr(view, name, view_rows(value, begin, end))
    return view


def copy_rows(state: Any, rows: np.ndarray) -> Any:
    """Returns a state whose row ``i`` is a copy of row ``rows[i]`` of ``state``, which stays as it is."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Tensor.from_numpy(value.asnumpy()[rows])
        if isinstance(value, list):
            return [copied(part) for part in value]
        return copy_rows(value, rows) if hasattr(value, "__dict__") else value

    taken = copy.copy(state)
    for name, value in vars(state).items():
        setattr(taken, name, copied(value))
    return taken


def take_numbers(state: Any, views: Sequence[Any]) -> None:
    """Takes over the numbers of views that together have run a forward: of each the largest."""
    for name, value in vars(state).items():
        if isinstance(value, int):
            setattr(state, name, max(getattr(view, name) for view in views))
        elif isinstance(value, np.ndarray):
            setattr(state, name, getattr(views[0], name))
        elif _is_state(value):
            take_numbers(value, [getattr(view, name) for view in views])


def _is_state(value: Any) -> bool:
    """Whether a part of a state is a state itself."""
    return hasattr(value, "__dict__") and not isinstance(value, Tensor | Group)


def zeros(*shape: int) -> Tensor:
    """Returns float32 zeros of a shape, in memory of their own."""
    return Tensor.from_numpy(np.zeros(shape, np.float32))

"""What a layer remembers of the tokens it has seen, written in place."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from mindformers_ext import ops

# Buffers start at this many slots and double: attention never reads more than twice what is filled.
_FIRST_CAPACITY = 128


class KeyValueState:
    """Keys and values of one attention layer in preallocated buffers ``[B, heads, capacity, D]``.

    Args:
        batch_size: rows B.
        heads: key-value heads.
        dim: size of a head.
        max_length: most tokens a row will ever hold.
    """

    def __init__(self, batch_size: int, heads: int, dim: int, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._shape = (batch_size, heads, 0, dim)
        self.key = self.value = Tensor.from_numpy(np.zeros(self._shape, np.float32))

    @property
    def capacity(self) -> int:
        """Slots that are allocated now."""
        return self.key.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return 2 * self.key.size * self.key.itemsize

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` tokens in all.

        Raises:
            ValueError: ``length`` exceeds ``max_length``.
        """
        if length > self.max_length:
            raise ValueError(f"the cache was made for {self.max_length} tokens a row and cannot hold {length}")
        if length <= self.capacity:
            return
        capacity = max(_FIRST_CAPACITY, self.capacity)
        while capacity < length:
            capacity *= 2
        self.key = self._resized(self.key, min(capacity, self.max_length))
        self.value = self._resized(self.value, min(capacity, self.max_length))

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values ``[B, heads, S, D]``.

        Returns:
            What there is to attend to: ``key`` and ``value`` themselves when they are the first, else the whole
            buffers, whose slots from `length` on hold zeros or stale values and have to be masked.
        """
        past = self.length
        self.reserve(past + key.shape[2])
        ops.write_slots(self.key, past, key)
        ops.write_slots(self.value, past, value)
        self.length += key.shape[2]
        return (self.key, self.value) if past else (key, value)

    def reorder(self, rows: np.ndarray, shared: int = 0) -> None:
        """Makes row ``i`` a copy of what was row ``rows[i]``; fewer or more rows than before are fine.

        Args:
            rows: int ``[new B]``.
            shared: the first so many tokens of both rows are known to be equal and are not copied: beams of one
                prompt differ in their last tokens only.
        """
        if len(rows) == self.key.shape[0]:
            ops.move_rows(self.key, rows, shared, self.length)
            ops.move_rows(self.value, rows, shared, self.length)
            return
        self.key = Tensor.from_numpy(self.key.asnumpy()[rows])
        self.value = Tensor.from_numpy(self.value.asnumpy()[rows])

    def crop(self, length: int) -> None:
        """Forgets all tokens from ``length`` on."""
        self.length = min(self.length, length)

    def clear(self) -> None:
        """Frees the buffers."""
        batch, heads, _, dim = self.key.shape
        self.key = self.value = Tensor.from_numpy(np.zeros((batch, heads, 0, dim), np.float32))
        self.length = 0

    def _resized(self, buffer: Tensor, capacity: int) -> Tensor:
        batch, heads, _, dim = buffer.shape
        grown = np.zeros((batch, heads, capacity, dim), np.float32)
        grown[:, :, : self.length] = buffer.asnumpy()[:, :, : self.length]
        return Tensor.from_numpy(grown)

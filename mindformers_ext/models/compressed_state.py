"""What sparse attention remembers: the last tokens, and blocks of older ones.

Tokens are kept in rings by slot: slot s of the batch is slot ``s % R`` of a ring of R. Blocks are kept by number: block
w of a row covers its positions from ``w * rate`` on, whatever pads the row began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.models.cache import LayerState, RowCopy, copy_slots, zeros
from mindformers_ext.models.mask import MASKED

_FIRST_BLOCKS = 32


class CompressorState:
    """Tokens of unfinished windows, and the blocks so far.

    Args:
        batch_size: rows B.
        dim: size of a block D.
        rate: tokens of a block.
        series: 2 where a block also mixes the window before its own, else 1.
        max_length: most tokens a row will ever hold.
    """

    def __init__(self, batch_size: int, dim: int, rate: int, series: int, max_length: int) -> None:
        self.rate, self.max_blocks = rate, max_length // rate
        self._ring_shape = (batch_size, 1, series * rate, series * dim)
        self._block_dim = dim
        self.values = self.gates = _empty(batch_size, series * dim)
        self.blocks = _empty(batch_size, dim)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.size * buffer.itemsize for buffer in (self.values, self.gates, self.blocks))

    def reserve(self, length: int) -> None:
        """Makes room for the blocks of ``length`` tokens."""
        if not self.values.size:
            self.values = zeros(*self._ring_shape)
            self.gates = Tensor.from_numpy(np.full(self._ring_shape, MASKED, np.float32))
        batch, _, held, dim = self.blocks.shape
        needed, capacity = length // self.rate, max(_FIRST_BLOCKS, held)
        while capacity < needed:
            capacity *= 2
        if needed > held:
            grown = np.zeros((batch, 1, min(capacity, self.max_blocks), dim), np.float32)
            grown[:, :, :held] = self.blocks.asnumpy()
            self.blocks = Tensor.from_numpy(grown)

    def reorder(self, rows: np.ndarray, length: int, shared: int, pads: int) -> None:
        """See `LayerState.reorder`; ``pads`` is the largest number of pads of a row."""
        if len(rows) != self.values.shape[0]:
            self.values, self.gates, self.blocks = (
                Tensor.from_numpy(buffer.asnumpy()[rows]) for buffer in (self.values, self.gates, self.blocks)
            )
            self._ring_shape = (len(rows), *self._ring_shape[1:])
            return
        for ring in (self.values, self.gates):
            move_ring_rows(ring, rows, shared, length)
        ops.move_rows(self.blocks, rows, max(0, shared - pads) // self.rate, length // self.rate)

    def shift(self, by: int) -> None:
        """See `LayerState.shift`; blocks are numbered by the positions of a row, whatever pads it has."""
        for ring in (self.values, self.gates):
            ops.shift_ring(ring, by)

    def take_rows(self, rows: np.ndarray, source: CompressorState, length: int, source_length: int) -> None:
        """See `LayerState.take_rows`; the lengths are those of both states."""
        for ring, other in ((self.values, source.values), (self.gates, source.gates)):
            ops.put_ring_rows(ring, rows, length, other, source_length)
        count = min(length, source_length) // self.rate
        ops.put_rows(self.blocks, rows, count, source.blocks, 0, count)

    def take(self, source: CompressorState, row: RowCopy) -> None:
        """Takes over a row; its blocks are those of its positions, wherever it begins."""
        for ring, given in ((self.values, source.values), (self.gates, source.gates)):
            copy_ring(ring, row, given)
        copy_slots(self.blocks, replace(row, start=0), source.blocks, row.count // self.rate)

    def clear(self) -> None:
        """Frees the buffers."""
        batch, _, _, width = self._ring_shape
        self.values = self.gates = _empty(batch, width)
        self.blocks = _empty(batch, self._block_dim)


class SparseAttentionState(LayerState):
    """State of one layer of sparse attention. It cannot take tokens back.

    Args:
        batch_size: rows B.
        dim: size of the key head.
        window: tokens that are kept.
        max_length: most tokens a row will ever hold.
        compressor: blocks that the layer attends to, if it has any.
        indexer: keys of these blocks for the indexer, if it has one.
    """

    def __init__(
        self,
        batch_size: int,
        dim: int,
        window: int,
        max_length: int,
        compressor: CompressorState | None = None,
        indexer: CompressorState | None = None,
    ) -> None:
        super().__init__(max_length)
        self.compressor, self.indexer = compressor, indexer
        self.pads = 0  # most pads of a row
        self._slots = min(window, max_length)
        self.window = _empty(batch_size, dim)

    @property
    def nbytes(self) -> int:
        """See `LayerState.nbytes`."""
        return self.window.size * self.window.itemsize + sum(part.nbytes for part in self._parts())

    def reserve(self, length: int) -> None:
        """See `LayerState.reserve`."""
        super().reserve(length)
        if not self.window.size:
            batch, _, _, dim = self.window.shape
            self.window = zeros(batch, 1, self._slots, dim)
        for part in self._parts():
            part.reserve(length)

    def reorder(self, rows: np.ndarray, shared: int = 0) -> None:
        """See `LayerState.reorder`."""
        for part in self._parts():
            part.reorder(rows, self.length, shared, self.pads)
        if len(rows) == self.window.shape[0]:
            move_ring_rows(self.window, rows, shared, self.length)
        else:
            self.window = Tensor.from_numpy(self.window.asnumpy()[rows])

    def crop(self, length: int) -> None:
        """See `LayerState.crop`."""
        if length < self.length:
            raise ValueError(
                f"sparse attention cannot take tokens back: {length} of {self.length} were to be kept; run the "
                "sequence again with a new cache"
            )

    def limit(self, max_length: int) -> None:
        """See `LayerState.limit`."""
        super().limit(max_length)
        for part in self._parts():
            part.max_blocks = max_length // part.rate

    def shift(self, by: int) -> None:
        """See `LayerState.shift`."""
        self.reserve(self.length + by)
        for part in self._parts():
            part.shift(by)
        ops.shift_ring(self.window, by)
        self.length += by
        self.pads = max(0, self.pads + by)

    def take_rows(self, rows: np.ndarray, source: SparseAttentionState) -> None:
        """See `LayerState.take_rows`; the windows of both must be of one size."""
        for part, other in zip(self._parts(), source._parts(), strict=True):
            part.take_rows(rows, other, self.length, source.length)
        ops.put_ring_rows(self.window, rows, self.length, source.window, source.length)
        self.pads = max(self.pads, source.pads + self.length - source.length)

    def take(self, source: SparseAttentionState, copies: Sequence[RowCopy], length: int) -> None:
        """See `LayerState.take`.

        Raises:
            ValueError: other than all tokens of a row are wanted.
        """
        self.reserve(length)
        for row in copies:
            if row.count != source.length:
                raise ValueError(f"the state of {source.length} tokens cannot become that of {row.count}")
            copy_ring(self.window, row, source.window)
            for part, given in zip(self._parts(), source._parts(), strict=True):
                part.take(given, row)
            self.pads = max(self.pads, row.start)
        self.length = length

    def clear(self) -> None:
        """See `LayerState.clear`."""
        for part in self._parts():
            part.clear()
        self.window = _empty(self.window.shape[0], self.window.shape[3])
        self.length = self.pads = 0

    def _parts(self) -> list[CompressorState]:
        return [part for part in (self.compressor, self.indexer) if part is not None]


def copy_ring(ring: Tensor, row: RowCopy, given: Tensor) -> None:
    """Writes what the ring ``given`` still has of a row into ``ring``, both ``[B, 1, R, D]`` with their own R."""
    first = row.count - given.shape[2]  # below 0 if it is not full: slots without a token are copied too
    tokens = ops.read_ring(ops.view_rows(given, row.source, row.source + 1), first, row.count)
    ops.write_ring(ops.view_rows(ring, row.target, row.target + 1), row.start + first, tokens)


def move_ring_rows(ring: Tensor, rows: np.ndarray, start: int, stop: int) -> None:
    """Makes slots ``start`` to ``stop`` of the sequence, as far as the ring has them, those of row ``rows[i]``."""
    size = ring.shape[2]
    start = max(start, stop - size, 0)
    if start < stop:
        first, count = start % size, stop - start
        ops.move_rows(ring, rows, first, min(first + count, size))
        ops.move_rows(ring, rows, 0, max(0, first + count - size))


def _empty(batch: int, dim: int) -> Tensor:
    return zeros(batch, 1, 0, dim)

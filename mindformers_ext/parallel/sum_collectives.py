"""Collectives on CPUs from the one that MindSpore 2.10 has there for every group: the sum of float32.

Nothing is rounded: what moves is summed with zeros, and integers travel in digits of 16 bits.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

# Sums of this many 16-bit digits stay below 2^24, up to which float32 counts exactly.
_MAX_WIDE_DIGITS = 256


class SumCollectives:
    """What `collectives.Group` needs, for a group of more than one rank.

    Args:
        communicator: MindSpore's name of the group.
        rank: index of this process in it.
        size: number of members.
    """

    def __init__(self, communicator: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._sum = ops.AllReduce(ops.ReduceOp.SUM, communicator)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype in (ms.float32, ms.float16):
            return self._sum(x)
        array = x.asnumpy()
        digit = np.dtype(np.uint16 if self.size <= _MAX_WIDE_DIGITS and array.itemsize > 1 else np.uint8)
        sums = self._sum_array(_as_digits(array, digit)).astype(np.uint64)
        # Two's complement: the sum modulo 2^bits is the sum of the digits, each shifted to its place.
        total = np.zeros(len(sums), np.uint64)
        for place in range(sums.shape[1]):
            total += sums[:, place] << np.uint64(8 * digit.itemsize * place)
        return Tensor.from_numpy(total.astype(f"u{array.itemsize}").view(array.dtype).reshape(array.shape))

    def all_gather(self, x: Tensor) -> Tensor:
        array = x.asnumpy()
        parts = _to_floats(array)
        # A sum with -0.0 keeps every value, -0.0 among them.
        slots = np.full((self.size, parts.size), -0.0, np.float32)
        slots[self.rank] = parts
        return Tensor.from_numpy(_from_floats(self._sum_array(slots), array.dtype, (self.size, *array.shape)))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return Tensor.from_numpy(np.array(self.all_reduce(x).asnumpy()[self.rank]))

    def all_to_all(self, x: Tensor) -> Tensor:
        return Tensor.from_numpy(self.all_gather(x).asnumpy()[:, self.rank].copy())

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        array = x.asnumpy()
        return self._move(array.shape, array.dtype, array if self.rank == source else None)

    def send(self, x: Tensor, peer: int) -> None:
        array = x.asnumpy()
        self._move(array.shape, array.dtype, array)

    def receive(self, shape: tuple[int, ...], dtype: Any, peer: int) -> Tensor:
        return self._move(shape, np.dtype(ms.dtype_to_nptype(dtype)), None)

    def barrier(self) -> None:
        self._sum_array(np.zeros(1, np.float32))

    def _sum_array(self, x: np.ndarray) -> np.ndarray:
        return self._sum(Tensor.from_numpy(x)).asnumpy()

    def _move(self, shape: tuple[int, ...], dtype: np.dtype, array: np.ndarray | None) -> Tensor:
        """Returns on all ranks the array of the one rank that has it."""
        if array is None:
            parts = np.full(_to_floats(np.empty(shape, dtype)).size, -0.0, np.float32)
        else:
            parts = _to_floats(array)
        return Tensor.from_numpy(_from_floats(self._sum_array(parts), dtype, shape))


def _as_digits(array: np.ndarray, digit: np.dtype) -> np.ndarray:
    """Returns the bits of the elements as float32 ``[elements, digits]``, lowest digit first."""
    return np.ascontiguousarray(array).reshape(-1).view(digit).astype(np.float32).reshape(array.size, -1)


def _to_floats(array: np.ndarray) -> np.ndarray:
    """Returns float32 values, flat, from which `_from_floats` makes the array again, bit by bit."""
    if array.dtype == np.float32:
        return np.ascontiguousarray(array).reshape(-1)
    return _as_digits(array, np.dtype(np.uint8 if array.itemsize == 1 else np.uint16)).reshape(-1)


def _from_floats(parts: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype != np.float32:
        parts = parts.reshape(-1).astype(np.uint8 if dtype.itemsize == 1 else np.uint16).view(dtype)
    return parts.reshape(shape)

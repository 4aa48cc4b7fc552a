"""Collective operations: the only module that communicates.

On Ascend they are MindSpore's own. On a CPU MindSpore 2.10 has the sum of float32 over a group and nothing else, so the
rest is built from it without rounding: what moves is summed with zeros, and integers travel in 16-bit digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from mindformers_ext.ops.backend import device_target

# Sums of this many 16-bit digits stay below 2^24, up to which float32 counts exactly.
_MAX_WIDE_DIGITS = 256
_SHOWN_RANKS = 8


@dataclass
class Count:
    """Calls of a collective, and the bytes that this rank sends in them."""

    calls: int = 0
    bytes: int = 0


@dataclass
class Traffic:
    """What this rank sends, by collective and group.

    Bytes are those of a native implementation, whatever the CPU really moves: with n ranks and a tensor of b bytes,
    2 b (n - 1) / n for the sum (ring), b (n - 1) for a gather and for the source of a broadcast, b (n - 1) / n for
    reduce_scatter and all_to_all, b for a send.
    """

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)

    def add(self, collective: str, group: str, sent: int) -> None:
        """Counts one call that sends ``sent`` bytes."""
        count = self.counts.setdefault((collective, group), Count())
        count.calls += 1
        count.bytes += sent

    def total(self, collective: str | None = None, group: str | None = None) -> Count:
        """Returns the sum over the calls of one collective, in one group, or both; None means all."""
        total = Count()
        for (made, where), count in self.counts.items():
            if collective in (None, made) and group in (None, where):
                total.calls += count.calls
                total.bytes += count.bytes
        return total

    def by_group(self) -> dict[str, Count]:
        """Returns the sum over all calls in each group, as it is now."""
        return {group: self.total(group=group) for group in dict.fromkeys(group for _, group in self.counts)}

    def clear(self) -> None:
        """Starts again at zero."""
        self.counts.clear()


class _Collectives(Protocol):
    """What a device does for a group of more than one rank; sources and peers are indices in the group."""

    def all_reduce(self, x: Tensor) -> Tensor: ...
    def all_gather(self, x: Tensor) -> Tensor: ...
    def reduce_scatter(self, x: Tensor) -> Tensor: ...
    def all_to_all(self, x: Tensor) -> Tensor: ...
    def broadcast(self, x: Tensor, source: int) -> Tensor: ...
    def send(self, x: Tensor, peer: int) -> None: ...
    def receive(self, shape: tuple[int, ...], dtype: Any, peer: int) -> Tensor: ...
    def barrier(self) -> None: ...


class Group:
    """Ranks that communicate. Every rank of a group makes the same calls in the same order.

    Data are MindSpore tensors or numpy arrays, and results are of the same kind. Types: float32, float16, bool and
    integers; sums of integers wrap around as in numpy. Shapes and types are equal on all ranks. On a CPU the gradient
    passes through `all_reduce` alone, which sums it over the group; the other results are constants there.

    A group of one rank returns what it is given, counts nothing and never communicates.

    Attributes:
        name: name of the group in the traffic and in messages.
        ranks: global ranks of the members.
        rank: index of this process among them.
        size: number of members.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, communicator: str = "", traffic: Traffic | None = None
    ) -> None:
        """Describes a group; `groups.init_parallel` makes the real ones.

        Args:
            name: name of the group.
            ranks: global ranks of the members, in their order in the group.
            rank: global rank of this process.
            communicator: MindSpore's name of the group, made beforehand; empty where there is one member.
            traffic: where calls are counted.
        """
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.traffic = Traffic() if traffic is None else traffic
        self._communicator = communicator

    @cached_property
    def _device(self) -> _Collectives:
        if device_target() == "CPU":
            return _CpuCollectives(self._communicator, self.rank, self.size)
        return _NativeCollectives(self._communicator, self.ranks)

    @contextmanager
    def _call(self, collective: str, sent: int) -> Iterator[_Collectives]:
        """Counts a call and says which one it was when it fails."""
        self.traffic.add(collective, self.name, sent)
        try:
            yield self._device
        except Exception as error:
            shown = ", ".join(str(rank) for rank in self.ranks[:_SHOWN_RANKS])
            more = ", ..." if self.size > _SHOWN_RANKS else ""
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConnectionError(
                f"{collective} in group {self.name!r} (ranks {shown}{more}) failed on rank {self.ranks[self.rank]}: "
                f"a member has probably ended, or makes another call ({reason})"
            ) from error

    def all_reduce(self, x: Any) -> Any:
        """Returns the sum over the group: float32, float16 or integers of any shape.

        Raises:
            ValueError: the type cannot be summed.
        """
        _check_summed(x)
        if self.size == 1 or _size(x) == 0:
            return x
        with self._call("all_reduce", 2 * (self.size - 1) * _nbytes(x) // self.size) as device:
            return _like(x, device.all_reduce(_tensor(x)))

    def all_gather(self, x: Any) -> Any:
        """Returns what all ranks gave, ``[size, *x.shape]`` in the order of the group."""
        if self.size == 1 or _size(x) == 0:
            # Without elements the shape can be had from x itself, as many times as one likes.
            return x.reshape((self.size, *x.shape))
        with self._call("all_gather", (self.size - 1) * _nbytes(x)) as device:
            return _like(x, device.all_gather(_tensor(x)))

    def all_gather_parts(self, part: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        """Returns what all ranks gave where their arrays differ in the first dimension.

        Args:
            part: array of this rank, ``[sizes[rank], ...]``; a rank that gives nothing may have more than its size.
            sizes: first dimension of each rank's array, the same on all ranks.
        """
        padded = np.zeros((max(sizes), *part.shape[1:]), part.dtype)
        padded[: sizes[self.rank]] = part[: sizes[self.rank]]
        return [rows[:size] for rows, size in zip(self.all_gather(padded), sizes, strict=True)]

    def reduce_scatter(self, x: Any) -> Any:
        """Sums ``x [size, ...]`` over the group and returns slice ``rank`` of the sum, ``[...]``.

        Raises:
            ValueError: the first dimension is not the size of the group, or the type cannot be summed.
        """
        self._check_slots("reduce_scatter", x)
        _check_summed(x)
        if self.size == 1 or _size(x) == 0:
            return x[0]
        with self._call("reduce_scatter", (self.size - 1) * _nbytes(x) // self.size) as device:
            return _like(x, device.reduce_scatter(_tensor(x)))

    def all_to_all(self, x: Any) -> Any:
        """Sends ``x[j]`` to rank j; returns ``[size, ...]`` whose slice j came from rank j.

        Raises:
            ValueError: the first dimension is not the size of the group.
        """
        self._check_slots("all_to_all", x)
        if self.size == 1 or _size(x) == 0:
            return x
        with self._call("all_to_all", (self.size - 1) * _nbytes(x) // self.size) as device:
            return _like(x, device.all_to_all(_tensor(x)))

    def broadcast(self, x: Any, source: int) -> Any:
        """Returns the ``x`` of member ``source`` (its index in the group); other ranks give one of its shape and type.

        Raises:
            ValueError: there is no such member.
        """
        self._check_member("broadcast", source)
        if self.size == 1 or _size(x) == 0:
            return x
        with self._call("broadcast", (self.size - 1) * _nbytes(x) if self.rank == source else 0) as device:
            return _like(x, device.broadcast(_tensor(x), source))

    def send(self, x: Any, peer: int) -> None:
        """Sends ``x`` to member ``peer`` of a group of two, which calls `receive` with its shape and type.

        On a CPU both calls end together; on Ascend a send may end before its data are received.

        Raises:
            ValueError: the group has more than two members, or ``peer`` is this rank.
        """
        self._check_pair("send", peer)
        if _size(x):
            with self._call("send", _nbytes(x)) as device:
                device.send(_tensor(x), peer)

    def receive(self, shape: Sequence[int], dtype: Any, peer: int) -> Any:
        """Returns what member ``peer`` of a group of two sends.

        Args:
            shape: its shape.
            dtype: its type; a MindSpore type gives a tensor, a numpy type an array.
            peer: index of the sender in the group.

        Raises:
            ValueError: the group has more than two members, or ``peer`` is this rank.
        """
        self._check_pair("receive", peer)
        shape = tuple(int(length) for length in shape)
        numpy_wanted = not isinstance(dtype, ms.Type)
        kind = Tensor.from_numpy(np.zeros(1, dtype)).dtype if numpy_wanted else dtype
        if 0 in shape:
            result = _tensor(np.zeros(shape, ms.dtype_to_nptype(kind)))
        else:
            with self._call("receive", 0) as device:
                result = device.receive(shape, kind, peer)
        return result.asnumpy() if numpy_wanted else result

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns what all ranks gave: each a value that JSON can hold, or bytes.

        JSON turns tuples into lists and keys into strings; a group of one rank does so too.

        Raises:
            TypeError: JSON cannot hold the value.
        """
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        message = (b"b" if isinstance(value, bytes) else b"j") + raw
        lengths = self.all_gather(np.array([len(message)], np.int64)).ravel()
        words = np.zeros(-(-int(lengths.max()) // 4), np.int32)
        words.view(np.uint8)[: len(message)] = np.frombuffer(message, np.uint8)
        gathered = self.all_gather(words)
        messages = [row.view(np.uint8)[:length].tobytes() for row, length in zip(gathered, lengths, strict=True)]
        return [text[1:] if text[:1] == b"b" else json.loads(text[1:]) for text in messages]

    def any(self, flag: bool) -> bool:
        """Tells whether ``flag`` is true on any rank."""
        return bool(self.all_reduce(np.array([flag], np.float32))[0])

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        if self.size > 1:
            with self._call("barrier", 0) as device:
                device.barrier()

    def _check_slots(self, collective: str, x: Any) -> None:
        if x.ndim == 0 or x.shape[0] != self.size:
            raise ValueError(
                f"{collective} in group {self.name!r}: the first dimension of {tuple(x.shape)} must be the number of "
                f"ranks, {self.size}"
            )

    def _check_member(self, collective: str, index: int) -> None:
        if not 0 <= index < self.size:
            raise ValueError(f"{collective} in group {self.name!r}: {index} is not a member, 0 to {self.size - 1}")

    def _check_pair(self, collective: str, peer: int) -> None:
        if self.size != 2 or peer != 1 - self.rank:
            raise ValueError(
                f"{collective} in group {self.name!r}: member {self.rank} of {self.size} cannot have peer {peer}; "
                "send and receive work between the two members of a group of two"
            )


class _CpuCollectives:
    """Everything from the sum of float32 over a group."""

    def __init__(self, communicator: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._sum = ops.AllReduce(ops.ReduceOp.SUM, communicator)

    def _sum_array(self, x: np.ndarray) -> np.ndarray:
        return self._sum(Tensor.from_numpy(x)).asnumpy()

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype in (ms.float32, ms.float16):
            return self._sum(x)
        array = x.asnumpy()
        digit = np.dtype(np.uint16 if self.size <= _MAX_WIDE_DIGITS and array.itemsize > 1 else np.uint8)
        digits = _as_digits(array, digit)
        sums = self._sum_array(digits).astype(np.uint64)
        # Two's complement: the sum modulo 2^bits is the sum of the digits, each shifted to its place.
        total = np.zeros(len(sums), np.uint64)
        for place in range(sums.shape[1]):
            total += sums[:, place] << np.uint64(8 * digit.itemsize * place)
        unsigned = total.astype(f"u{array.itemsize}")
        return Tensor.from_numpy(unsigned.view(array.dtype).reshape(array.shape))

    def all_gather(self, x: Tensor) -> Tensor:
        array = x.asnumpy()
        parts = _to_floats(array)
        # A sum with -0.0 keeps every value, -0.0 among them.
        slots = np.full((self.size, parts.size), -0.0, np.float32)
        slots[self.rank] = parts
        return Tensor.from_numpy(_from_floats(self._sum_array(slots), array.dtype, (self.size, *array.shape)))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return Tensor.from_numpy(self.all_reduce(x).asnumpy()[self.rank].copy())

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

    def _move(self, shape: tuple[int, ...], dtype: np.dtype, array: np.ndarray | None) -> Tensor:
        """Returns on all ranks the array of the one rank that has it."""
        if array is None:
            parts = np.full(_to_floats(np.empty(shape, dtype)).size, -0.0, np.float32)
        else:
            parts = _to_floats(array)
        return Tensor.from_numpy(_from_floats(self._sum_array(parts), dtype, shape))


class _NativeCollectives:
    """MindSpore's own collectives on Ascend."""

    def __init__(self, communicator: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.communicator = communicator
        self._all_reduce = ops.AllReduce(ops.ReduceOp.SUM, communicator)
        self._all_gather = ops.AllGather(communicator)
        self._reduce_scatter = ops.ReduceScatter(ops.ReduceOp.SUM, communicator)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._all_gather(x.reshape((1, *x.shape)))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._reduce_scatter(x).reshape(x.shape[1:])

    def all_to_all(self, x: Tensor) -> Tensor:
        result = mint.empty_like(x)
        mint.distributed.all_to_all_single(result, x, group=self.communicator)
        return result

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        result = x.copy()
        mint.distributed.broadcast(result, self.ranks[source], group=self.communicator)
        return result

    def send(self, x: Tensor, peer: int) -> None:
        mint.distributed.send(x, self.ranks[peer], group=self.communicator)

    def receive(self, shape: tuple[int, ...], dtype: Any, peer: int) -> Tensor:
        result = mint.empty(shape, dtype=dtype)
        mint.distributed.recv(result, self.ranks[peer], group=self.communicator)
        return result

    def barrier(self) -> None:
        mint.distributed.barrier(group=self.communicator)


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


def _check_summed(x: Any) -> None:
    if x.dtype in ((ms.bool_, ms.float64) if isinstance(x, Tensor) else (np.bool_, np.float64)):
        raise ValueError(f"a sum over ranks takes float32, float16 or integers, not {x.dtype}")


def _size(x: Any) -> int:
    return math.prod(x.shape)


def _nbytes(x: Any) -> int:
    return int(x.nbytes)


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else Tensor.from_numpy(np.ascontiguousarray(x))


def _like(x: Any, result: Tensor) -> Any:
    return result if isinstance(x, Tensor) else result.asnumpy()

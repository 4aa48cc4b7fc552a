"""Collective operations: the only module that communicates.

On Ascend they are MindSpore's own. On CPUs they go over the connections of `mesh`: MindSpore 2.10 has little more than
the sum of float32 there, and no way to end a call whose peers have failed. `sum_collectives` makes do with that sum.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function

from mindformers_ext.ops.backend import device_target, recording_gradient
from mindformers_ext.parallel.mesh import Mesh, PeerError, PeerLostError, Report
from mindformers_ext.parallel.sum_collectives import SumCollectives

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "barrier")
# Up to here all ranks send everything to each other: one exchange in place of two.
_SMALL_SUM_BYTES = 1 << 15
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
    finished: int = 0  # calls that have ended, of all collectives and groups; never starts again

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
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        communicator: str = "",
        traffic: Traffic | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Describes a group; `groups.init_parallel` makes the real ones.

        Args:
            name: name of the group.
            ranks: global ranks of the members, in their order in the group.
            rank: global rank of this process.
            communicator: MindSpore's name of the group, made beforehand; empty with a mesh, and for one member.
            traffic: where calls are counted.
            mesh: the connections of this process, where calls go over them.
        """
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.traffic = Traffic() if traffic is None else traffic
        self._communicator = communicator
        self._mesh = mesh

    @cached_property
    def _device(self) -> _Collectives:
        if self._mesh is not None:
            return _CpuCollectives(self._mesh, self.name, self.ranks, self.rank)
        if device_target() == "CPU":
            return SumCollectives(self._communicator, self.rank, self.size)
        return _NativeCollectives(self._communicator, self.ranks)

    @contextmanager
    def _call(self, collective: str, sent: int) -> Iterator[_Collectives]:
        """Counts a call and says which one it was when it fails."""
        self.traffic.add(collective, self.name, sent)
        try:
            yield self._device
            self.traffic.finished += 1
        except (PeerError, PeerLostError):
            raise
        except Exception as error:
            shown = ", ".join(str(rank) for rank in self.ranks[:_SHOWN_RANKS])
            more = ", ..." if self.size > _SHOWN_RANKS else ""
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            here = self.ranks[self.rank]
            raise ConnectionError(
                f"{collective} in group {self.name!r} (ranks {shown}{more}) failed on rank {here}: {reason}"
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

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Global ranks from which this process expects data right now, in whatever group; empty where unknown."""
        return () if self._mesh is None else self._mesh.waiting_for

    def exchange_reports(self, report: Report) -> list[Report]:
        """Returns what every rank tells of itself: None, or what failed. All ranks of the job call it.

        On CPUs it works after calls that failed, on whatever rank and wherever they were, and later calls are free of
        what came before; this is why it is for the whole job. Elsewhere it is a collective like others.

        Raises:
            PeerLostError: the process of a rank has ended.
        """
        if self.size == 1:
            return [report]
        if self._mesh is not None:
            return self._mesh.end_epoch(report)
        return self.all_gather_object(report) if self.any(report is not None) else [None] * self.size

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
    """Everything from arrays that travel between two ranks; sums are made in the order of the group on all of them."""

    def __init__(self, mesh: Mesh, name: str, ranks: tuple[int, ...], index: int) -> None:
        self._mesh, self._ranks, self._index = mesh, ranks, index
        self._number = zlib.crc32(f"{name} {ranks}".encode())
        self._others = [other for other in range(len(ranks)) if other != index]

    def all_reduce(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self.sum_array) if recording_gradient() else Tensor.from_numpy(self.sum_array(_array(x)))

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """Returns the sum over the group, bit by bit the same on all ranks."""
        size = len(self._ranks)
        if size == 2 or array.nbytes <= _SMALL_SUM_BYTES:
            return _summed(self._gather("all_reduce", array))
        # Each rank sums its part and gives it to all: 2 (n - 1) / n of the bytes in place of n - 1.
        flat = array.reshape(-1)
        bounds = [len(flat) * part // size for part in range(size + 1)]
        parts = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
        result = np.empty_like(flat)
        result[bounds[self._index] : bounds[self._index + 1]] = _summed(self._scatter("all_reduce", parts))
        slots = [result[begin:end] for begin, end in itertools.pairwise(bounds)]
        others = {other: slots[other] for other in self._others}
        self._call("all_reduce", dict.fromkeys(self._others, slots[self._index]), others)
        return result.reshape(array.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        return Tensor.from_numpy(self._gather("all_gather", _array(x)))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return Tensor.from_numpy(_summed(self._scatter("reduce_scatter", _array(x))))

    def all_to_all(self, x: Tensor) -> Tensor:
        return Tensor.from_numpy(self._scatter("all_to_all", _array(x)))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        if self._index == source:
            self._call("broadcast", dict.fromkeys(self._others, _array(x)), {})
            return x
        return self.receive(x.shape, x.dtype, source, "broadcast")

    def send(self, x: Tensor, peer: int) -> None:
        self._call("send", {peer: _array(x)}, {})

    def receive(self, shape: tuple[int, ...], dtype: Any, peer: int, collective: str = "send") -> Tensor:
        result = np.empty(shape, ms.dtype_to_nptype(dtype))
        self._call(collective, {}, {peer: result})
        return Tensor.from_numpy(result)

    def barrier(self) -> None:
        self._gather("barrier", np.zeros(1, np.uint8))

    def _gather(self, collective: str, array: np.ndarray) -> np.ndarray:
        """Returns the arrays of all ranks, ``[size, *array.shape]``."""
        result = np.empty((len(self._ranks), *array.shape), array.dtype)
        result[self._index] = array
        self._call(collective, dict.fromkeys(self._others, array), self._slots(result))
        return result

    def _scatter(self, collective: str, parts: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """Gives part j to rank j; returns what all ranks gave this one, in their order."""
        mine = parts[self._index]
        result = np.empty((len(self._ranks), *mine.shape), mine.dtype)
        result[self._index] = mine
        self._call(collective, {other: parts[other] for other in self._others}, self._slots(result))
        return result

    def _slots(self, result: np.ndarray) -> dict[int, np.ndarray]:
        """The places of the other ranks in ``[size, ...]``: slices, as an element of a vector would be a copy."""
        return {other: result[other : other + 1] for other in self._others}

    def _call(self, collective: str, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> None:
        """Exchanges arrays by index in the group."""
        self._mesh.exchange(
            _KINDS.index(collective) + 1,
            self._number,
            {self._ranks[other]: array for other, array in sends.items()},
            {self._ranks[other]: array for other, array in receives.items()},
        )


class _Sum(_Function):
    """The sum over a group, whose gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sum_array: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        ctx.sum_array = sum_array
        return Tensor.from_numpy(sum_array(_array(x)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Tensor.from_numpy(ctx.sum_array(_array(gradient))), None


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


def _summed(parts: np.ndarray) -> np.ndarray:
    """Returns the sum over the first dimension, one after the other: integers wrap around."""
    total = np.array(parts[0])
    for part in parts[1:]:
        total += part
    return total


def _array(x: Tensor) -> np.ndarray:
    return _contiguous(x.asnumpy())


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape)  # numpy makes a vector of a scalar


def _check_summed(x: Any) -> None:
    if x.dtype in ((ms.bool_, ms.float64) if isinstance(x, Tensor) else (np.bool_, np.float64)):
        raise ValueError(f"a sum over ranks takes float32, float16 or integers, not {x.dtype}")


def _size(x: Any) -> int:
    return math.prod(x.shape)


def _nbytes(x: Any) -> int:
    return int(x.nbytes)


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else Tensor.from_numpy(_contiguous(x))


def _like(x: Any, result: Tensor) -> Any:
    return result if isinstance(x, Tensor) else result.asnumpy()

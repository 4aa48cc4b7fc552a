"""Parameters of which every process keeps a part, joined while they are in use (ZeRO-3, arXiv 1910.02054)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common.initializer import Zero

from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.plan import Shard


class ShardedParameters:
    """Keeps rows of parameters and joins them for as long as a block of the model runs.

    Args:
        parameters: by name; they have no memory while they are not in use.
        group_of: the processes that share a parameter.
    """

    def __init__(self, parameters: Mapping[str, Parameter], group_of: Callable[[str], Group]) -> None:
        self._parameters = parameters
        self._group_of = group_of
        self._parts: dict[str, np.ndarray] = {}

    def store(self, name: str, rows: np.ndarray) -> None:
        """Takes over this process' rows of a parameter, without a copy."""
        self._parts[name] = rows

    def stored(self, name: str) -> np.ndarray:
        """Returns this process' rows of a parameter."""
        return self._parts[name]

    @contextmanager
    def gathered(self, names: Mapping[str, Parameter]) -> Iterator[None]:
        """Joins some parameters and gives their memory back at the end; all processes of their groups take part."""
        by_group: dict[str, list[str]] = {}
        for name in names:
            by_group.setdefault(self._group_of(name).name, []).append(name)
        for members in by_group.values():
            self._join(members)
        try:
            yield
        finally:
            for parameter in names.values():
                parameter.set_data(Tensor(shape=parameter.shape, dtype=parameter.dtype, init=Zero()))

    def _join(self, names: list[str]) -> None:
        """Gathers the parts of parameters of one group and type in one call each."""
        group = self._group_of(names[0])
        # Every process makes the calls in the same order, which that of a set is not.
        for dtype in sorted({self._parts[name].dtype for name in names}, key=str):
            chosen = [name for name in names if self._parts[name].dtype == dtype]
            sizes = [[self._size(name, group.size, index) for name in chosen] for index in range(group.size)]
            sent = np.zeros(max(map(sum, sizes)), dtype)
            mine = [self._parts[name].reshape(-1) for name in chosen]
            sent[: sum(part.size for part in mine)] = np.concatenate(mine)
            received = group.all_gather(sent)
            starts = [0] * group.size
            for place, name in enumerate(chosen):
                pieces = []
                for index, row in enumerate(received):
                    end = starts[index] + sizes[index][place]
                    pieces.append(row[starts[index] : end])
                    starts[index] = end
                parameter = self._parameters[name]
                parameter.set_data(Tensor.from_numpy(np.concatenate(pieces).reshape(parameter.shape)))

    def _size(self, name: str, parts: int, index: int) -> int:
        shape = self._parameters[name].shape
        rows = sum(end - begin for begin, end in Shard(0).ranges(shape[0], parts, index))
        return rows * int(np.prod(shape[1:], dtype=np.int64))

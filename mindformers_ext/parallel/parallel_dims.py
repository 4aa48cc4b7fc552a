"""The parallel degrees of a job, and which ranks work together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from mindformers_ext.runtime import logger

Axis = Literal[
    "pp", "dp_replicate", "dp_shard", "dp", "cp", "ulysses", "colossal", "tp", "ep", "efsdp", "fsdp",
    "unit", "replica", "world",
]  # fmt: skip
AXES: tuple[Axis, ...] = get_args(Axis)

# The coordinates in which the ranks of an axis differ. The other axes cut across them, see ParallelDims.ranks_of.
_VARYING: dict[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard",),
    "dp": ("dp_replicate", "dp_shard"),
    "cp": ("cp",),
    "tp": ("tp",),
    "fsdp": ("dp_shard", "cp"),
    "unit": ("pp", "cp", "tp"),
    "replica": ("pp", "dp_shard", "cp", "tp"),
    "world": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
}


class Degrees(Protocol):
    """The part of the ``parallelism`` section that is read here."""

    data_parallel_shard: int
    tensor_parallel: int
    context_parallel: int
    ulysses_degree_in_cp: int | None
    pipeline_parallel: int
    expert_parallel: int

    @property
    def context_parallel_method(self) -> str:
        """``colossal``, ``ulysses`` or ``hybrid``."""


@dataclass(frozen=True)
class Coordinates:
    """The place of a rank, from the slowest to the fastest axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism; rank order from slow to fast: pp, dp_replicate, dp_shard, cp, tp.

    Attributes:
        dp_replicate: copies of the model that work on different records.
        dp_shard: processes that share the parameters of one copy.
        cp: processes that share a sequence.
        tp: processes that share a layer.
        pp: stages of layers.
        ep: processes that share the experts, out of dp_shard x cp x tp.
        world_size: processes of the job.
        ulysses: processes out of cp that exchange heads for tokens; 1 where all of them gather keys instead.
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    world_size: int
    ulysses: int = 1

    @classmethod
    def from_config(cls, parallelism: Degrees, world_size: int) -> ParallelDims:
        """Works out the data-parallel degrees from the rest.

        A ``data_parallel_shard`` above the data-parallel size means all of it, as in MindSpore Transformers, so that
        a YAML for a larger job still starts; the log says so.

        Raises:
            ValueError: the degrees and the number of processes do not fit together; says which would.
        """
        tp, cp, pp = parallelism.tensor_parallel, parallelism.context_parallel, parallelism.pipeline_parallel
        if world_size % (tp * cp * pp):
            raise ValueError(
                f"parallelism: tensor_parallel ({tp}) x context_parallel ({cp}) x pipeline_parallel ({pp}) = "
                f"{tp * cp * pp} must divide the number of processes, which is {world_size}; possible products: "
                f"{_divisors(world_size)}"
            )
        data_parallel = world_size // (tp * cp * pp)
        shard = parallelism.data_parallel_shard
        if shard > data_parallel:
            logger.warning(
                "parallelism: data_parallel_shard (%d) exceeds the data-parallel size and is lowered to it, %d",
                *(shard, data_parallel),
            )
        dp_shard = data_parallel if shard < 0 else min(shard, data_parallel)
        if data_parallel % dp_shard:
            raise ValueError(
                f"parallelism: data_parallel_shard ({shard}) must divide the data-parallel size, {data_parallel}; "
                f"possible: {_divisors(data_parallel)}, or -1 for all of it"
            )
        dp_replicate = data_parallel // dp_shard
        ep = parallelism.expert_parallel
        if (dp_shard * cp * tp) % ep:
            raise ValueError(
                f"parallelism: expert_parallel ({ep}) must divide data_parallel_shard x context_parallel x "
                f"tensor_parallel, {dp_shard * cp * tp}; possible: {_divisors(dp_shard * cp * tp)}"
            )
        return cls(dp_replicate, dp_shard, cp, tp, pp, ep, world_size, _ulysses_degree(parallelism))

    @classmethod
    def single(cls) -> ParallelDims:
        """Returns the degrees of a job of one process."""
        return cls(1, 1, 1, 1, 1, 1, 1)

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _VARYING["world"]}

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the place of global rank ``rank``.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks, 0 to {self.world_size - 1}")
        place = {}
        for name, size in reversed(self._sizes.items()):
            rank, place[name] = divmod(rank, size)
        return Coordinates(**place)

    def rank_at(self, place: Coordinates) -> int:
        """Returns the global rank at ``place``: the inverse of `coordinates`."""
        rank = 0
        for name, size in self._sizes.items():
            rank = rank * size + getattr(place, name)
        return rank

    def degree(self, axis: Axis) -> int:
        """Returns the number of ranks that `ranks_of` gives for ``axis``."""
        if axis == "ep":
            return self.ep
        if axis == "efsdp":
            return self.dp_shard * self.cp * self.tp // self.ep
        if axis in ("ulysses", "colossal"):
            return self.ulysses if axis == "ulysses" else self.cp // self.ulysses
        return math.prod(self._sizes[name] for name in _varying(axis))

    def ranks_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Returns the global ranks, ascending, that ``rank`` works with along ``axis``, itself among them.

        The axes:
            pp, dp_replicate, dp_shard, cp, tp: the ranks that differ in this coordinate only.
            dp: dp_replicate x dp_shard, the ranks that decode different records.
            fsdp: dp_shard x cp, the ranks that share the parameters of a layer.
            unit: pp x cp x tp, the ranks that decode the same records.
            replica: pp x dp_shard x cp x tp, the ranks that hold one copy of the model and run the same forwards.
            ep: ``ep`` consecutive ranks out of dp_shard x cp x tp, which share the experts.
            efsdp: the ranks out of dp_shard x cp x tp that hold the same experts.
            ulysses: ``ulysses`` consecutive ranks out of cp, which exchange heads for tokens.
            colossal: the ranks out of cp that have the same place among those, which gather keys.
            world: all.

        Raises:
            ValueError: unknown axis or rank.
        """
        here = self.coordinates(rank)
        if axis in ("ep", "efsdp"):
            block = self.dp_shard * self.cp * self.tp
            first = rank - rank % block
            if axis == "ep":
                first = rank - rank % self.ep
                return tuple(range(first, first + self.ep))
            return tuple(range(first + rank % self.ep, first + block, self.ep))
        if axis in ("ulysses", "colossal"):
            line, block = self.ranks_of("cp", rank), here.cp - here.cp % self.ulysses
            return (
                line[block : block + self.ulysses]
                if axis == "ulysses"
                else line[here.cp % self.ulysses :: self.ulysses]
            )
        fixed = set(_VARYING["world"]) - set(_varying(axis))
        places = ((other, self.coordinates(other)) for other in range(self.world_size))
        return tuple(o for o, place in places if all(getattr(place, name) == getattr(here, name) for name in fixed))


def _ulysses_degree(parallelism: Degrees) -> int:
    """Returns how many processes of context parallelism exchange heads.

    Raises:
        ValueError: a hybrid method without a degree that divides ``context_parallel``.
    """
    method, cp, degree = (
        parallelism.context_parallel_method,
        parallelism.context_parallel,
        parallelism.ulysses_degree_in_cp,
    )
    if method != "hybrid":
        return cp if method == "ulysses" else 1
    if degree is None or cp % degree:
        raise ValueError(
            f"parallelism: context_parallel_method hybrid: ulysses_degree_in_cp ({degree}) must divide "
            f"context_parallel, {cp}; possible: {_divisors(cp)}"
        )
    return degree


def _varying(axis: str) -> tuple[str, ...]:
    if axis not in _VARYING:
        raise ValueError(f"unknown parallel axis {axis!r}: one of {', '.join(AXES)}")
    return _VARYING[axis]


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)

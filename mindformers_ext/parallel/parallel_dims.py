"""The parallel degrees of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindformers_ext.runtime import logger


class Degrees(Protocol):
    """The part of the ``parallelism`` section that is read here."""

    data_parallel_shard: int
    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    expert_parallel: int


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
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    world_size: int

    @classmethod
    def from_config(cls, parallelism: Degrees, world_size: int) -> ParallelDims:
        """Works out the data-parallel degrees from the rest.

        A ``data_parallel_shard`` above the data-parallel size means all of it, as in MindSpore Transformers, so that
        a YAML for a larger job still starts; the log says so.

        Raises:
            ValueError: the degrees and the number of processes do not fit together.
        """
        tp, cp, pp = parallelism.tensor_parallel, parallelism.context_parallel, parallelism.pipeline_parallel
        if world_size % (tp * cp * pp):
            raise ValueError(
                f"parallelism: tensor_parallel ({tp}) x context_parallel ({cp}) x pipeline_parallel ({pp}) = "
                f"{tp * cp * pp} must divide the number of processes, which is {world_size}"
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
                f"parallelism: data_parallel_shard ({shard}) must divide the data-parallel size, {data_parallel}"
            )
        dp_replicate = data_parallel // dp_shard
        ep = parallelism.expert_parallel
        if (dp_shard * cp * tp) % ep:
            raise ValueError(
                f"parallelism: expert_parallel ({ep}) must divide data_parallel_shard x context_parallel x "
                f"tensor_parallel, {dp_shard * cp * tp}"
            )
        return cls(dp_replicate, dp_shard, cp, tp, pp, ep, world_size)

"""Spreads a model over the processes of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindformers_ext.parallel.parallel_dims import ParallelDims

if TYPE_CHECKING:
    from mindspore import nn


def parallelize_model(model: nn.Cell, dims: ParallelDims, forward_only: bool) -> nn.Cell:
    """Returns the part of the model that this process runs.

    Args:
        model: the whole model.
        dims: degrees of the job.
        forward_only: True for prediction, False where gradients are needed.

    Raises:
        NotImplementedError: the job has more than one process.
    """
    if dims.world_size > 1:
        kind = "prediction" if forward_only else "training"
        raise NotImplementedError(
            f"{kind} on {dims.world_size} processes is not supported yet: start the job with one worker"
        )
    return model

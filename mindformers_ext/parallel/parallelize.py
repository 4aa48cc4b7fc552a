"""Spreads a model over the processes of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mindformers_ext.parallel.schedule import split_layers

if TYPE_CHECKING:
    from mindspore import nn

    from mindformers_ext.parallel.groups import ParallelContext


def parallelize_model(
    build: Callable[[range], nn.Cell],
    num_layers: int,
    context: ParallelContext,
    forward_only: bool,
    layers_per_stage: object = "auto",
) -> nn.Cell:
    """Returns the part of the model that this process runs.

    Args:
        build: makes the part that has these layers, split as the context says.
        num_layers: layers of the whole model.
        context: the place of this process.
        forward_only: True for prediction, False where gradients are needed.
        layers_per_stage: ``parallelism.pipeline_parallel_layers_per_stage``, see `split_layers`.

    Raises:
        NotImplementedError: training on more than one process.
        ValueError: the layers cannot be split like this.
    """
    dims = context.dims
    if dims.world_size > 1 and not forward_only:
        raise NotImplementedError(
            f"training on {dims.world_size} processes is not supported yet: start the job with one worker"
        )
    return build(split_layers(num_layers, dims.pp, layers_per_stage)[context.coordinates.pp])

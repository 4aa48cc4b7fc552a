"""Write the model, and the optimizer's state, of one or of several processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import nn

from mindformers_ext.checkpoint import Part, save_checkpoint, save_distributed, write_model_files
from mindformers_ext.config.schema import CheckpointSection
from mindformers_ext.models import TransformerConfig, hf_config
from mindformers_ext.parallel.agreement import failing_together
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.parallel.plan import Region
from mindformers_ext.trainer.optimizer import AdamW


def write_checkpoint(
    model: nn.Cell,
    context: ParallelContext,
    save_path: str | os.PathLike[str],
    step: int,
    common: Mapping[str, Any],
    options: CheckpointSection,
    optimizer: AdamW | None = None,
    written: list[Path] | None = None,
) -> Path:
    """Writes ``<save_path>/iteration_<step>``; all processes of a job call it and each writes what it holds.

    Args:
        model: the model, or this process' part of it.
        context: the place of this process.
        save_path: root folder, which all processes share.
        step: training step.
        common: see `save_checkpoint`.
        options: ``prefix``, ``save_max`` and ``remove_redundancy`` are read.
        optimizer: its state is saved too; None leaves it out.
        written: see `save_checkpoint`.

    Raises:
        ValueError: something that cannot be saved.
        OSError: a process cannot write; raised on all of them.
    """
    state = None if optimizer is None else optimizer.state_dict()
    naming: dict[str, Any] = {"prefix": options.prefix, "save_max": options.save_max, "written": written}
    if context.world.size == 1:
        values = {name: parameter.asnumpy() for name, parameter in model.parameters_dict().items()}
        if hasattr(model, "weight_regions"):  # parameters of a model of ours may lie elsewhere
            values = {name: model.weight(name) for name in model.weight_regions()}
        return save_checkpoint(save_path, step, values, state, common, **naming)
    if hasattr(model, "weight_regions"):
        regions = model.weight_regions()
        parts = {name: Part(region, model.weight(name)) for name, region in regions.items()}
    else:  # a model of the caller's is whole on every process
        regions = {name: Region.whole(parameter.shape) for name, parameter in model.parameters_dict().items()}
        parts = {name: Part(regions[name], model.parameters_dict()[name].asnumpy()) for name in regions}
    moments = None if state is None else {name: _state_part(name, value, regions) for name, value in state.items()}
    return save_distributed(
        save_path,
        step,
        parts,
        moments,
        common,
        context.world,
        remove_redundancy=options.remove_redundancy,
        **naming,
    )


def _state_part(name: str, values: np.ndarray, regions: Mapping[str, Region]) -> Part:
    """The optimizer's ``adam_m.<parameter>`` is cut as the parameter is; its counters are whole."""
    return Part(regions.get(name.partition(".")[2], Region.whole(values.shape)), values)


def write_description(
    context: ParallelContext,
    save_path: str | os.PathLike[str],
    described: TransformerConfig | None,
    tokenizer_folder: str | os.PathLike[str] | None,
) -> None:
    """Puts config.json and the tokenizer beside the iterations, from rank 0, so that prediction can start from there.

    Raises:
        ValueError: the model cannot be described.
        OSError: the files cannot be written.
    """
    with failing_together(context):
        if context.rank == 0 and described is not None:
            write_model_files(save_path, hf_config(described), tokenizer_folder)

"""How a Trainer begins: its configuration, and its place among the processes of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mindformers_ext.checkpoint import check_weights
from mindformers_ext.config import TrainConfig, load_config
from mindformers_ext.models import TransformerConfig, weight_layout
from mindformers_ext.parallel import ParallelDims
from mindformers_ext.parallel.agreement import failing_together, require_same
from mindformers_ext.parallel.groups import ParallelContext, init_parallel
from mindformers_ext.predict.identity import digest


def loaded_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | TrainConfig, run_mode: str | None, provided: set[str]
) -> TrainConfig:
    """Returns a configuration with ``run_mode``, if that is given; see `load_config` for ``provided``."""
    if not isinstance(config, TrainConfig):
        return load_config(config, {} if run_mode is None else {"run_mode": run_mode}, provided=provided)
    if run_mode is not None and run_mode != config.run_mode:
        return load_config(config.to_dict(), {"run_mode": run_mode}, provided=provided)
    return config


def joined_job(dims: ParallelDims, config: TrainConfig, model_config: TransformerConfig | None) -> ParallelContext:
    """Joins the job, and refuses ranks with different configurations and a checkpoint that does not fit."""
    context = init_parallel(dims)
    if dims.world_size > 1:
        require_same(context, {"the configuration": digest(config.to_dict())})
    if config.run_mode == "predict" and model_config is not None:
        with failing_together(context):
            if context.rank == 0:  # reads the headers for all
                check_weights(config.checkpoint.load_path, weight_layout(model_config))
    return context

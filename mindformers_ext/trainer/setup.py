"""Everything that a training run needs, built from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspore import nn

from mindformers_ext.checkpoint import TrainingState
from mindformers_ext.config import TrainConfig
from mindformers_ext.models import TransformerConfig
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import Tokenizer
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.callbacks import CallbackHandler, CheckpointCallback, TrainerCallback, build_callbacks
from mindformers_ext.trainer.checks import (
    build_configured_dataset,
    check_saving,
    describe_data,
    open_saved_run,
    saved_state,
)
from mindformers_ext.trainer.dataset import TrainDataset
from mindformers_ext.trainer.lr_scheduler import Schedule, build_schedule
from mindformers_ext.trainer.model import load_model_weights, tokenizer_folder
from mindformers_ext.trainer.optimizer import AdamW
from mindformers_ext.trainer.saving import write_checkpoint, write_description
from mindformers_ext.trainer.train_state import TrainerState


@dataclass
class TrainingRun:
    """The parts that `train_loop` puts together."""

    dataset: TrainDataset
    optimizer: AdamW
    schedule: Schedule
    callbacks: CallbackHandler
    state: TrainerState


def build_training_run(
    config: TrainConfig,
    model: nn.Cell,
    context: ParallelContext,
    tokenizer: Tokenizer | None,
    has_weights: bool,
    dataset: TrainDataset | None,
    optimizer: AdamW | None,
    schedule: Schedule | None,
    callbacks: list[TrainerCallback],
) -> TrainingRun:
    """Builds what the caller did not bring, and goes to the position of the checkpoint to continue from.

    Args:
        config: the whole configuration.
        model: gets its weights here.
        context: the place of this process.
        tokenizer: for the dataset of the configuration.
        has_weights: the model has weights already and keeps them where there is nothing to load.
        dataset: or None for that of the configuration.
        optimizer: or None for that of the configuration.
        schedule: or None for that of the configuration.
        callbacks: called after those of the configuration.

    Raises:
        ValueError: a mistake in the configuration, the data or the checkpoint.
        FileNotFoundError: a file of the configuration does not exist.
    """
    check_saving(config, described_by(model))
    data: dict[str, Any] = {}
    if dataset is None:
        dataset = build_configured_dataset(config, model.config, tokenizer)
        data = describe_data(config, dataset)
    if schedule is None:
        scheduler = config.lr_scheduler
        options = {name: getattr(scheduler, name) for name in scheduler.to_dict() if name not in scheduler.extra}
        schedule = build_schedule(options, config.training.steps)
    with open_saved_run(config) as saved:
        load_path = config.checkpoint.load_path if saved is None else saved.folder
        if load_path:
            load_model_weights(model, load_path)
        elif not has_weights:
            model.init_weights(config.training.seed)
        if optimizer is None:
            optimizer = _build_optimizer(config, model)
        state = _resume(saved, optimizer, config.training.steps, data)
    handlers = build_callbacks([{"type": entry.type, **entry.extra} for entry in config.callbacks])
    if config.checkpoint.enable_save:
        handlers.append(_checkpoint_callback(config, model, context, optimizer))
    handler = CallbackHandler(
        [*handlers, *callbacks], model=model, optimizer=optimizer, lr_scheduler=schedule, train_dataset=dataset
    )
    return TrainingRun(dataset, optimizer, schedule, handler, state)


def _build_optimizer(config: TrainConfig, model: nn.Cell) -> AdamW:
    section = config.optimizer
    return AdamW(
        model.trainable_params(),
        section.betas,
        section.eps,
        section.weight_decay,
        section.weight_decay_include,
        section.weight_decay_exclude,
    )


def _resume(saved: TrainingState | None, optimizer: AdamW, steps: int, data: dict[str, Any]) -> TrainerState:
    """Restores optimizer and progress from a saved run; without one, training starts at step 0."""
    if saved is None or saved.optimizer_tensors is None:
        return TrainerState(max_steps=steps, data=data)
    state = saved_state(saved, steps, data)
    optimizer.load_state_dict(saved.optimizer_tensors)
    logger.info("continuing after step %d of %s", state.global_step, saved.folder)
    return state


def _checkpoint_callback(
    config: TrainConfig, model: nn.Cell, context: ParallelContext, optimizer: AdamW
) -> CheckpointCallback:
    section = config.checkpoint
    save_path, described = section.save_folder(), described_by(model)
    written: list[Path] = []
    files_missing = True

    def save(state: TrainerState) -> None:
        nonlocal files_missing
        state_of = None if section.no_save_optim else optimizer
        folder = write_checkpoint(
            model, context, save_path, state.global_step, state.to_common(), section, state_of, written
        )
        # After the checkpoint, so that an interrupted first save leaves no description without weights.
        if files_missing:
            write_description(context, save_path, described, tokenizer_folder(config))
            files_missing = False
        logger.info("saved %s", folder)

    return CheckpointCallback(save, section.save_interleaved_steps)


def described_by(model: nn.Cell) -> TransformerConfig | None:
    """Returns what config.json says about a model; None for one of another kind, which is saved without."""
    config = getattr(model, "config", None)
    return config if isinstance(config, TransformerConfig) else None

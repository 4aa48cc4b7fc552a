"""What a training run is refused for before anything slow: in set-up and in ``--validate``. Never imports mindspore."""

from __future__ import annotations

from pathlib import Path

from mindformers_ext.checkpoint import check_no_other_run, check_save_path
from mindformers_ext.config import TrainConfig
from mindformers_ext.models import TransformerConfig, check_described

DEFAULT_SAVE_PATH = "output/checkpoint"


def save_folder(config: TrainConfig) -> Path:
    """Returns where checkpoints go."""
    return Path(config.checkpoint.save_path or DEFAULT_SAVE_PATH)


def check_saving(config: TrainConfig, model: TransformerConfig | None) -> None:
    """Finds out before the first step what would lose a training at its first checkpoint.

    Args:
        config: the whole configuration.
        model: what config.json will describe; None for a model of the caller, which is saved without one.

    Raises:
        ValueError: a folder or prefix that cannot be written, one with another run's checkpoints, or a model that the
            config.json beside the checkpoints could not describe.
    """
    section = config.checkpoint
    if not section.enable_save:
        return
    if model is not None:
        check_described(model)
    check_no_other_run(save_folder(config), None if section.no_load_optim else section.load_path or None)
    check_save_path(save_folder(config), section.prefix)


def check_block_length(config: TrainConfig, model: TransformerConfig) -> None:
    """Refuses blocks that are longer than what the model takes.

    Raises:
        ValueError: names both lengths.
    """
    length = config.train_dataset.dataloader.seq_length
    if length is not None and length > model.seq_length:
        raise ValueError(
            f"train_dataset.dataloader.seq_length ({length}) exceeds the longest sequence of the model, "
            f"{model.seq_length} (model.seq_length, or max_position_embeddings where that is not set)"
        )

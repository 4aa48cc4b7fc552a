"""What the set-up of a run and ``--validate`` share: all that can be refused. Never imports mindspore."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mindformers_ext.checkpoint import (
    TrainingState,
    check_no_other_run,
    check_save_path,
    load_training_state,
    locate_checkpoint,
)
from mindformers_ext.config import TrainConfig
from mindformers_ext.config.evaluation import build_metrics
from mindformers_ext.config.schema import PredictSection
from mindformers_ext.models import TransformerConfig, check_described
from mindformers_ext.predict import AnswerMetrics, Tokenizer
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.dataset import TrainDataset, build_dataset
from mindformers_ext.trainer.train_state import TrainerState, data_mismatch


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
    check_no_other_run(section.save_folder(), None if section.no_load_optim else section.load_path or None)
    check_save_path(section.save_folder(), section.prefix)


def check_pipeline_options(config: TrainConfig) -> None:
    """Refuses pipeline options that have no meaning without a backward pass.

    Raises:
        NotImplementedError: names the option.
    """
    parallelism = config.parallelism
    if parallelism.pipeline_parallel == 1:
        return
    for name, active in (
        ("parallelism.pipeline_parallel_interleave_num", parallelism.pipeline_parallel_interleave_num > 1),
        ("parallelism.pipeline_parallel_overlap_b_f", parallelism.pipeline_parallel_overlap_b_f),
        ("swap.enable", config.swap.enable),
    ):
        if active:
            raise NotImplementedError(f"{name} is not supported in prediction with pipeline parallelism")


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


def build_configured_dataset(config: TrainConfig, model: Any, tokenizer: Tokenizer | None) -> TrainDataset:
    """Builds the dataset that ``train_dataset`` describes.

    Args:
        config: the whole configuration.
        model: the model's configuration; gives ``seq_length`` and ``vocab_size``.
        tokenizer: for the dataset.

    Raises:
        ValueError: unusable options or data.
        FileNotFoundError: a file does not exist.
    """
    loader = config.train_dataset.dataloader
    if isinstance(model, TransformerConfig):
        check_block_length(config, model)
    if tokenizer is None or loader.path is None or loader.type is None:
        raise ValueError("train_dataset.dataloader needs type, path and tokenizer_path")
    return build_dataset(
        loader.type,
        loader.path,
        tokenizer,
        loader.seq_length or model.seq_length,
        text_field=loader.text_field,
        prompt_field=loader.prompt_field,
        response_field=loader.response_field,
        packing=loader.packing,
        shuffle=loader.shuffle,
        seed=config.training.seed,
        vocab_size=model.vocab_size,
    )


def describe_data(config: TrainConfig, dataset: TrainDataset) -> dict[str, Any]:
    """Returns what a checkpoint records of the configuration's dataset; see `data_mismatch`."""
    loader = config.train_dataset.dataloader
    return {
        "seq_length": dataset.batch(0, 1).input_ids.shape[1],
        "blocks": len(dataset),
        "seed": config.training.seed,
        "shuffle": loader.shuffle,
        "packing": loader.packing,
    }


def open_saved_run(config: TrainConfig) -> AbstractContextManager[TrainingState | None]:
    """Opens the training checkpoint to continue from; None if there is none, or only its weights are asked for.

    Raises:
        ValueError: the checkpoint cannot be continued.
    """
    section = config.checkpoint
    if not section.load_path or section.no_load_optim or locate_checkpoint(section.load_path).format == "huggingface":
        return nullcontext()
    saved = load_training_state(section.load_path)
    if saved.optimizer_tensors is None:
        saved.close()
        raise ValueError(
            f"{saved.folder} was saved without optimizer (no_save_optim); set checkpoint.no_load_optim: true to "
            "start a new run from its weights"
        )
    return saved


def saved_state(saved: TrainingState, steps: int, data: dict[str, Any]) -> TrainerState:
    """Returns the progress of a saved run, for samples like those that it was recorded with.

    Raises:
        ValueError: a damaged record, or blocks among which its position has no meaning.
    """
    state = TrainerState.from_common(saved.common, steps, str(saved.folder / "common.json"))
    fatal, order = data_mismatch(data, saved.common.get("data"))
    if fatal:
        raise ValueError(
            f"train_dataset: the blocks are not those of {saved.folder} ({', '.join(fatal)}), so its position in the "
            "data has no meaning; restore data and settings, or set checkpoint.no_load_optim: true to start a new run "
            "from its weights"
        )
    if order:
        logger.warning("train_dataset: another order of data than in %s: %s", saved.folder, ", ".join(order))
    state.data = data
    return state


def answer_metrics(section: PredictSection, num_sequences: int = 1) -> AnswerMetrics | None:
    """Returns what judges the answers of a run, None without metrics or where nothing is answered.

    Args:
        section: ``predict``.
        num_sequences: answers to each record.

    Raises:
        ValueError: a mistake in the metrics, or a function that cannot be imported.
    """
    if not section.metrics or section.task != "generate":
        return None
    sections = build_metrics(section.metrics, ("predict", "metrics"))
    return AnswerMetrics(sections, section.reference_field, num_sequences, section.metrics_in_rows)


def without_references(metrics: AnswerMetrics, num_records: int) -> ValueError:
    """Returns what is raised where none of the records could be judged."""
    return ValueError(
        f"predict.reference_field: none of the {num_records} records has a reference in the field "
        f"'{metrics.reference_field}', a text or a number that predict.metrics could compare answers with"
    )

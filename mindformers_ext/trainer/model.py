"""From a configuration to the model's description, its tokenizer and its weights. Never imports mindspore."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindformers_ext.checkpoint import load_weights, model_files_folder, read_model_json
from mindformers_ext.config import TrainConfig
from mindformers_ext.models import TransformerConfig, transformer_config
from mindformers_ext.predict import PromptTemplates, Tokenizer, read_templates
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.mtp import without_mtp_layers


def named_folder(path: str | os.PathLike[str], key: str) -> Path:
    """Returns a folder of the configuration.

    Raises:
        FileNotFoundError: it does not exist; names the key.
        ValueError: it is a file.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"{key}: the folder {folder} does not exist")
    if not folder.is_dir():
        raise ValueError(f"{key}: {folder} is a file; name its folder, {folder.parent}")
    return folder


def checkpoint_model_files(config: TrainConfig) -> Path:
    """Returns where config.json and the tokenizer of ``checkpoint.load_path`` lie.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: it is a file.
    """
    return model_files_folder(named_folder(config.checkpoint.load_path, "checkpoint.load_path"))


def resolve_model_config(config: TrainConfig) -> TransformerConfig:
    """Joins the ``model`` section with the ``config.json`` that lies beside the weights, if there is one.

    Layers of multi-token prediction are left out, and the log says so.

    Raises:
        ValueError: unknown family, missing or contradictory keys, or an unreadable ``config.json``.
    """
    hf_config = None
    if config.checkpoint.load_path:
        hf_config = read_model_json(checkpoint_model_files(config), "config.json")
    section = dict(config.model.extra)
    for key in ("model_type", "architectures"):
        if getattr(config.model, key) is not None:
            section[key] = getattr(config.model, key)
    if not section and hf_config is None:
        raise ValueError(
            f"model: the section is missing and {config.checkpoint.load_path or 'checkpoint.load_path'} "
            "has no config.json that would describe the model"
        )
    sources, changes = without_mtp_layers([hf_config or {}, section])
    if changes and config.run_mode == "predict":
        logger.info("model: layers of multi-token prediction are not used: %s", ", ".join(changes))
    elif changes:
        logger.warning("model: layers of multi-token prediction are not trained: %s", ", ".join(changes))
    return transformer_config(sources[1], sources[0])


def tokenizer_folder(config: TrainConfig) -> Path | None:
    """Returns where the tokenizer lies: in training ``tokenizer_path``, else beside the weights; None without any."""
    path = config.train_dataset.dataloader.tokenizer_path
    if path is not None and config.run_mode == "train":
        return named_folder(path, "train_dataset.dataloader.tokenizer_path")
    return checkpoint_model_files(config) if config.checkpoint.load_path else None


def training_tokenizer(config: TrainConfig) -> Tokenizer | None:
    """Reads the training tokenizer; None where the dataset comes from the caller and no tokenizer is configured.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
        ValueError: its files are damaged.
    """
    folder = tokenizer_folder(config)
    return None if folder is None else Tokenizer.from_folder(folder)


def prompt_templates(config: TrainConfig, tokenizer: Tokenizer) -> PromptTemplates:
    """Reads the templates of ``predict``; those of the model lie beside its tokenizer.

    Raises:
        FileNotFoundError: a template's file does not exist.
        ValueError: there is no such template, or it cannot be one.
    """
    section = config.predict
    folder = tokenizer_folder(config)
    templates = read_templates(section.prompt_template, section.chat_template, folder, tokenizer.named_tokens)
    # A target may follow nothing.
    return replace(templates, may_be_empty=section.task == "score" and section.target_field is not None)


def protected_files(config: TrainConfig) -> dict[str, str]:
    """Returns what no output may overwrite, by the name of its key: the model's folder and the training data."""
    data = config.train_dataset.dataloader.path
    files = {"checkpoint.load_path": config.checkpoint.load_path or ""}
    if isinstance(data, list):
        files |= {f"train_dataset.dataloader.path[{index}]": path for index, path in enumerate(data)}
    else:
        files["train_dataset.dataloader.path"] = data or ""
    return {name: path for name, path in files.items() if path}


def load_model_weights(model: Any, path: str | os.PathLike[str], share: tuple[int, int] = (0, 1)) -> None:
    """Fills a model from a checkpoint; one that the caller made without ``weight_layout()`` is used as it is.

    Args:
        model: the model, or this process' part of it.
        path: the checkpoint.
        share: number of this process and of all that load, see `load_weights`.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: the checkpoint does not fit the model.
    """
    if hasattr(model, "weight_layout"):
        regions = model.weight_regions() if hasattr(model, "weight_regions") else None
        logger.info(
            "weights: %s", load_weights(path, model.weight_layout(), model.set_weight, regions, share).summary()
        )
    else:
        logger.info("weights: the given model is used as it is, it has no weight_layout() to load them by")

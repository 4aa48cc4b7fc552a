"""Rules that need more than one key: what a run mode requires, what excludes what, and what has no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mindformers_ext.config.build import unknown_key
from mindformers_ext.config.errors import Source, joined
from mindformers_ext.config.generation import conflicts, without_effect
from mindformers_ext.config.schema import MonitorSection, TrainConfig
from mindformers_ext.config.section import OpenSection

OPTIMIZERS = ("AdamW",)
LR_SCHEDULERS = ("ConstantWarmUpLR", "CosineWithWarmUpLR", "LinearWithWarmUpLR")
DATALOADERS = ("JsonlDataset", "TextDataset")


def check_rules(config: TrainConfig, source: Source, provided: Collection[str] = ()) -> None:
    """Checks the configuration as a whole and fills `config.warnings`.

    Args:
        config: a configuration whose single values are right.
        source: where it came from, for the messages.
        provided: the sections whose object the caller brings along ("model", "train_dataset", "optimizer",
            "lr_scheduler"); nothing is required of them.

    Raises:
        ConfigError: the first rule that is broken.
    """
    _check_upstream_rules(config, source)
    _check_supported(config, source)
    if config.run_mode == "predict":
        _check_predict(config, source)
    else:
        _check_train(config, source, provided)
    config.warnings = list(_warnings(config))


def _check_upstream_rules(config: TrainConfig, source: Source) -> None:
    parallel = config.parallelism
    if parallel.tensor_parallel > 1 and not parallel.sequence_parallel:
        path = ("parallelism", "tensor_parallel")
        raise source.error(path, f"{parallel.tensor_parallel} needs parallelism.sequence_parallel: true")
    if (
        parallel.moe_token_dispatcher_type == "alltoall_deredundancy"
        and parallel.expert_parallel < parallel.npu_nums_per_device
    ):
        raise source.error(
            ("parallelism", "moe_token_dispatcher_type"),
            f"'alltoall_deredundancy' needs expert_parallel ({parallel.expert_parallel}) >= npu_nums_per_device "
            f"({parallel.npu_nums_per_device})",
        )
    if config.profiler.start_step > config.profiler.end_step:
        steps = f"{config.profiler.start_step} is after end_step {config.profiler.end_step}"
        raise source.error(("profiler", "start_step"), f"{steps}; it must not be greater")


def _check_supported(config: TrainConfig, source: Source) -> None:
    """Refuses settings that would change the result and that nothing here implements."""
    if config.lora_config is not None:
        raise source.error(("lora_config",), "adapters are not supported yet; merge them into the weights first")
    if config.checkpoint.base_load_path or config.checkpoint.save_trainable_only:
        name = "base_load_path" if config.checkpoint.base_load_path else "save_trainable_only"
        raise source.error(("checkpoint", name), "adapter checkpoints are not supported yet; remove this key")
    if config.training.rampup_batch_size is not None and config.run_mode == "train":
        raise source.error(("training", "rampup_batch_size"), "is not supported yet; remove this key")
    problems = [source.error(("generation", key), problem) for key, problem in conflicts(config.generation)]
    if problems:
        raise joined(problems)


def _check_predict(config: TrainConfig, source: Source) -> None:
    if config.inference is None:
        keys = "input_data, max_new_tokens, batch_size, output"
        raise source.error(("inference",), f"is missing; run_mode: predict needs this section ({keys})")
    if not config.checkpoint.load_path.strip():
        raise source.error(
            ("checkpoint", "load_path"),
            "is missing; run_mode: predict needs the folder that holds weights and tokenizer",
        )


def _check_train(config: TrainConfig, source: Source, provided: Collection[str]) -> None:
    training, has_load_path = config.training, bool(config.checkpoint.load_path.strip())
    if training.global_batch_size % training.local_batch_size:
        raise source.error(
            ("training", "global_batch_size"),
            f"{training.global_batch_size} is not a multiple of local_batch_size {training.local_batch_size}",
        )
    if "model" not in provided and config.model.model_type is None and not has_load_path:
        raise source.error(
            ("model", "model_type"),
            "is missing; training needs it, or a checkpoint.load_path whose config.json describes the model",
        )
    if "train_dataset" not in provided:
        _check_dataloader(config, source, has_load_path)
    if "optimizer" not in provided:
        _check_type(config.optimizer.type, OPTIMIZERS, "optimizer", source)
        _refuse_extra(config.optimizer, ("optimizer",), source)
    if "lr_scheduler" not in provided:
        _check_lr_scheduler(config, source)
    for index, callback in enumerate(config.callbacks):
        if callback.type is None:
            raise source.error(("callbacks", index, "type"), "is missing; a callback is chosen by its type")
    if config.checkpoint.enable_save and not config.checkpoint.save_path.strip():
        raise source.error(
            ("checkpoint", "save_path"), "is missing; give the folder to save to, or set checkpoint.enable_save: false"
        )


def _check_dataloader(config: TrainConfig, source: Source, has_load_path: bool) -> None:
    path, dataloader = ("train_dataset", "dataloader"), config.train_dataset.dataloader
    _check_type(dataloader.type, DATALOADERS, "train_dataset.dataloader", source)
    _refuse_extra(dataloader, path, source)
    if dataloader.path is None:
        raise source.error((*path, "path"), "is missing; give the training file or a list of files")
    if dataloader.tokenizer_path is None and not has_load_path:
        raise source.error(
            (*path, "tokenizer_path"), "is missing; give the tokenizer's folder here or in checkpoint.load_path"
        )
    if (dataloader.prompt_field is None) != (dataloader.response_field is None):
        missing = "prompt_field" if dataloader.prompt_field is None else "response_field"
        raise source.error((*path, missing), "is missing; prompt_field and response_field go together")
    if dataloader.prompt_field is not None and dataloader.type != "JsonlDataset":
        raise source.error((*path, "prompt_field"), "needs type JsonlDataset: the lines of a text file have no fields")


def _check_lr_scheduler(config: TrainConfig, source: Source) -> None:
    scheduler = config.lr_scheduler
    _check_type(scheduler.type, LR_SCHEDULERS, "lr_scheduler", source)
    _refuse_extra(scheduler, ("lr_scheduler",), source)
    if scheduler.warmup_steps is not None and scheduler.warmup_ratio is not None:
        raise source.error(("lr_scheduler", "warmup_ratio"), "excludes warmup_steps; give one of the two")


def _check_type(value: str | None, supported: tuple[str, ...], section: str, source: Source) -> None:
    path, names = (*section.split("."), "type"), ", ".join(supported)
    if value is None:
        raise source.error(path, f"is missing; training needs one of {names}")
    if value not in supported:
        raise source.error(path, f"'{value}' is not supported in training; use {names}")


def _refuse_extra(section: OpenSection, path: tuple[str, ...], source: Source) -> None:
    """A free key of a section that this package reads itself would have no effect."""
    for key in section.extra:
        raise source.error((*path, key), unknown_key(type(section), str(key), path))


def _warnings(config: TrainConfig) -> Iterator[str]:
    in_predict = config.run_mode == "predict"
    if config.recompute.mode != "None":
        yield _ignored("recompute", in_predict)
    if config.recompute_comm.enable:
        yield _ignored("recompute_comm", in_predict)
    if config.swap.enable:
        yield _ignored("swap", in_predict)
    if config.profiler.enable_profiling:
        yield _ignored("profiler", in_predict)
    if config.context.mode != 1:
        yield f"context.mode: {config.context.mode} is ignored: the run is in PyNative mode (1)"
    for sentence in without_effect(config.generation, config.generation.explicit()):
        yield f"generation: {sentence}"
    if in_predict:
        return
    if config.checkpoint.async_save:
        yield "checkpoint.async_save is ignored: checkpoints are written before the next step"
    if config.train_dataset.balance_enabled:
        yield "train_dataset.balance_enabled is ignored"
    if config.monitor != MonitorSection():
        yield "monitor is ignored: the training log holds step, loss, learning rate, gradient norm and tokens/s"
    if "eval_dataset" in config.extra:
        yield "eval_dataset is ignored: training does not evaluate"


def _ignored(section: str, in_predict: bool) -> str:
    return f"{section} is ignored: " + ("it belongs to training" if in_predict else "it is not supported yet")

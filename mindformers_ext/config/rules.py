"""Rules that need more than one key: what a run mode requires, what excludes what, and what has no effect."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mindformers_ext.config.build import build_section, unknown_key
from mindformers_ext.config.errors import KeyPath, Source, joined
from mindformers_ext.config.evaluation import (
    EvaluationSection,
    best_metric_mistake,
    build_evaluation,
    build_metrics,
)
from mindformers_ext.config.generation import conflicts, without_effect
from mindformers_ext.config.schema import PredictSection, TrainConfig
from mindformers_ext.config.section import OpenSection, Section

OPTIMIZERS = ("AdamW",)
LR_SCHEDULERS = ("ConstantWarmUpLR", "CosineWithWarmUpLR", "LinearWithWarmUpLR")
DATALOADERS = ("JsonlDataset", "TextDataset")

# Keys and sections that are accepted so that files of MindSpore Transformers load, and that change nothing, by
# reason. docs/yaml.md marks the same ones.
NO_EFFECT: dict[str, tuple[str, ...]] = {
    "checkpoints are written before the next step": ("checkpoint.async_save",),
    "every process reads its own part of a checkpoint": (
        *("checkpoint.load_balanced", "checkpoint.load_worker_number"),
        *("checkpoint.save_global_layout_cache", "checkpoint.reshard_worker_num"),
    ),
    "an epoch's last blocks are followed by the next epoch's first": ("train_dataset.drop_remainder",),
    "the data is read and packed before the first step": (
        *("train_dataset.num_parallel_workers", "train_dataset.prefetch_size", "train_dataset.numa_enable"),
        *("train_dataset.use_distribute_dataset", "train_dataset.balance_enabled"),
        *("train_dataset.dataloader.column_names", "train_dataset.dataloader.python_multiprocessing"),
    ),
    "the training log holds step, loss, learning rate, gradient norm and tokens/s": ("monitor",),
    "the callback EvaluationCallback evaluates": ("eval_dataset",),
    "not supported yet": ("recompute", "recompute_comm", "swap", "profiler"),
    "the device is the one that MindSpore finds, the mode is PyNative": (
        *("context.mode", "context.max_device_memory", "context.device_target"),
    ),
}
# What only training reads; a predict YAML is often a training YAML with a few lines more.
TRAINING_ONLY = (
    *("optimizer", "lr_scheduler", "train_dataset", "callbacks"),
    *("training.steps", "training.local_batch_size", "training.global_batch_size", "training.max_norm"),
    *("training.use_skip_step_on_nan", "training.max_consecutive_skipped_steps", "training.rampup_batch_size"),
    *("checkpoint.enable_save", "checkpoint.save_max", "checkpoint.save_interleaved_steps"),
    *("checkpoint.no_save_optim", "checkpoint.no_load_optim"),
)
# What only one of the tasks reads.
SCORE_KEYS = ("target_field", "answer_field", "target_delimiter", "truncation", "rolling", "token_logprobs")
GENERATE_KEYS = (
    *("skip_special_tokens", "suppress_unnamed_tokens", "refill"),
    *("metrics", "reference_field", "metrics_in_rows"),
)
# The one option of decoding that scoring has: how much of a prompt is in one forward.
SCORE_OPTIONS = ("prefill_chunk_size",)
# Switches, and the value that asks for what happens anyway; so does false everywhere.
_OFF = {"recompute.mode": "None", "context.mode": 1}
_SWITCHES = {"recompute": "mode", "recompute_comm": "enable", "swap": "enable", "profiler": "enable_profiling"}


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
    problems = [source.error(("generation", key), problem) for key, problem in conflicts(config.generation)]
    if problems:
        raise joined(problems)
    _check_predict_section(config.predict, ("predict",), source)


def _check_predict(config: TrainConfig, source: Source) -> None:
    if config.inference is None:
        keys = "input_data, max_new_tokens, batch_size, output"
        raise source.error(("inference",), f"is missing; run_mode: predict needs this section ({keys})")
    if not config.checkpoint.load_path.strip():
        raise source.error(
            ("checkpoint", "load_path"),
            "is missing; run_mode: predict needs the folder that holds weights and tokenizer",
        )


def _check_predict_section(predict: PredictSection, path: KeyPath, source: Source) -> None:
    build_metrics(predict.metrics or [], (*path, "metrics"), source)
    if predict.task != "score":
        return
    if predict.target_field is None:
        for name in ("answer_field", "truncation"):
            if getattr(predict, name) not in (None, "none"):
                raise source.error((*path, name), "needs predict.target_field: the field with what is scored")
    elif predict.rolling:
        raise source.error((*path, "rolling"), "excludes target_field: it scores the prompts themselves")


def _check_train(config: TrainConfig, source: Source, provided: Collection[str]) -> None:
    training, has_load_path = config.training, bool(config.checkpoint.load_path.strip())
    mistake = batch_size_mistake(training.local_batch_size, training.global_batch_size, training.rampup_batch_size)
    if mistake is not None:
        raise source.error(("training", mistake[0]), mistake[1])
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
        if callback.type == "EvaluationCallback":
            _check_evaluation(config, index, source)
    if config.checkpoint.enable_save and not config.checkpoint.save_path.strip():
        raise source.error(
            ("checkpoint", "save_path"), "is missing; give the folder to save to, or set checkpoint.enable_save: false"
        )


def _check_evaluation(config: TrainConfig, index: int, source: Source) -> None:
    path = ("callbacks", index)
    section = build_evaluation(config.callbacks[index].extra, path, source)
    predict = merged_predict(config.predict, section.predict_options(), path, source)
    if section.metric_for_best_model is not None:
        mistake = best_metric_mistake(section.metric_for_best_model, predict)
        if mistake is not None:
            raise source.error((*path, "metric_for_best_model"), mistake)
    for other in config.callbacks[:index]:
        if other.type != "EvaluationCallback":
            continue
        taken = _evaluation_folders(config, build_evaluation(other.extra, path, source))
        for key, folder in _evaluation_folders(config, section).items():
            if folder in taken.values():
                raise source.error((*path, key), "is that of another EvaluationCallback; give each its own")


def _evaluation_folders(config: TrainConfig, section: EvaluationSection) -> dict[str, str]:
    """The folders that an evaluation writes to, by the key that gives them."""
    output, best = section.folders(config.checkpoint.save_folder())
    found = {"output_dir": os.path.realpath(output)}
    if section.metric_for_best_model is not None:
        found["best_dir"] = os.path.realpath(best)
    return found


def merged_predict(
    section: PredictSection, options: Mapping[str, Any], path: KeyPath = ("predict",), source: Source | None = None
) -> PredictSection:
    """Returns the section with other values for some of its keys.

    Args:
        section: as the YAML has it.
        options: names and values.
        path: where the options stand, for messages.
        source: where they came from.

    Raises:
        ConfigError: an unknown key, a value out of range, or keys that do not go together.
    """
    source = source or Source()
    merged = build_section(PredictSection, {**section.written(), **options}, path, source)
    _check_predict_section(merged, path, source)
    return merged


def batch_size_mistake(local: int, total: int, rampup: Sequence[int] | None) -> tuple[str, str] | None:
    """Finds batch sizes that do not divide.

    Args:
        local: ``training.local_batch_size``.
        total: ``training.global_batch_size``.
        rampup: ``training.rampup_batch_size``: start, increment and samples.

    Returns:
        The key of ``training`` and what is wrong with it, or None.
    """
    if local < 1 or total < local or total % local:
        return "global_batch_size", f"{total} is not a multiple of local_batch_size {local}"
    if not rampup:
        return None
    start, increment, _ = rampup
    if start % local or increment % local:
        sizes = f"start {start} and increment {increment}"
        return "rampup_batch_size", f"{sizes} must be multiples of local_batch_size {local}"
    if start > total or (total - start) % increment:
        return "rampup_batch_size", f"steps of {increment} from {start} do not lead to global_batch_size {total}"
    return None


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
    scores = config.run_mode == "predict" and config.predict.task == "score"
    if not scores:
        for sentence in without_effect(config.generation, config.generation.explicit()):
            yield f"generation: {sentence}"
    if config.run_mode == "predict":
        if idle := _of_another_task(config):
            yield f"no effect with predict.task: {config.predict.task}: {', '.join(idle)}"
        for key, names in _idle_without(config.predict, config.predict.given):
            yield f"no effect without predict.{key}: {', '.join(f'predict.{name}' for name in names)}"
        keys = (*TRAINING_ONLY, *(key for group in NO_EFFECT.values() for key in group))
        sections = {key for key in keys if _asks(config, key)}
        named = [key for key in keys if key in sections and not _parents(key) & sections]
        if named:
            yield f"no effect in predict: {', '.join(named)}"
        return
    for index, callback in enumerate(config.callbacks):
        if callback.type == "EvaluationCallback":
            yield from _idle_in_evaluation(config, index)
    if config.checkpoint.weight_dtype != "auto":
        yield "no effect: checkpoint.weight_dtype (training keeps weights in float32; run_mode: predict follows it)"
    for reason, keys in NO_EFFECT.items():
        named = [key for key in keys if _asks(config, key)]
        if named:
            yield f"no effect: {', '.join(named)} ({reason})"


def _of_another_task(config: TrainConfig) -> list[str]:
    """The keys that the user wrote and that only another task reads."""
    if config.predict.task == "generate":
        return [f"predict.{name}" for name in SCORE_KEYS if name in config.predict.given]
    asked = [f"inference.{name}" for name in ("max_new_tokens",) if config.inference and name in config.inference.given]
    asked += [f"generation.{name}" for name in config.generation.explicit() if name not in SCORE_OPTIONS]
    return asked + [f"predict.{name}" for name in GENERATE_KEYS if name in config.predict.given]


def _idle_without(predict: PredictSection, given: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """A key that is not set, and those of the given ones of the same task that have no effect without it."""
    for is_idle, key, names in (
        (predict.task == "generate" and not predict.metrics, "metrics", ("reference_field", "metrics_in_rows")),
        (predict.task == "score" and predict.target_field is None, "target_field", ("target_delimiter",)),
    ):
        if is_idle and (idle := [name for name in names if name in given]):
            yield key, idle


def _idle_in_evaluation(config: TrainConfig, index: int) -> Iterator[str]:
    """The keys of an EvaluationCallback that have no effect."""
    section = build_evaluation(config.callbacks[index].extra, ("callbacks", index))
    given = section.predict_options()
    predict = merged_predict(config.predict, given)
    idle = [name for name in (SCORE_KEYS if predict.task == "generate" else GENERATE_KEYS) if name in given]
    if predict.task == "score":
        idle += ["max_new_tokens"] if section.max_new_tokens is not None else []
        idle += [f"generation.{name}" for name in section.generation.explicit() if name not in SCORE_OPTIONS]
    if idle:
        yield f"no effect in callbacks[{index}] with task: {predict.task}: {', '.join(idle)}"
    for key, names in _idle_without(predict, given):
        yield f"no effect in callbacks[{index}] without {key}: {', '.join(names)}"


def _parents(key: str) -> set[str]:
    parts = key.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _asks(config: TrainConfig, key: str) -> bool:
    """Tells whether the user wrote a key, or anything in a section, and not to ask for what happens anyway."""
    value: Any = config
    for part in key.split("."):
        if part in getattr(value, "extra", {}):
            return True
        if part not in value.given:
            return False
        value = getattr(value, part)
    if key in _SWITCHES:
        switch = f"{key}.{_SWITCHES[key]}"
        return getattr(value, _SWITCHES[key]) not in (False, _OFF.get(switch))
    if isinstance(value, Section):
        return bool(value.given or getattr(value, "extra", None))
    return value is not False and value not in (None, [], _OFF.get(key))

"""What the rows of a prediction depend on. Never imports mindspore."""

from __future__ import annotations

import uuid
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from mindformers_ext.config import TrainConfig
from mindformers_ext.config.rules import GENERATE_KEYS, SCORE_KEYS
from mindformers_ext.config.schema import PredictSection
from mindformers_ext.config.section import yaml_fields
from mindformers_ext.predict import reads_stdin
from mindformers_ext.predict.identity import digest, input_identity, package_versions, tokenizer_identity

# Keys of `predict` that change how a run goes on, but no row.
RUN_KEYS = frozenset(
    {
        *("progress", "metrics_file", "resume", "on_error", "max_errors", "refill", "start_timeout", "step_timeout"),
        "share_prefix",
        *("metrics", "reference_field", "metrics_in_rows"),  # in rows they are a part of `request_identity`
    }
)
_PACKAGES = ("mindformers_ext", "mindspore", "numpy", "tokenizers")
# Options of decoding that are free to change between two runs of a job: memory, drafts, and what has no effect.
_FREE_OPTIONS = (
    *("prefill_chunk_size", "cache_implementation", "max_cache_len"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
)
_PLUGINS = ("logits_processor", "stopping_criteria")


def run_identity(
    config: TrainConfig,
    decoding: Any,
    drawn_seed: bool,
    input_data: Any,
    dataset_field: str,
    templates: dict[str, Any],
    model_config: Any,
    weights: dict[str, str] | str,
    tokenizer_folder: Path | None,
) -> dict[str, Any]:
    """Returns everything that the rows depend on, by name; parallel layout and batch size are not among it.

    Args:
        config: the whole configuration.
        decoding: the options of decoding, a `GenerationConfig`; None where nothing is decoded.
        drawn_seed: whether its seed was drawn for this run; it is no part of what the user asked for then.
        input_data: the input.
        dataset_field: field of the prompt.
        templates: the texts that make prompts, see `PromptTemplates.identity`.
        model_config: of the model; None if it has none.
        weights: see `checkpoint.weights_digest`, or `unrepeatable`.
        tokenizer_folder: where the tokenizer was read from.
    """
    idle = RUN_KEYS.union(SCORE_KEYS if config.predict.task == "generate" else GENERATE_KEYS)
    predict = {name: getattr(config.predict, name) for name in yaml_fields(PredictSection) if name not in idle}
    return {
        "input": unrepeatable("standard input") if reads_stdin(input_data) else input_identity(input_data),
        "generation": {} if decoding is None else _options(decoding, drawn_seed),
        "predict": predict | {"dataset_field": dataset_field} | templates,
        "model": _model(model_config),
        "weights": weights,
        "weight_dtype": _numbers_of(config.checkpoint.weight_dtype),
        "tokenizer": {} if tokenizer_folder is None else tokenizer_identity(tokenizer_folder),
        "versions": {name: found or "not installed" for name, found in package_versions(_PACKAGES).items()},
    }


def _numbers_of(weight_dtype: str) -> str:
    """What weights are rounded to: ``auto`` and ``float32`` both leave them as they are stored."""
    return "as stored" if weight_dtype in ("auto", "float32") else weight_dtype


def unrepeatable(what: str) -> str:
    """Returns the identity of what no other process can have: it is equal to nothing."""
    return f"{what} of one process, {uuid.uuid4().hex}"


def _options(decoding: Any, drawn_seed: bool) -> dict[str, Any]:
    options = {
        field.name: getattr(decoding, field.name) for field in fields(decoding) if field.name not in _FREE_OPTIONS
    }
    plugins = [plugin for name in _PLUGINS for plugin in options.pop(name)]
    if drawn_seed:
        options["seed"] = "drawn"
    if plugins:
        options["plugins"] = unrepeatable("plug-ins")
    return options


def _model(model_config: Any) -> dict[str, Any]:
    if not is_dataclass(model_config) or isinstance(model_config, type):
        return {}
    values = asdict(model_config)
    shown = {name: values[name] for name in ("model_type", "num_layers", "vocab_size", "seq_length") if name in values}
    return shown | {"hash": digest(values)}

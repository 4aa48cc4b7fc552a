"""``--validate``: everything that can be checked without running, and an estimate of the memory.

A predict YAML is checked without importing mindspore.
"""

from __future__ import annotations

import math
from pathlib import Path

from mindformers_ext.checkpoint import check_weights, model_files_folder
from mindformers_ext.config import TrainConfig
from mindformers_ext.models import TransformerConfig, weight_layout
from mindformers_ext.predict import Tokenizer, check_output, normalize_input
from mindformers_ext.trainer.checks import check_block_length, check_saving
from mindformers_ext.trainer.model import protected_files, resolve_model_config, training_tokenizer
from mindformers_ext.trainer.stored_options import SPECIAL_KEYS, read_stored, stored_ids

_FLOAT_BYTES = 4
# Weights, gradients and the two moments of AdamW.
_TRAINING_COPIES = 4
# Prompt of the estimate, in tokens, beside the longest that the model takes.
_USUAL_PROMPT = 256


def validate(config: TrainConfig) -> None:
    """Checks paths, tokenizer, model and checkpoint of a loaded configuration and prints what it found.

    Raises:
        ValueError: something does not fit; one sentence.
        FileNotFoundError: a path of the configuration does not exist.
    """
    print(f"configuration: run_mode {config.run_mode}")
    for warning in config.warnings:
        print(f"warning: {warning}")
    predict = config.run_mode == "predict"
    tokenizer = _prediction_tokenizer(config) if predict else training_tokenizer(config)
    model = resolve_model_config(config)
    if tokenizer is not None:
        _report_tokenizer(tokenizer, model)
    values = _report_weights(config, model)
    (_report_prediction if predict else _report_training)(config, model, values)
    print("valid")


def _prediction_tokenizer(config: TrainConfig) -> Tokenizer:
    # As trainer.inference does it, which imports mindspore.
    assert config.checkpoint.load_path is not None  # the loader requires it
    return Tokenizer.from_folder(model_files_folder(config.checkpoint.load_path))


def _report_tokenizer(tokenizer: Tokenizer, model: TransformerConfig) -> None:
    text = "1 + 1 = 2, déjà vu, 今天"
    kept = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    print(f"tokenizer: {tokenizer.vocab_size} ids, EOS {list(tokenizer.eos_token_ids)}, sample text ", end="")
    print("survives the round trip" if kept else "does not survive the round trip")
    if tokenizer.vocab_size > model.vocab_size:
        print(f"warning: the tokenizer has more ids than the model's vocabulary of {model.vocab_size}")


def _report_weights(config: TrainConfig, model: TransformerConfig) -> int:
    layout = weight_layout(model)
    path = config.checkpoint.load_path
    report = check_weights(path, layout) if path else None
    values = report.num_values if report else sum(math.prod(mapping.shape) for mapping in layout.mappings)
    print(f"model: {model.model_type}, {model.num_layers} layers, {values:,} parameters")
    if report:
        print(f"weights: {report.summary()}")
    return values


def _report_prediction(config: TrainConfig, model: TransformerConfig, values: int) -> None:
    section = config.inference
    assert section is not None  # the loader requires it
    check_output(section.output, section.input_data, protected_files(config))
    assert config.checkpoint.load_path is not None  # the loader requires it
    stored, path = read_stored(model_files_folder(config.checkpoint.load_path))
    for name in SPECIAL_KEYS:
        stored_ids(name, stored, path)
    if section.input_data is not None:
        records = errors = 0
        for record in normalize_input(section.input_data, config.predict.dataset_field):
            records += 1
            errors += record.error is not None
        print(f"input: {records} records, {errors} of them without a usable prompt")
    else:
        print("input: none in the configuration; it has to be an argument of inference()")
    print(f"output: {section.output}")
    per_token = 2 * model.num_layers * model.num_query_groups * model.kv_channels * _FLOAT_BYTES
    logits = section.batch_size * model.vocab_size * _FLOAT_BYTES
    print(f"memory: weights {_size(values * _FLOAT_BYTES)}, logits {_size(logits)}")
    rows = section.batch_size
    usual = min(_USUAL_PROMPT + section.max_new_tokens, model.seq_length)
    print(
        f"cache: {per_token:,} bytes a token; {rows} rows of {usual} tokens {_size(rows * usual * per_token)}, "
        f"at most {_size(rows * model.seq_length * per_token)} ({rows} rows of {model.seq_length})"
    )


def _report_training(config: TrainConfig, model: TransformerConfig, values: int) -> None:
    from mindformers_ext.trainer.training import check_batch_sizes  # imports mindspore

    check_batch_sizes(config.training)
    check_saving(config, model)
    check_block_length(config, model)
    path = config.train_dataset.dataloader.path
    for file in [path] if isinstance(path, str) else path or []:
        if not Path(file).is_file():
            raise FileNotFoundError(f"train_dataset.dataloader.path: {file} does not exist")
    print(
        f"memory: weights, gradients and optimizer {_size(_TRAINING_COPIES * values * _FLOAT_BYTES)}, and activations"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"

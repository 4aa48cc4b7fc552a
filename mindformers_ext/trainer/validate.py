"""``--validate``: everything that can be checked without running, and an estimate of the memory.

A predict YAML is checked without importing mindspore.
"""

from __future__ import annotations

import math

from mindformers_ext.checkpoint import check_weights
from mindformers_ext.config import TrainConfig
from mindformers_ext.models import TransformerConfig, weight_layout
from mindformers_ext.models.rope import inverse_frequencies
from mindformers_ext.parallel import ParallelDims
from mindformers_ext.predict import Tokenizer, normalize_input, reads_stdin
from mindformers_ext.predict.answer_metrics import reference_texts
from mindformers_ext.predict.metrics import check_outputs
from mindformers_ext.predict.pairs import prefix_token
from mindformers_ext.runtime import world_size
from mindformers_ext.trainer.checks import (
    answer_metrics,
    build_configured_dataset,
    check_saving,
    describe_data,
    open_saved_run,
    saved_state,
    without_references,
)
from mindformers_ext.trainer.model import (
    checkpoint_model_files,
    prompt_templates,
    protected_files,
    resolve_model_config,
    training_tokenizer,
)
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
    ParallelDims.from_config(config.parallelism, world_size())
    inverse_frequencies(model.rope, model.rotary_dim, model.max_position_embeddings)
    if tokenizer is not None:
        _report_tokenizer(tokenizer, model)
    values = _report_weights(config, model)
    if predict:
        assert tokenizer is not None
        _report_prediction(config, model, values, tokenizer)
    else:
        _report_training(config, model, values, tokenizer)
    print("valid")


def _prediction_tokenizer(config: TrainConfig) -> Tokenizer:
    # As trainer.inference does it, which imports mindspore.
    return Tokenizer.from_folder(checkpoint_model_files(config))


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


def _report_prediction(config: TrainConfig, model: TransformerConfig, values: int, tokenizer: Tokenizer) -> None:
    section = config.inference
    assert section is not None  # the loader requires it
    check_outputs(section.output, section.input_data, protected_files(config), config.predict.metrics_file)
    if config.predict.task == "score" and config.predict.rolling:
        prefix_token(tokenizer)
    stored, path = read_stored(checkpoint_model_files(config))
    for name in SPECIAL_KEYS:
        stored_ids(name, stored, path)
    metrics = answer_metrics(config.predict)
    make_prompt = prompt_templates(config, tokenizer).prompt_maker(config.predict.dataset_field)
    if reads_stdin(section.input_data):
        print("input: standard input, which is not read here")
    elif section.input_data is not None:
        records = errors = references = 0
        for record in normalize_input(section.input_data, config.predict.dataset_field, make_prompt):
            records += 1
            errors += record.error is not None
            references += metrics is not None and bool(reference_texts(record.fields.get(metrics.reference_field)))
        print(f"input: {records} records, {errors} of them without a usable prompt")
        if metrics is not None:
            if records and not references and metrics.needs_reference():
                raise without_references(metrics, records)
            print(f"metrics: {references} records have a reference in the field '{metrics.reference_field}'")
    else:
        print("input: none in the configuration; it has to be an argument of inference()")
    print(f"output: {section.output}")
    per_token = round(sum(map(model.cache_width, model.layer_types)) * _FLOAT_BYTES)
    logits = section.batch_size * model.vocab_size * _FLOAT_BYTES
    print(f"memory: weights {_size(values * _FLOAT_BYTES)}, logits {_size(logits)}")
    rows = section.batch_size
    usual = min(_USUAL_PROMPT + section.max_new_tokens, model.seq_length)
    print(
        f"cache: {per_token:,} bytes a token; {rows} rows of {usual} tokens {_size(rows * usual * per_token)}, "
        f"at most {_size(rows * model.seq_length * per_token)} ({rows} rows of {model.seq_length})"
    )


def _report_training(config: TrainConfig, model: TransformerConfig, values: int, tokenizer: Tokenizer | None) -> None:
    check_saving(config, model)
    dataset = build_configured_dataset(config, model, tokenizer)
    data = describe_data(config, dataset)
    print(f"data: {data['blocks']} blocks of {data['seq_length']} tokens")
    with open_saved_run(config) as saved:
        if saved is not None:
            state = saved_state(saved, config.training.steps, data)
            print(f"continues: {saved.folder} after step {state.global_step}")
    _check_with_mindspore(config, model, tokenizer)
    print(
        f"memory: weights, gradients and optimizer {_size(_TRAINING_COPIES * values * _FLOAT_BYTES)}, and activations"
    )


def _check_with_mindspore(config: TrainConfig, model: TransformerConfig, tokenizer: Tokenizer | None) -> None:
    from mindformers_ext.trainer.callbacks import build_callbacks
    from mindformers_ext.trainer.evaluation import EvaluationCallback, check_evaluation
    from mindformers_ext.trainer.lr_scheduler import build_schedule
    from mindformers_ext.trainer.training import check_batch_sizes

    check_batch_sizes(config.training)
    for callback in build_callbacks([{"type": entry.type, **entry.extra} for entry in config.callbacks]):
        if isinstance(callback, EvaluationCallback):
            check_evaluation(callback.section, config, tokenizer, model)
    scheduler = config.lr_scheduler
    options = {name: getattr(scheduler, name) for name in scheduler.to_dict() if name not in scheduler.extra}
    build_schedule(options, config.training.steps)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"

"""What one call of `Trainer.inference` is asked for, from its arguments, the YAML and the checkpoint's files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from numbers import Integral
from pathlib import Path
from typing import Any

from mindformers_ext.checkpoint import weights_digest
from mindformers_ext.config import InferenceSection, TrainConfig
from mindformers_ext.config.rules import merged_predict
from mindformers_ext.config.schema import PredictSection
from mindformers_ext.parallel.agreement import failing_together, require_same
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import AnswerMetrics, PromptTemplates, Record, Tokenizer, normalize_input, reads_stdin
from mindformers_ext.predict.answer_metrics import reference_texts
from mindformers_ext.predict.identity import digest
from mindformers_ext.predict.metrics import check_outputs
from mindformers_ext.predict.scoring import ScoringOptions, ScoringTask
from mindformers_ext.predict.writers import keeps_ids
from mindformers_ext.runtime import logger, world_size
from mindformers_ext.trainer.checks import answer_metrics, without_references
from mindformers_ext.trainer.decoding import Resolved, resolve_generation
from mindformers_ext.trainer.fingerprint import input_fingerprint
from mindformers_ext.trainer.identity import run_identity, unrepeatable
from mindformers_ext.trainer.model import checkpoint_model_files, prompt_templates, protected_files, tokenizer_folder


@dataclass(frozen=True)
class PredictionRequest:
    """A prediction before its first record is read.

    Attributes:
        config: the whole configuration, with the keys of ``predict`` that hold here.
        options: input, output, batch size and number of new tokens.
        dataset_field: field of a record that holds the prompt.
        records: of the input, of which none is read yet.
        templates: what makes their prompts.
        decoding: the options of decoding, with their origins; None where nothing is decoded.
        scoring: what is scored; None where nothing is.
        vocab_size: ids that the model has.
        model_config: of the model; None if it has none.
        metrics: judge the answers; None without any.
    """

    config: TrainConfig
    options: InferenceSection
    dataset_field: str
    records: Iterator[Record]
    templates: PromptTemplates
    decoding: Resolved | None
    scoring: ScoringTask | None
    vocab_size: int
    model_config: Any
    metrics: AnswerMetrics | None = None

    @property
    def draws_seed(self) -> bool:
        """Whether the run chose its seed of sampling itself."""
        return self.decoding is not None and self.decoding.seed_is_drawn


def read_request(
    config: TrainConfig,
    tokenizer: Tokenizer,
    model_config: Any,
    context: ParallelContext,
    options: InferenceSection,
    dataset_field: str | None,
    generation: Mapping[str, Any],
    predict: Mapping[str, Any] | None = None,
) -> PredictionRequest:
    """Checks and completes what `Trainer.inference` was given; every rank of the job calls it.

    Args:
        config: the whole configuration.
        tokenizer: of the model.
        model_config: of the model; None if it has none.
        context: the place of this process.
        options: see `inference_options`.
        dataset_field: None takes ``predict.dataset_field``.
        generation: options of decoding that win over the YAML.
        predict: keys of ``predict`` that win over the YAML.

    Raises:
        ValueError: an output that would harm another file, or an option out of range.
        FileNotFoundError: the input looks like a path and does not exist.
        PeerError: either of them on another rank.
    """
    if predict:
        config = replace(config, predict=merged_predict(config.predict, predict))
    field = config.predict.dataset_field if dataset_field is None else dataset_field
    vocab_size = getattr(model_config, "vocab_size", tokenizer.vocab_size)
    with failing_together(context):
        if options.output:
            check_outputs(options.output, options.input_data, protected_files(config), config.predict.metrics_file)
        records, templates = open_input(config, tokenizer, options.input_data, field)
        decoding = scoring = judges = None
        if config.predict.task == "generate":
            folder = checkpoint_model_files(config) if config.checkpoint.load_path else None
            decoding = resolve_generation(
                config.generation, options.max_new_tokens, tokenizer, folder, vocab_size, generation
            )
            judges = answer_metrics(config.predict, decoding.config.num_return_sequences)
            if options.output:  # without one nothing is judged
                _check_references(judges, config, tokenizer, options.input_data, field)
        else:
            scoring = _scoring_task(config.predict, tokenizer, model_config, vocab_size)
            if generation:
                logger.warning("no effect with predict.task: %s: %s", config.predict.task, ", ".join(generation))
    if options.output and reads_stdin(options.input_data):
        logger.warning("standard input cannot be read again: a run that is stopped starts over; give long ones a file")
    if judges is not None and judges.in_rows and options.output and not keeps_ids(Path(options.output)):
        logger.warning("predict.metrics_in_rows: no effect in %s, which keeps the texts alone", options.output)
    if judges is not None and not options.output:
        logger.warning("predict.metrics: no effect without an output: answers are judged as its rows are written")
    decoding = None if decoding is None else _with_one_seed(context, decoding)
    return PredictionRequest(
        config, options, field, records, templates, decoding, scoring, vocab_size, model_config, judges
    )


def _check_references(
    metrics: AnswerMetrics | None, config: TrainConfig, tokenizer: Tokenizer, input_data: Any, field: str
) -> None:
    """Refuses an input of which metrics could judge nothing, before hours are spent on it; an empty one is fine."""
    if metrics is None or not metrics.needs_reference() or reads_stdin(input_data):
        return
    count = 0
    for record in open_input(config, tokenizer, input_data, field)[0]:
        if reference_texts(record.fields.get(metrics.reference_field)):
            return
        count += 1
    if count:
        raise without_references(metrics, count)


def _scoring_task(section: PredictSection, tokenizer: Tokenizer, model_config: Any, vocab_size: int) -> ScoringTask:
    options = ScoringOptions(**{field.name: getattr(section, field.name) for field in fields(ScoringOptions)})
    return ScoringTask(tokenizer, options, getattr(model_config, "seq_length", None), vocab_size)


def request_facts(request: PredictionRequest) -> dict[str, Any]:
    """Returns what this run chose itself and the ones that go on with its job must keep: seed and time."""
    decoding = request.decoding
    facts: dict[str, Any] = {"seed": decoding.config.seed} if decoding is not None and decoding.seed_is_drawn else {}
    return facts | ({"now": request.templates.now.isoformat()} if request.templates.show_time else {})


def with_facts(request: PredictionRequest, facts: Mapping[str, Any]) -> PredictionRequest:
    """Returns the request with the seed and the time of the run that began its job, see `request_facts`."""
    if request.decoding is not None and request.decoding.seed_is_drawn:
        config = request.decoding.config.updated(seed=facts["seed"])
        request = replace(request, decoding=replace(request.decoding, config=config))
    if request.templates.show_time and facts["now"] != request.templates.now.isoformat():
        templates = replace(request.templates, now=datetime.fromisoformat(facts["now"]))
        make_prompt = templates.prompt_maker(request.dataset_field)
        records = normalize_input(request.options.input_data, request.dataset_field, make_prompt)
        request = replace(request, templates=templates, records=records)
    return request


def require_same_request(context: ParallelContext, request: PredictionRequest) -> None:
    """Refuses to start where ranks would read, batch or decode differently; every rank calls it.

    Raises:
        ValueError: names what differs, with the ranks.
    """
    if context.dims.world_size == 1:
        return
    compared = {
        "batch_size": request.options.batch_size,
        "the input": input_fingerprint(request.options.input_data),
        "dataset_field": request.dataset_field,
        "the templates": digest(request.templates.identity()),
        "the options of decoding": "" if request.decoding is None else request.decoding.describe(),
        "the metrics": "none" if request.metrics is None else digest(request.metrics.identity()),
    }
    require_same(context, compared)


def request_identity(request: PredictionRequest, has_own_weights: bool) -> dict[str, Any]:
    """Returns what the rows depend on; see `run_identity`.

    Args:
        request: the prediction.
        has_own_weights: whether the model's weights are in no file: they are like no others.
    """
    config = request.config
    weights = unrepeatable("weights in memory") if has_own_weights else weights_digest(config.checkpoint.load_path)
    identity = run_identity(
        config,
        None if request.decoding is None else request.decoding.config,
        request.draws_seed,
        request.options.input_data,
        request.dataset_field,
        request.templates.identity(),
        request.model_config,
        weights,
        tokenizer_folder(config),
    )
    if request.metrics is not None and request.metrics.in_rows:
        identity["metrics"] = request.metrics.identity()
    return identity


def _with_one_seed(context: ParallelContext, decoding: Resolved) -> Resolved:
    """Ranks that draw for themselves would choose other tokens; all of them ask, whatever their options are."""
    drawn = context.world.all_gather_object(decoding.config.seed if decoding.seed_is_drawn else None)
    if not decoding.seed_is_drawn:
        return decoding
    seed = next(seed for seed in drawn if seed is not None)
    return replace(decoding, config=decoding.config.updated(seed=seed))


def inference_options(
    config: TrainConfig,
    input_data: Any,
    max_new_tokens: int | None,
    output: str | os.PathLike[str] | None,
    batch_size: int | None,
) -> InferenceSection:
    """Returns the ``inference`` section with the arguments of `Trainer.inference` in it.

    Raises:
        ValueError: an argument out of range.
        TypeError: an output that is no path.
    """
    section = config.inference or InferenceSection(output="")
    if output is not None and not isinstance(output, str | os.PathLike):
        raise TypeError(f"output must be a path, not {type(output).__name__}")
    return InferenceSection(
        max_new_tokens=section.max_new_tokens if max_new_tokens is None else _count("max_new_tokens", max_new_tokens),
        batch_size=section.batch_size if batch_size is None else _count("batch_size", batch_size),
        output=section.output if output is None else os.fsdecode(output),
        input_data=section.input_data if input_data is None else input_data,
    )


def _count(name: str, value: Any) -> int:
    # numpy's integers are registered as Integral
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return int(value)


def check_files(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Finds mistakes in paths and templates before the model is built.

    Raises:
        ValueError: an output that would harm another file, a template that cannot be compiled, an input without the
            references of metrics, or a tokenizer without the token that scoring needs.
        FileNotFoundError: a file is not there.
        PermissionError: the folder of the output is not writable.
    """
    section = config.inference or InferenceSection()
    check_outputs(section.output, section.input_data, protected_files(config), config.predict.metrics_file)
    # Records in memory, of which there are none, where they are an argument of inference().
    input_data, field = section.input_data or [], config.predict.dataset_field
    open_input(config, tokenizer, input_data, field)
    _check_references(answer_metrics(config.predict), config, tokenizer, input_data, field)
    if config.predict.task == "score":
        _scoring_task(config.predict, tokenizer, None, tokenizer.vocab_size)


def open_input(
    config: TrainConfig, tokenizer: Tokenizer, input_data: Any, field: str
) -> tuple[Iterator[Record], PromptTemplates]:
    """Returns the records, of which none is read yet, and the templates that make their prompts."""
    if reads_stdin(input_data) and world_size() > 1:
        raise ValueError("input_data '-': standard input belongs to one process; give the ranks of a job a file")
    templates = prompt_templates(config, tokenizer)
    return normalize_input(input_data, field, templates.prompt_maker(field)), templates

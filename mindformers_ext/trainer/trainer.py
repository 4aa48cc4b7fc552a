"""The Trainer: one model, one configuration, `train()` and `inference()`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from numbers import Integral
from typing import Any, Literal

from mindspore import nn

from mindformers_ext.checkpoint import check_weights, weights_digest
from mindformers_ext.config import InferenceSection, TrainConfig, load_config
from mindformers_ext.generate import GenerationConfig, GenerationStats
from mindformers_ext.models import TransformerConfig, weight_layout
from mindformers_ext.parallel import ParallelDims, parallelize_model
from mindformers_ext.parallel.agreement import failing_together, require_same
from mindformers_ext.parallel.groups import ParallelContext, init_parallel
from mindformers_ext.predict import (
    PromptTemplates,
    Record,
    RunSummary,
    Tokenizer,
    format_summary,
    normalize_input,
    reads_stdin,
)
from mindformers_ext.predict.metrics import (
    Latencies,
    RankReport,
    check_outputs,
    format_measures,
    joined_timings,
    metrics_path,
    run_metrics,
    write_metrics,
)
from mindformers_ext.predict.progress import estimate_total
from mindformers_ext.runtime import logger, rank, setup_logging, setup_runtime, world_size
from mindformers_ext.trainer.batch_job import BatchJob, open_batch_job
from mindformers_ext.trainer.callbacks import TrainerCallback
from mindformers_ext.trainer.causal_lm import build_causal_lm
from mindformers_ext.trainer.fingerprint import fingerprint, input_fingerprint
from mindformers_ext.trainer.identity import run_identity, unrepeatable
from mindformers_ext.trainer.inference import (
    Resolved,
    Watch,
    build_inference_tokenizer,
    configure_inference,
    generate_from_records,
    resolve_generation,
    without_unnamed_tokens,
)
from mindformers_ext.trainer.model import (
    checkpoint_model_files,
    load_model_weights,
    prompt_templates,
    protected_files,
    resolve_model_config,
    tokenizer_folder,
    training_tokenizer,
)
from mindformers_ext.trainer.report import RunMeter
from mindformers_ext.trainer.setup import TrainingRun, build_training_run
from mindformers_ext.trainer.train_state import TrainerState
from mindformers_ext.trainer.training import LossFunction, train_loop
from mindformers_ext.trainer.watchdog import Watchdog


class Trainer:
    """Trains a model or predicts with it, as ``run_mode`` says.

    A training Trainer can call `inference` as well, with the weights of the moment.

    Args:
        config: path of a YAML, the same content as a mapping, or a loaded `TrainConfig`.
        model: a model to use instead of the one that the configuration describes.
        run_mode: ``train`` or ``predict``; wins over the configuration.
        train_dataset: instead of the one that ``train_dataset`` describes; see `TrainDataset`.
        eval_dataset: not supported yet.
        optimizer: instead of the one that ``optimizer`` describes.
        lr_scheduler: learning rate by number of finished steps, instead of ``lr_scheduler``.
        callbacks: called after those of ``callbacks``.
        compute_loss_func: ``(outputs, labels) -> mean loss`` instead of the model's own loss.

    Attributes:
        config: the whole configuration.
        is_inference: whether run_mode is ``predict``.
        model: the model.
        tokenizer: the tokenizer; None in training on a given dataset without tokenizer.
        state: progress of training.
        last_summary: what the latest `inference` did; empty before it.

    Raises:
        ValueError: a mistake in the configuration, the checkpoint or the tokenizer; nothing slow was done before.
        FileNotFoundError: a path of the configuration does not exist.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | TrainConfig,
        model: nn.Cell | None = None,
        run_mode: str | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        compute_loss_func: LossFunction | None = None,
    ) -> None:
        setup_logging()
        if eval_dataset is not None:
            raise NotImplementedError("eval_dataset is not supported yet; call inference() on a file of prompts")
        given = {
            "model": model,
            "train_dataset": train_dataset,
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
        }
        self.config = _load(config, run_mode, {name for name, value in given.items() if value is not None})
        self.is_inference = self.config.run_mode == "predict"
        self.last_summary = RunSummary()
        for warning in self.config.warnings:
            logger.warning(warning)

        dims = ParallelDims.from_config(self.config.parallelism, world_size())
        self._weights_loaded, self._own_model = False, model is not None
        training = self.config.training
        self.tokenizer: Tokenizer | None
        if self.is_inference:
            self.tokenizer = build_inference_tokenizer(self.config)
            _check_files(self.config, self.tokenizer)
        else:
            self.tokenizer = training_tokenizer(self.config)
        model_config = _checked_model_config(self.config) if model is None else None
        setup_runtime(seed=training.seed, deterministic=training.deterministic)
        self._watchdog = Watchdog(rank(), dims.world_size)
        with self._watchdog.phase("joining the job and building the model", *self._limit("start_timeout")):
            self._context = _joined_job(dims, self.config)
            self.model = self._apply_parallelism(model, model_config)
        self.state = TrainerState(max_steps=training.steps)
        self._run: TrainingRun | None = None
        if not self.is_inference:
            self._run = build_training_run(
                self.config,
                self.model,
                self.tokenizer,
                given["model"] is not None,
                train_dataset,
                optimizer,
                lr_scheduler,
                callbacks or [],
            )
            self.state = self._run.state
            self._weights_loaded = True
        self._compute_loss_func = compute_loss_func

    def train(self) -> TrainerState:
        """Trains up to ``training.steps``; a checkpoint with optimizer in ``checkpoint.load_path`` is continued.

        Returns:
            The progress, with the log in ``log_history``.

        Raises:
            RuntimeError: run_mode is ``predict``, or the loss is not finite.
        """
        if self._run is None:
            raise RuntimeError("train() needs run_mode: train; this Trainer was built with run_mode: predict")
        run = self._run
        return train_loop(
            self.model,
            self.config,
            run.dataset,
            run.optimizer,
            run.schedule,
            run.callbacks,
            self.state,
            self._compute_loss_func,
        )

    def inference(
        self,
        input_data: Any = None,
        max_new_tokens: int | None = None,
        output: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        dataset_field: str | None = None,
        collect: bool = True,
        resume: bool | Literal["auto"] | None = None,
        **generation: Any,
    ) -> list[tuple[int, list[int]]]:
        """Answers prompts and writes one row for each input record, in input order.

        With an output, finished records go to ``<output>.journal`` at once; the output appears, or changes, when all
        are finished. A run that was stopped goes on from its journal, and a complete output is left as it is.

        Args:
            input_data: a prompt, a file (``.jsonl``, ``.json``, or text with a prompt a line), several as
                ``{"files": [...]}``, ``-`` for standard input, a dict, a list of dicts or of strings; None takes
                ``inference.input_data``.
            max_new_tokens: None takes ``inference.max_new_tokens``.
            output: ``.jsonl``, ``.json``, ``.txt`` or a name without suffix; None takes ``inference.output``; an empty
                string, or None without an ``inference`` section, writes no file.
            batch_size: None takes ``inference.batch_size``.
            dataset_field: field of a record that holds the prompt; None takes ``predict.dataset_field``.
            collect: False returns an empty list, so that the answers of a long file need no memory.
            resume: None takes ``predict.resume``.
            **generation: options of decoding in the names of the YAML's ``generation``, and the plug-ins
                ``logits_processor`` and ``stopping_criteria``; they win over the YAML.

        Returns:
            ``(sample_idx, ids of prompt and answer)`` of every record that was answered.

        Raises:
            ValueError: an argument out of range, a checkpoint that does not fit, or an output that would overwrite one
                of the run's own files, that another run is writing or that has the journal of another job.
            JobStoppedError: the run ended early (a signal, ``predict.max_errors``, a full disk, a lost rank); the same
                call goes on where it ended.
            TypeError: an argument of a type that cannot be meant.
            FileNotFoundError: the input looks like a path and does not exist.
        """
        options = _inference_options(self.config, input_data, max_new_tokens, output, batch_size)
        field = self.config.predict.dataset_field if dataset_field is None else dataset_field
        if options.output:
            metrics_file = self.config.predict.metrics_file
            check_outputs(options.output, options.input_data, protected_files(self.config), metrics_file)
        if self.tokenizer is None:
            raise ValueError("inference() needs a tokenizer: set train_dataset.dataloader.tokenizer_path")
        records, templates = _open_input(self.config, self.tokenizer, options.input_data, field)
        self._validate_pp_inference()
        vocab_size = getattr(self._model_config, "vocab_size", self.tokenizer.vocab_size)
        resolved = self._resolve_decoding(options, vocab_size, generation)
        logger.info("decoding: %s", resolved.describe())
        with self._starting("comparing the settings of all ranks"):
            self._require_same_run(options, field, resolved.describe(), templates)
        drawn = resolved.seed_is_drawn
        job = open_batch_job(
            self._context,
            options.output,
            lambda: self._identity(options, field, resolved, templates),
            {"seed": resolved.config.seed} if drawn else {},
            self.config.predict.resume if resume is None else resume,
            repeatable=not drawn,
            needs_ids=collect,
        )
        decoding = resolved.config.updated(seed=job.facts["seed"]) if drawn else resolved.config
        if job.num_finished and drawn:
            logger.info("seed of sampling: %d, that of the run before", decoding.seed)
        if self.config.predict.suppress_unnamed_tokens:
            decoding = without_unnamed_tokens(decoding, self.tokenizer, vocab_size)
        with job:
            if job.is_complete:
                self.last_summary, outputs = job.stored(collect)
                logger.info("%s is complete, nothing is left to do", options.output)
                return outputs
            return self._answer(job, records, decoding, options, vocab_size, collect, resolved.as_dict())

    def _answer(
        self,
        job: BatchJob,
        records: Iterable[Record],
        decoding: GenerationConfig,
        options: InferenceSection,
        vocab_size: int,
        collect: bool,
        origins: dict[str, Any],
    ) -> list[tuple[int, list[int]]]:
        """Answers what is left of the records and publishes the output; see `inference`."""
        assert self.tokenizer is not None
        predict = self.config.predict
        stats, latencies = GenerationStats(), Latencies()
        meter = RunMeter(self.model, self._context)
        result = generate_from_records(
            self.model,
            self.tokenizer,
            records,
            decoding,
            stats,
            writer=job.writer,
            context=self._context,
            watch=self._watched(stats),
            batch_size=options.batch_size,
            latencies=latencies,
            total=estimate_total(options.input_data) if rank() == 0 else None,
            step_check=job.step_check,
            max_length=getattr(self._model_config, "seq_length", None),
            vocab_size=vocab_size,
            skip_special_tokens=predict.skip_special_tokens,
            progress=predict.progress and rank() == 0,
            collect=collect,
            finished=job.finished,
            num_errors=job.num_errors,
            on_error=predict.on_error,
            max_errors=predict.max_errors,
            prepare=self._load_inference_checkpoint,
            agree=job.agree,
        )
        self.last_summary, outputs = job.publish(result, collect)
        self.last_summary.seed = decoding.seed
        reports = meter.reports(stats)
        for line in (
            *format_summary(self.last_summary, joined_timings(reports)),
            *format_measures(reports, result.summary.new_tokens),
        ):
            logger.info(line)
        if options.output:
            logger.info("results: %s", options.output)
            self._write_metrics(result.summary.new_tokens, reports, latencies, options, origins)
        return outputs

    @property
    def _model_config(self) -> Any:
        return getattr(self.model, "config", None)

    def _resolve_decoding(self, options: InferenceSection, vocab_size: int, arguments: Mapping[str, Any]) -> Resolved:
        assert self.tokenizer is not None
        folder = checkpoint_model_files(self.config) if self.config.checkpoint.load_path else None
        resolved = resolve_generation(
            self.config.generation, options.max_new_tokens, self.tokenizer, folder, vocab_size, arguments
        )
        # Ranks that draw for themselves would choose other tokens; all of them ask, whatever their options are.
        drawn = self._context.world.all_gather_object(resolved.config.seed if resolved.seed_is_drawn else None)
        if not resolved.seed_is_drawn:
            return resolved
        seed = next(seed for seed in drawn if seed is not None)
        return replace(resolved, config=resolved.config.updated(seed=seed))

    def _identity(
        self, options: InferenceSection, field: str, resolved: Resolved, templates: PromptTemplates
    ) -> dict[str, Any]:
        """What the rows of a run depend on. Weights that no file has are like no others."""
        stored = self.is_inference and not self._own_model
        weights = weights_digest(self.config.checkpoint.load_path) if stored else unrepeatable("weights in memory")
        return run_identity(
            self.config,
            resolved.config,
            resolved.seed_is_drawn,
            options.input_data,
            field,
            templates.identity(),
            self._model_config,
            weights,
            tokenizer_folder(self.config),
        )

    def _write_metrics(
        self,
        new_tokens: int,
        reports: list[RankReport],
        latencies: Latencies,
        options: InferenceSection,
        decoding: dict[str, Any],
    ) -> None:
        """Writes what a run did beside its output, on the first rank."""
        if rank() != 0 or not self.config.predict.metrics_file:
            return
        settings = {"decoding": decoding, "batch_size": options.batch_size, "layout": self._layout()}
        path = metrics_path(options.output)
        try:
            write_metrics(path, run_metrics(self.last_summary, new_tokens, reports, latencies, settings))
            logger.info("metrics: %s", path)
        except OSError as error:  # the results are complete
            logger.warning("the metrics of the run could not be written to %s: %s", path, error)

    def _layout(self) -> dict[str, Any]:
        """The degrees of the job, and how many parts of a batch a pipeline has on its way."""
        runtime = getattr(self.model, "runtime", None)
        return asdict(self._context.dims) | {"micro_batches": 1 if runtime is None else runtime.micro_batch_num}

    def _limit(self, key: str) -> tuple[float, str]:
        """A limit of the watchdog, and its name; training is not watched."""
        return getattr(self.config.predict, key) if self.is_inference else 0.0, f"predict.{key}"

    def _starting(self, name: str) -> AbstractContextManager[None]:
        """Watches a step before the first batch."""
        world = self._context.world
        return self._watchdog.phase(name, *self._limit("start_timeout"), waiting_for=lambda: world.waiting_for)

    def _watched(self, stats: GenerationStats) -> Watch:
        """Returns what watches the answering of a batch of these records, the first one with more patience."""

        def watch(records: Sequence[int]) -> AbstractContextManager[None]:
            world, self._watchdog.records = self._context.world, records
            return self._watchdog.phase(
                "answering",
                *self._limit("step_timeout" if stats.steps else "start_timeout"),
                progress=lambda: (stats.steps, world.traffic.finished),
                waiting_for=lambda: world.waiting_for,
            )

        return watch

    def _apply_parallelism(self, model: nn.Cell | None, model_config: TransformerConfig | None) -> nn.Cell:
        """Spreads the model over the job's processes, the same way for training and prediction.

        Raises:
            NotImplementedError: a model of the caller's on processes that would share it.
            ValueError: the model cannot be split like this.
        """
        parallelism, context = self.config.parallelism, self._context
        if model_config is None:
            assert model is not None
            if context.replica.size > 1:
                raise NotImplementedError(
                    "a model that is given to the Trainer is whole on every process: set tensor_parallel, "
                    "context_parallel, pipeline_parallel and data_parallel_shard to 1"
                )
            return model
        return parallelize_model(
            lambda layers: build_causal_lm(model_config, context, layers, parallelism),
            model_config.num_layers,
            context,
            forward_only=self.is_inference,
            layers_per_stage=parallelism.pipeline_parallel_layers_per_stage,
        )

    def _require_same_run(
        self, options: InferenceSection, field: str, decoding: str, templates: PromptTemplates
    ) -> None:
        """Refuses to start where ranks would read, batch or decode differently.

        Raises:
            ValueError: names what differs, with the ranks.
        """
        if self._context.dims.world_size == 1:
            return
        compared = {
            "batch_size": options.batch_size,
            "the input": input_fingerprint(options.input_data),
            "dataset_field": field,
            "the templates": fingerprint(templates.identity()),
            "the options of decoding": decoding,
        }
        require_same(self._context, compared)

    def _validate_pp_inference(self) -> None:
        """Refuses pipeline options that have no meaning without a backward pass.

        Raises:
            NotImplementedError: names the option.
        """
        parallelism = self.config.parallelism
        if parallelism.pipeline_parallel == 1:
            return
        for name, active in (
            ("parallelism.pipeline_parallel_interleave_num", parallelism.pipeline_parallel_interleave_num > 1),
            ("parallelism.pipeline_parallel_overlap_b_f", parallelism.pipeline_parallel_overlap_b_f),
            ("swap.enable", self.config.swap.enable),
        ):
            if active:
                raise NotImplementedError(f"{name} is not supported in prediction with pipeline parallelism")

    def _load_inference_checkpoint(self) -> None:
        """Fills the model from ``checkpoint.load_path``, once."""
        if self._weights_loaded:
            return
        with self._starting("loading the checkpoint"), failing_together(self._context):
            load_model_weights(self.model, self.config.checkpoint.load_path)
        self._weights_loaded = True


def _checked_model_config(config: TrainConfig) -> TransformerConfig:
    """The model that the configuration describes; in prediction, the weights fit it."""
    if config.run_mode != "predict":
        return resolve_model_config(config)
    model_config = configure_inference(config)
    check_weights(config.checkpoint.load_path, weight_layout(model_config))
    return model_config


def _joined_job(dims: ParallelDims, config: TrainConfig) -> ParallelContext:
    """Joins the job, and refuses ranks with different configurations."""
    context = init_parallel(dims)
    if dims.world_size > 1:
        require_same(context, {"the configuration": fingerprint(config.to_dict())})
    return context


def _load(
    config: str | os.PathLike[str] | Mapping[str, Any] | TrainConfig, run_mode: str | None, provided: set[str]
) -> TrainConfig:
    if not isinstance(config, TrainConfig):
        return load_config(config, {} if run_mode is None else {"run_mode": run_mode}, provided=provided)
    if run_mode is not None and run_mode != config.run_mode:
        return load_config(config.to_dict(), {"run_mode": run_mode}, provided=provided)
    return config


def _inference_options(
    config: TrainConfig,
    input_data: Any,
    max_new_tokens: int | None,
    output: str | os.PathLike[str] | None,
    batch_size: int | None,
) -> InferenceSection:
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


def _check_files(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Finds mistakes in paths and templates before the model is built."""
    section = config.inference or InferenceSection()
    check_outputs(section.output, section.input_data, protected_files(config), config.predict.metrics_file)
    # Records in memory, of which there are none, where they are an argument of inference().
    _open_input(config, tokenizer, section.input_data or [], config.predict.dataset_field)


def _open_input(
    config: TrainConfig, tokenizer: Tokenizer, input_data: Any, field: str
) -> tuple[Iterator[Record], PromptTemplates]:
    """Returns the records, of which none is read yet, and the templates that make their prompts."""
    if reads_stdin(input_data) and world_size() > 1:
        raise ValueError("input_data '-': standard input belongs to one process; give the ranks of a job a file")
    templates = prompt_templates(config, tokenizer)
    return normalize_input(input_data, field, templates.prompt_maker(field)), templates

"""The Trainer: one model, one configuration, `train()` and `inference()`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mindspore import nn

from mindformers_ext.checkpoint import check_no_other_run, keep_only, saved_step
from mindformers_ext.config import TrainConfig
from mindformers_ext.generate import GenerationStats, Likelihood, Pair, check_pairs
from mindformers_ext.models import TransformerConfig
from mindformers_ext.parallel import ParallelDims, parallelize_model
from mindformers_ext.parallel.agreement import failing_together
from mindformers_ext.predict import Decode, JobStoppedError, RunResult, RunSummary, Tokenizer
from mindformers_ext.predict.disk_space import warn_of_space
from mindformers_ext.predict.metrics import Latencies
from mindformers_ext.predict.progress import estimate_total
from mindformers_ext.runtime import logger, rank, setup_logging, setup_runtime, world_size
from mindformers_ext.trainer.batch_job import BatchJob, Outputs, open_batch_job
from mindformers_ext.trainer.callbacks import TrainerCallback
from mindformers_ext.trainer.causal_lm import build_causal_lm
from mindformers_ext.trainer.checks import check_pipeline_options
from mindformers_ext.trainer.inference import (
    build_inference_tokenizer,
    check_lookup,
    configure_inference,
    decode_together,
    generate_from_records,
    num_replicas,
    prefix_cache,
    score_from_records,
    without_unnamed_tokens,
)
from mindformers_ext.trainer.model import (
    checkpoint_model_files,
    load_model_weights,
    resolve_model_config,
    tokenizer_folder,
    training_tokenizer,
)
from mindformers_ext.trainer.refilling import refills
from mindformers_ext.trainer.report import RunMeter, report_metrics, report_run
from mindformers_ext.trainer.request import (
    PredictionRequest,
    check_files,
    inference_options,
    read_request,
    request_facts,
    request_identity,
    require_same_request,
    with_facts,
)
from mindformers_ext.trainer.saving import write_checkpoint, write_description
from mindformers_ext.trainer.scoring import LIKELIHOODS, rolling_bounds, score_pairs, score_rolling, scoring_decode
from mindformers_ext.trainer.setup import TrainingRun, build_training_run, described_by
from mindformers_ext.trainer.start import joined_job, loaded_config
from mindformers_ext.trainer.train_state import TrainerState
from mindformers_ext.trainer.training import LossFunction, train_loop
from mindformers_ext.trainer.watching import RunWatch


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
        given = {"model": model, "train_dataset": train_dataset, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        self.config = loaded_config(config, run_mode, {name for name, value in given.items() if value is not None})
        self.is_inference = self.config.run_mode == "predict"
        self.last_summary = RunSummary()
        for warning in self.config.warnings:
            logger.warning(warning)

        dims = ParallelDims.from_config(self.config.parallelism, world_size())
        self._weights_loaded, self._own_model = False, model is not None
        self._saved_to: set[Path] = set()
        training = self.config.training
        self.tokenizer = self._read_tokenizer()
        model_config = None
        if model is None:
            model_config = (configure_inference if self.is_inference else resolve_model_config)(self.config)
        setup_runtime(seed=training.seed, deterministic=training.deterministic)
        self._watch = RunWatch(self.config.predict, self.is_inference, dims.world_size)
        with self._watch.start("joining the job and building the model"):
            self._context = joined_job(dims, self.config, model_config)
            self._watch.world = self._context.world
            self.model = self._apply_parallelism(model, model_config)
        self.state = TrainerState(max_steps=training.steps)
        self._run: TrainingRun | None = None
        if not self.is_inference:
            self._run = build_training_run(
                self.config,
                self.model,
                self._context,
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
        if self._run is not None:
            self._run.callbacks.on_init_end(self.config, self.state, trainer=self)

    def _read_tokenizer(self) -> Tokenizer | None:
        """Reads the tokenizer; in prediction, also finds mistakes that need no model."""
        if not self.is_inference:
            return training_tokenizer(self.config)
        tokenizer = build_inference_tokenizer(self.config)
        check_files(self.config, tokenizer)
        return tokenizer

    def train(self, until: int | None = None) -> TrainerState:
        """Trains up to ``training.steps``; a checkpoint with optimizer in ``checkpoint.load_path`` is continued.

        Args:
            until: end after this step already, for example to call `inference`; the next call goes on, and all calls
                together do what a single one does. None, and at most, ``training.steps``.

        Returns:
            The progress, with the log in ``log_history``.

        Raises:
            RuntimeError: run_mode is ``predict``, or the loss is not finite.
            ValueError: ``until`` is out of range.
        """
        if self._run is None:
            raise RuntimeError("train() needs run_mode: train; this Trainer was built with run_mode: predict")
        if until is not None and not (type(until) is int and 1 <= until <= self.state.max_steps):
            raise ValueError(f"until must be a step from 1 to training.steps ({self.state.max_steps}), not {until!r}")
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
            until,
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
        predict: Mapping[str, Any] | None = None,
        **generation: Any,
    ) -> Outputs:
        """Answers prompts, or scores them, and writes one row for each input record, in input order.

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
            predict: keys of the YAML's ``predict`` that differ in this call, such as ``{"metrics": ["exact_match"]}``.
            **generation: options of decoding in the names of the YAML's ``generation``, and the plug-ins
                ``logits_processor`` and ``stopping_criteria``; they win over the YAML.

        Returns:
            ``(sample_idx, ids of prompt and answer)`` of every record that was answered; with ``predict.task: score``
            ``(sample_idx, log-likelihood)``, which for a list of choices is a list.

        Raises:
            ValueError: an argument out of range, a checkpoint that does not fit, or an output that would overwrite one
                of the run's own files, that another run is writing or that has the journal of another job.
            JobStoppedError: the run ended early (a signal, ``predict.max_errors``, a full disk); the same call goes on
                where it ended.
            PeerError: another rank refused the request, or could not read the checkpoint.
            PeerLostError: another rank has ended, or failed for good; the same call goes on where the run ended.
            TypeError: an argument of a type that cannot be meant.
            FileNotFoundError: the input looks like a path and does not exist.
        """
        if self.tokenizer is None:
            raise ValueError("inference() needs a tokenizer: set train_dataset.dataloader.tokenizer_path")
        self._validate_pp_inference()
        options = inference_options(self.config, input_data, max_new_tokens, output, batch_size)
        with self._watch.waiting("comparing the settings of all ranks", "start_timeout"):
            request = read_request(
                self.config,
                self.tokenizer,
                self._model_config,
                self._context,
                options,
                dataset_field,
                generation,
                predict,
            )
            require_same_request(self._context, request)
        if request.decoding is not None:
            check_lookup(self.model, request.decoding.config, options.batch_size)
            logger.info("decoding: %s", request.decoding.describe())
        elif max_new_tokens is not None:
            logger.warning("no effect with predict.task: %s: max_new_tokens", request.config.predict.task)
        with self._watch.waiting("opening the output", "start_timeout"):
            job = open_batch_job(
                self._context,
                options.output,
                lambda: request_identity(request, self._own_model or not self.is_inference),
                request_facts(request),
                request.config.predict.resume if resume is None else resume,
                repeatable=not request.draws_seed,
                needs_ids=collect,
            )
        with job:
            if job.is_complete:
                self.last_summary, outputs = job.stored(collect, request.metrics)
                logger.info("%s is complete, nothing is left to do", options.output)
                report_metrics(
                    self.last_summary, options.output if rank() == 0 and request.config.predict.metrics_file else ""
                )
                return outputs
            return self._answer(job, with_facts(request, job.facts), collect)

    def _answer(self, job: BatchJob, request: PredictionRequest, collect: bool) -> Outputs:
        """Answers what is left of the records and publishes the output; see `inference`."""
        predict, options = request.config.predict, request.options

        def agree(reason: JobStoppedError | None) -> None:
            with self._watch.waiting("waiting for all ranks after a batch", "step_timeout"):
                job.agree(reason)

        shown = predict.progress and rank() == 0
        total = estimate_total(options.input_data) if shown or job.writer is not None else None
        stats, latencies = GenerationStats(), Latencies()
        meter = RunMeter(self.model, self._context)
        answer = self._scorer(request) if request.decoding is None else self._generator(job, request, total, stats)
        result = answer(
            records=request.records,
            stats=stats,
            writer=job.writer,
            context=self._context,
            watch=self._watch.answering(stats),
            batch_size=options.batch_size,
            latencies=latencies,
            total=total,
            step_check=job.step_check,
            progress=shown,
            collect=collect,
            finished=job.finished,
            num_errors=job.num_errors,
            on_error=predict.on_error,
            max_errors=predict.max_errors,
            prepare=self._load_inference_checkpoint,
            agree=agree,
        )
        self.last_summary, outputs = job.publish(result, collect, request.metrics)
        settings: dict[str, Any] = {"task": predict.task}
        if request.decoding is not None:
            self.last_summary.seed = request.decoding.config.seed
            settings["decoding"] = request.decoding.as_dict()
        report_run(
            self.last_summary,
            result.summary.new_tokens,
            meter.reports(stats),
            latencies,
            settings | {"batch_size": options.batch_size, "layout": meter.layout()},
            options.output if rank() == 0 else "",
            metrics_file=predict.metrics_file,
        )
        return outputs

    def _generator(
        self, job: BatchJob, request: PredictionRequest, total: int | None, stats: GenerationStats
    ) -> Callable[..., RunResult]:
        """Returns what generates answers to records."""
        assert self.tokenizer is not None and request.decoding is not None
        predict, options, decoding = request.config.predict, request.options, request.decoding.config
        if request.decoding.seed_is_drawn and job.num_finished:
            logger.info("seed of sampling: %d, that of the run before", decoding.seed)
        if predict.suppress_unnamed_tokens:
            decoding = without_unnamed_tokens(decoding, self.tokenizer, request.vocab_size)
        new_tokens = (decoding.max_new_tokens or 0) * decoding.num_return_sequences
        if job.writer is not None:
            warn_of_space(options.output, options.input_data, total, new_tokens)
        return partial(
            generate_from_records,
            self.model,
            self.tokenizer,
            config=decoding,
            prefixes=prefix_cache(predict.share_prefix, self.model, decoding, stats),
            max_length=getattr(self._model_config, "seq_length", None),
            vocab_size=request.vocab_size,
            skip_special_tokens=predict.skip_special_tokens,
            refill=refills(predict, self.model, decoding, options.batch_size),
        )

    def _scorer(self, request: PredictionRequest) -> Callable[..., RunResult]:
        """Returns what scores records."""
        assert request.scoring is not None
        share, chunk_size = request.config.predict.share_prefix, self.config.generation.prefill_chunk_size
        return partial(score_from_records, self.model, request.scoring, share_prefix=share, chunk_size=chunk_size)

    def score(
        self, pairs: Sequence[Pair], batch_size: int | None = None, share_prefix: bool | None = None
    ) -> list[Likelihood]:
        """Returns the log-probabilities of continuations under the weights of the moment; every rank calls it.

        Args:
            pairs: ids of a context and of its continuation, neither of them empty; see `predict.pairs`. Those with
                equal contexts share them where they are neighbours.
            batch_size: contexts that run together on a replica; None takes ``inference.batch_size``.
            share_prefix: whether these run once; None takes ``predict.share_prefix``.

        Returns:
            A `Likelihood` for each pair: ``total``, ``is_greedy``, ``token_logprobs``.

        Raises:
            ValueError: an empty context or continuation, ids that the model does not have, or a pair that is too long.
            FloatingPointError: the probability of a token is no finite number.
        """
        check_pairs(self.model, pairs)
        return score_pairs(self._scoring_decode(share_prefix), pairs, self._scoring_batch(batch_size))

    def score_rolling(
        self,
        texts: Sequence[Sequence[int]],
        prefix: int | None = None,
        max_length: int | None = None,
        batch_size: int | None = None,
    ) -> list[float]:
        """Returns the log-likelihood of whole texts of any length, as lm-eval's ``loglikelihood_rolling`` does.

        Args:
            texts: token ids of each.
            prefix: the id before a text's first token; None takes the tokenizer's, see `predict.pairs.prefix_token`.
            max_length: tokens of a window; None takes the model's length.
            batch_size: windows that run together on a replica; None takes ``inference.batch_size``.

        Raises:
            ValueError: no prefix or length can be had, or see `score`.
            FloatingPointError: see `score`.
        """
        prefix, max_length = rolling_bounds(self.tokenizer, self._model_config, prefix, max_length)
        decode = self._scoring_decode(None)
        return score_rolling(decode, texts, prefix, max_length, self._scoring_batch(batch_size))

    def _scoring_batch(self, batch_size: int | None) -> int:
        options = inference_options(self.config, None, None, None, batch_size)
        return options.batch_size * num_replicas(self._context)

    def _scoring_decode(self, share_prefix: bool | None) -> Decode:
        self._validate_pp_inference()
        self._load_inference_checkpoint()
        stats = GenerationStats()
        share = self.config.predict.share_prefix if share_prefix is None else share_prefix
        decode = scoring_decode(self.model, stats, share, self.config.generation.prefill_chunk_size)
        return decode_together(decode, self.model, self._context, self._watch.answering(stats), exchange=LIKELIHOODS)

    @property
    def _model_config(self) -> Any:
        return getattr(self.model, "config", None)

    def save_checkpoint(self, save_path: str | os.PathLike[str] | None = None, only: bool = False) -> Path:
        """Saves the weights of the moment, and in training the optimizer's state, in the layout of this job.

        Every process of the job calls it and writes what it holds; the folder loads in any layout, on any number of
        processes. ``config.json`` and the tokenizer go beside it. A predicting Trainer saves under the step of the
        checkpoint that it has loaded, 0 if that has none.

        Args:
            save_path: root folder, which all processes share; None takes ``checkpoint.save_path``.
            only: this is to be the only checkpoint of the folder: once it is complete, all others there are removed,
                whichever run they are of.

        Returns:
            The iteration folder.

        Raises:
            ValueError: the folder holds checkpoints of another run.
            OSError: a process cannot write; raised on all of them.
        """
        section = self.config.checkpoint
        root = section.save_folder() if save_path is None else Path(save_path)
        self._load_inference_checkpoint()
        own_root = self._run is not None and section.enable_save and root == section.save_folder()
        with failing_together(self._context):
            if root not in self._saved_to and not own_root and not only:
                check_no_other_run(root, None)
            step, common = self.state.global_step, self.state.to_common()
            tokenizer = tokenizer_folder(self.config)
            if self.is_inference:
                step, tokenizer = saved_step(section.load_path), checkpoint_model_files(self.config)
                common = {"global_step": step}
        optimizer = None if self._run is None or section.no_save_optim else self._run.optimizer
        folder = write_checkpoint(self.model, self._context, root, step, common, section, optimizer)
        write_description(self._context, root, described_by(self.model), tokenizer)
        self._saved_to.add(root)
        if only:
            with failing_together(self._context):
                if self._context.rank == 0:
                    keep_only(folder)
        logger.info("saved %s", folder)
        return folder

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

    def _validate_pp_inference(self) -> None:
        """Refuses pipeline options that have no meaning without a backward pass.

        Raises:
            NotImplementedError: names the option.
        """
        check_pipeline_options(self.config)

    def _load_inference_checkpoint(self) -> None:
        """Fills the model from ``checkpoint.load_path``, once."""
        if self._weights_loaded:
            return
        with self._watch.waiting("loading the checkpoint", "start_timeout"), failing_together(self._context):
            world = self._context.world
            section = self.config.checkpoint
            load_model_weights(self.model, section.load_path, (world.rank, world.size), section.weight_dtype)
        self._weights_loaded = True

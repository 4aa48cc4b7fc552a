"""What prediction adds to the Trainer: the tokenizer, the options of decoding, and the way from records to answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from mindformers_ext.config import TrainConfig
from mindformers_ext.generate import GenerationConfig, GenerationStats, generate_rows, run_idle
from mindformers_ext.generate.configuration import DEFAULT_MAX_NEW_TOKENS
from mindformers_ext.generate.refill import RefilledBatch
from mindformers_ext.models import TransformerConfig
from mindformers_ext.parallel.groups import ParallelContext, single
from mindformers_ext.predict import Completion, Decode, Record, RunResult, Tokenizer, run_generation
from mindformers_ext.predict.metrics import Latencies
from mindformers_ext.trainer.decoding import Resolved, resolve_generation
from mindformers_ext.trainer.model import checkpoint_model_files, resolve_model_config
from mindformers_ext.trainer.refilling import Refilling, as_completion
from mindformers_ext.trainer.replicas import shared_decode

Watch = Callable[[Sequence[int]], AbstractContextManager[None]]

__all__ = [
    "Resolved",
    "Watch",
    "build_inference_tokenizer",
    "configure_inference",
    "generate_batch",
    "generate_from_records",
    "resolve_generation",
    "without_unnamed_tokens",
]


def configure_inference(config: TrainConfig) -> TransformerConfig:
    """Returns the model that predicts, as the ``model`` section and ``config.json`` describe it.

    Layers of multi-token prediction are cut, whatever the keys are called that give their number and options.

    Raises:
        ValueError: ``run_mode`` is not ``predict``, or see `resolve_model_config`.
    """
    if config.run_mode != "predict":
        raise ValueError(f"run_mode: prediction needs predict, not {config.run_mode!r}")
    return resolve_model_config(config)


def build_inference_tokenizer(config: TrainConfig) -> Tokenizer:
    """Reads the tokenizer that lies beside the weights.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
        ValueError: its files are damaged.
    """
    return Tokenizer.from_folder(checkpoint_model_files(config))


def without_unnamed_tokens(config: GenerationConfig, tokenizer: Tokenizer, vocab_size: int) -> GenerationConfig:
    """Returns options under which no id beyond the tokenizer's vocabulary is chosen."""
    unnamed = range(tokenizer.vocab_size, vocab_size)
    if not unnamed:
        return config
    return config.updated(suppress_tokens=[*(config.suppress_tokens or []), *unnamed])


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stats: GenerationStats,
    record_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    before_forward: Callable[[], None] | None = None,
) -> list[Completion]:
    """Answers one batch of tokenised prompts, with ``config.num_return_sequences`` completions for each.

    Args:
        model: meets the contract of `mindformers_ext.generate.generate`.
        prompts: token ids of each.
        config: options of decoding.
        stats: is added to.
        record_ids: index of each prompt's record; None counts from 0.
        tokenizer: needed for stop strings.
        before_forward: is called before each forward; what it raises ends the batch.
    """

    rows = generate_rows(
        model,
        prompts,
        config,
        stats,
        record_ids=record_ids,
        decode=None if tokenizer is None else partial(tokenizer.decode_new, skip_special_tokens=False),
        before_forward=before_forward,
    )
    return [as_completion(row) for row in rows]


def generate_from_records(
    model: Any,
    tokenizer: Tokenizer,
    records: Iterable[Record],
    config: GenerationConfig,
    stats: GenerationStats,
    context: ParallelContext | None = None,
    watch: Watch | None = None,
    batch_size: int = 1,
    latencies: Latencies | None = None,
    step_check: Callable[[], Callable[[], None]] | None = None,
    refill: bool = False,
    **options: Any,
) -> RunResult:
    """Answers records in batches, which the replicas of a job share.

    Args:
        model: meets the contract of `mindformers_ext.generate.generate`.
        tokenizer: makes ids of prompts and text of new ids.
        records: see `mindformers_ext.predict.normalize_input`.
        config: options of decoding.
        stats: is added to.
        context: the place of this process; None for a job of one.
        watch: given the indices of a batch's records, returns what is around the answering of it.
        batch_size: prompts in one batch of a replica.
        latencies: is added to.
        step_check: gives for each batch what is called before each of its forwards.
        refill: whether a record that is done is replaced by the next one at once; `refill_obstacle` must give None.
        **options: further arguments of `mindformers_ext.predict.run_generation`.
    """

    def decode_here(prompts: list[list[int]], indices: list[int]) -> list[Completion]:
        check = None if step_check is None else step_check()
        return generate_batch(model, prompts, config, stats, indices, tokenizer, check)

    decode: Decode = decode_here
    replicas = 1 if context is None else context.dp.size
    if context is not None and context.world.size > 1:
        idle = partial(run_idle, model)
        decode = shared_decode(decode_here, context, config.num_return_sequences, idle)

    def watching(indices: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext() if watch is None else watch(indices)

    def watched(prompts: list[list[int]], indices: list[int]) -> list[Completion]:
        with watching(indices):
            return decode(prompts, indices)

    refilling = None
    if refill:
        text_of = partial(tokenizer.decode_new, skip_special_tokens=False)
        batch = RefilledBatch(model, config, batch_size, stats, text_of, step_check)
        refilling = Refilling(batch, single() if context is None else context, batch_size, watching, latencies)

    return run_generation(
        records,
        tokenizer,
        watched if latencies is None else latencies.timed(watched),
        batch_size=batch_size * replicas,
        max_new_tokens=config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        num_sequences=config.num_return_sequences,
        refill=refilling,
        **options,
    )

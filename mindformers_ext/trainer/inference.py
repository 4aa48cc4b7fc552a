"""What prediction adds to the Trainer: the tokenizer, the options of decoding, and the way from records to answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

from mindformers_ext.config import TrainConfig
from mindformers_ext.generate import (
    GenerationConfig,
    GenerationStats,
    PrefixCache,
    generate_rows,
    lookup_obstacle,
    run_idle,
    sharing_obstacle,
)
from mindformers_ext.generate.configuration import DEFAULT_MAX_NEW_TOKENS
from mindformers_ext.generate.refill import RefilledBatch
from mindformers_ext.models import TransformerConfig
from mindformers_ext.parallel.groups import ParallelContext, single
from mindformers_ext.predict import Completion, Decode, Record, RunResult, Tokenizer, run_generation
from mindformers_ext.predict.metrics import Latencies
from mindformers_ext.predict.run import run_records
from mindformers_ext.predict.scoring import ScoringTask
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.decoding import Resolved, resolve_generation
from mindformers_ext.trainer.model import checkpoint_model_files, resolve_model_config
from mindformers_ext.trainer.refilling import Refilling, as_completion
from mindformers_ext.trainer.replicas import COMPLETIONS, Exchange, shared_decode
from mindformers_ext.trainer.scoring import LIKELIHOODS, scoring_decode

Watch = Callable[[Sequence[int]], AbstractContextManager[None]]

__all__ = [
    "Resolved",
    "Watch",
    "build_inference_tokenizer",
    "check_lookup",
    "configure_inference",
    "decode_together",
    "generate_batch",
    "generate_from_records",
    "num_replicas",
    "prefix_cache",
    "resolve_generation",
    "score_from_records",
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


def check_lookup(model: Any, config: GenerationConfig, batch_size: int) -> None:
    """Refuses prompt lookup where the model or the layout cannot do it.

    Raises:
        ValueError: says why, and what would be right.
    """
    if config.prompt_lookup_num_tokens is None:
        return
    obstacle = lookup_obstacle(model, batch_size * config.num_return_sequences)
    if obstacle is not None:
        raise ValueError(f"generation.prompt_lookup_num_tokens: {obstacle}")


def prefix_cache(
    wanted: bool | Literal["auto"], model: Any, config: GenerationConfig, stats: GenerationStats
) -> PrefixCache | None:
    """Returns what shares the common beginnings of a run's prompts, None where they are computed as a whole.

    Args:
        wanted: ``predict.share_prefix``; true logs why it cannot be.
        model: of the run.
        config: options of decoding.
        stats: is added to.
    """
    if wanted is False:
        return None
    obstacle = sharing_obstacle(model, config.use_cache)
    if obstacle is None:
        return PrefixCache(model, stats)
    if wanted is True:
        logger.warning("predict.share_prefix: every prompt is computed as a whole: %s", obstacle)
    return None


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stats: GenerationStats,
    record_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    before_forward: Callable[[], None] | None = None,
    prefixes: PrefixCache | None = None,
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
        prefixes: shares the common beginning of the prompts; None computes each of them as a whole.
    """

    rows = generate_rows(
        model,
        prompts,
        config,
        stats,
        record_ids=record_ids,
        decode=None if tokenizer is None else partial(tokenizer.decode_new, skip_special_tokens=False),
        before_forward=before_forward,
        prefixes=prefixes,
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
    prefixes: PrefixCache | None = None,
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
        prefixes: see `generate_batch`.
        **options: further arguments of `mindformers_ext.predict.run_generation`.
    """

    def decode_here(prompts: list[list[int]], indices: list[int]) -> list[Completion]:
        check = None if step_check is None else step_check()
        return generate_batch(model, prompts, config, stats, indices, tokenizer, check, prefixes)

    def watching(indices: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext() if watch is None else watch(indices)

    refilling = None
    if refill:
        text_of = partial(tokenizer.decode_new, skip_special_tokens=False)
        batch = RefilledBatch(model, config, batch_size, stats, text_of, step_check, prefixes)
        refilling = Refilling(batch, single() if context is None else context, batch_size, watching, latencies)

    return run_generation(
        records,
        tokenizer,
        decode_together(decode_here, model, context, watch, latencies, config.num_return_sequences),
        batch_size=batch_size * num_replicas(context),
        max_new_tokens=config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        num_sequences=config.num_return_sequences,
        refill=refilling,
        **options,
    )


def score_from_records(
    model: Any,
    task: ScoringTask,
    records: Iterable[Record],
    stats: GenerationStats,
    share_prefix: bool | Literal["auto"],
    chunk_size: int,
    context: ParallelContext | None = None,
    watch: Watch | None = None,
    batch_size: int = 1,
    latencies: Latencies | None = None,
    step_check: Callable[[], Callable[[], None]] | None = None,
    **options: Any,
) -> RunResult:
    """Scores records in batches, which the replicas of a job share.

    Args:
        model: see `generate_from_records`, as what is not named here.
        task: what is scored.
        records: see there.
        stats: see there.
        share_prefix: see `scoring.shares_contexts`.
        chunk_size: see there.
        context: see `generate_from_records`.
        watch: see there.
        batch_size: see there.
        latencies: see there.
        step_check: see there.
        **options: further arguments of `mindformers_ext.predict.run.run_records`.
    """
    decode = scoring_decode(model, stats, share_prefix, chunk_size, step_check)
    return run_records(
        records,
        task,
        decode_together(decode, model, context, watch, latencies, exchange=LIKELIHOODS),
        batch_size=batch_size * num_replicas(context),
        **options,
    )


def num_replicas(context: ParallelContext | None) -> int:
    """Returns how many replicas of the model share the records."""
    return 1 if context is None else context.dp.size


def decode_together(
    decode: Decode,
    model: Any,
    context: ParallelContext | None = None,
    watch: Watch | None = None,
    latencies: Latencies | None = None,
    num_sequences: int = 1,
    exchange: Exchange = COMPLETIONS,
) -> Decode:
    """Returns a function that answers a batch on all ranks of a job, watched and timed.

    Args:
        decode: answers the prompts of this rank's replica.
        model: what it runs.
        context: see `generate_from_records`, as the rest.
        watch: see there.
        latencies: see there.
        num_sequences: answers to a prompt.
        exchange: what prompts and answers are.
    """
    shared = decode
    if context is not None and context.world.size > 1:
        shared = shared_decode(decode, context, num_sequences, partial(run_idle, model), exchange)

    def watched(prompts: list[Any], indices: list[int]) -> list[Any]:
        with watch(indices) if watch is not None else nullcontext():
            return shared(prompts, indices)

    return watched if latencies is None else latencies.timed(watched)

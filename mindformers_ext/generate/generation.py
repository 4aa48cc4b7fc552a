"""``generate()``: token ids in, token ids out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindformers_ext.generate.beam_search import search_beams
from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.generate.lookup import DraftForward, choose_drafted_tokens, lookup_obstacle
from mindformers_ext.generate.model_call import ModelCall, layout_of, limits_of
from mindformers_ext.generate.noise import fresh_seed
from mindformers_ext.generate.prefix import PrefixCache
from mindformers_ext.generate.rows import GeneratedRow, Rows
from mindformers_ext.generate.stats import GenerationStats
from mindformers_ext.generate.stepwise import Loop, choose_tokens
from mindformers_ext.generate.stopping import DecodeNew, Stopping
from mindformers_ext.generate.streamers import Streamer
from mindformers_ext.generate.utils import left_pad, right_pad
from mindformers_ext.runtime import logger

# Alternatives that the rows of one generation may have; each becomes a pair of Python objects.
MOST_ALTERNATIVES = 1 << 24


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns when ``return_dict_in_generate`` is set.

    Attributes:
        sequences: int32 ``[B * num_return_sequences, longest]``: real prompt, new tokens, pads.
        sequences_scores: float32 ``[B * num_return_sequences]`` of beams, best first; None otherwise.
        rows: what each row got: reasons, stop strings and, if asked for, log-probabilities.
        scores: with output_scores the scores after the processors of each step, float32
            ``[B * num_return_sequences, V]``; nan for a row that was finished by then. None otherwise.
    """

    sequences: Tensor
    sequences_scores: Tensor | None
    rows: list[GeneratedRow]
    scores: list[np.ndarray] | None = None


def generate(
    model: Any,
    input_ids: Tensor,
    generation_config: GenerationConfig | None = None,
    attention_mask: Tensor | None = None,
    *,
    decode: DecodeNew | None = None,
    streamer: Streamer | None = None,
) -> Tensor | GenerateOutput:
    """Extends each row of a batch.

    Args:
        model: any Cell that meets the contract of `ModelCall`; it is put into evaluation for the call.
        input_ids: integers ``[B, S]``, padded on the left.
        generation_config: options; None takes the defaults.
        attention_mask: ``[B, S]``, 1 for a real token and 0 for a pad; None means that there are no pads.
        decode: ``(prompt ids, new ids) -> text of the new ids``; needed for stop strings.
        streamer: is given the prompts and then each step's tokens.

    Returns:
        int32 ``[B * num_return_sequences, longest]``: the row's real prompt, its new tokens, then pads; the sequences
        of a prompt follow each other. A `GenerateOutput` if ``return_dict_in_generate`` is set.

    Raises:
        ValueError: shapes do not fit, a row without a token, pads that are not on the left, options that contradict
            each other, or, where the model has a ``config`` with ``vocab_size`` and ``seq_length``, ids or lengths
            beyond these.
        FloatingPointError: a row has no finite score to choose a token by.
    """
    config = generation_config or GenerationConfig()
    prompts = _prompts(input_ids, attention_mask)
    step_scores: list[np.ndarray] | None = [] if config.output_scores and config.return_dict_in_generate else None
    answers = generate_rows(model, prompts, config, decode=decode, streamer=streamer, step_scores=step_scores)
    rows = [prompts[i // config.num_return_sequences] + answer.token_ids for i, answer in enumerate(answers)]
    sequences = Tensor.from_numpy(right_pad(rows, config.filler))
    if not config.return_dict_in_generate:
        return sequences
    scores = None
    if config.num_beams > 1:
        scores = Tensor.from_numpy(np.array([answer.score for answer in answers], np.float32))
    return GenerateOutput(sequences, scores, answers, step_scores)


def generate_rows(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stats: GenerationStats | None = None,
    *,
    record_ids: Sequence[int] | None = None,
    decode: DecodeNew | None = None,
    streamer: Streamer | None = None,
    step_scores: list[np.ndarray] | None = None,
    before_forward: Callable[[], None] | None = None,
    prefixes: PrefixCache | None = None,
) -> list[GeneratedRow]:
    """Extends each prompt; an answer does not depend on the other prompts of the batch.

    Args:
        model: see `generate`.
        prompts: token ids of each row, none empty.
        config: options.
        stats: is added to.
        record_ids: index of each prompt's record, which sampling draws its noise from; None counts from 0.
        decode: see `generate`.
        streamer: see `generate`.
        step_scores: see `Loop`.
        before_forward: is called before each forward; what it raises ends the call.
        prefixes: shares the common beginning of the prompts; None computes each prompt as a whole.

    Returns:
        ``config.num_return_sequences`` rows for each prompt, one prompt after the other.

    Raises:
        ValueError: see `generate`.
        FloatingPointError: see `generate`.
    """
    stats = GenerationStats() if stats is None else stats
    config = with_one_seed(config, model)
    stopping = Stopping(config, decode, layout_of(model).unit.any)
    rows = Rows(prompts, range(len(prompts)) if record_ids is None else record_ids, row_budgets(prompts, config))
    check_limits(model, prompts, rows.budgets)
    _check_together(model, config, len(rows), streamer, step_scores)
    _check_log_probabilities(config, rows)
    try:
        if streamer is not None:
            streamer.put(left_pad(prompts, config.filler)[0])
        with ms._no_grad(), evaluating(model):
            forward = _new_forward(config)(
                ModelCall(model, before_forward),
                prompts,
                int(rows.budgets.max()),
                config.use_cache,
                config.prefill_chunk_size,
                fill=None if prefixes is None else prefixes.fill,
            )
            try:
                answers = _decoded(forward, rows, Loop(config, stopping, stats, streamer, step_scores))
                forward.finish()
                return answers
            except Exception:
                if prefixes is not None:
                    prefixes.clear()  # it may be memory that is short
                raise
            finally:
                forward.close()
                stats.add_forwards(forward.num_forwards, forward.cache_bytes)
    finally:
        if streamer is not None:
            streamer.end()


def with_one_seed(config: GenerationConfig, model: Any) -> GenerationConfig:
    """Returns a configuration, or where it samples without a seed a copy with a fresh one.

    All processes that hold a part of the model choose with the same one: they have to go on with the same tokens.
    """
    if not config.do_sample or config.seed is not None:
        return config
    seeded = copy.copy(config)  # nothing is to be checked or warned of again
    seeded.seed = int(layout_of(model).unit.all_gather_object(fresh_seed())[0])
    logger.info("seed of sampling: %d", seeded.seed)
    return seeded


@contextmanager
def evaluating(model: nn.Cell) -> Iterator[None]:
    """Puts a model into evaluation, and each of its cells back into what it was.

    `Cell.set_train` changes three attributes of a cell: ``training``, its copy among the flags, and the phase.
    """
    before = [
        (cell, cell.training, dict(getattr(cell, "_func_graph_flags", {})), cell._phase)
        for _, cell in model.cells_and_names()
    ]
    model.set_train(False)
    try:
        yield
    finally:
        for cell, training, flags, phase in before:
            cell.training, cell._func_graph_flags, cell._phase = training, flags, phase


def num_alternatives(budgets: Sequence[int], config: GenerationConfig) -> int:
    """How many alternatives to tokens rows with these budgets may have."""
    return sum(budgets) * config.num_return_sequences * (config.output_logprobs or 0)


def _new_forward(config: GenerationConfig) -> Callable[..., BatchForward]:
    drafts = config.prompt_lookup_num_tokens
    return BatchForward if drafts is None else partial(DraftForward, num_drafts=drafts)


def _decoded(forward: BatchForward, rows: Rows, loop: Loop) -> list[GeneratedRow]:
    """The answers of a batch, by the loop that the options ask for."""
    if loop.config.num_beams > 1:
        return search_beams(forward, rows, loop.config, loop.stopping, loop.stats)
    if isinstance(forward, DraftForward):
        return choose_drafted_tokens(forward, rows, loop)
    return choose_tokens(forward, rows, loop)


def _check_together(
    model: Any,
    config: GenerationConfig,
    num_prompts: int,
    streamer: Streamer | None,
    step_scores: list[np.ndarray] | None,
) -> None:
    """Refuses options that this model, or so many prompts, cannot have together."""
    if config.num_beams > 1 and streamer is not None:
        raise ValueError("a streamer cannot be used with num_beams > 1: beams are not final before the end")
    if config.num_beams > 1 and step_scores is not None:
        raise ValueError("output_scores cannot be used with num_beams > 1; use output_logprobs")
    if config.prompt_lookup_num_tokens is None:
        return
    num_rows = num_prompts * config.num_return_sequences
    obstacle = lookup_obstacle(model, num_rows)
    if obstacle is not None:
        raise ValueError(f"prompt_lookup_num_tokens: {obstacle}")
    if streamer is not None and num_rows > 1:
        raise ValueError(
            f"a streamer cannot be used with prompt_lookup_num_tokens and {num_rows} rows, which get tokens at their "
            "own pace; give one prompt"
        )


def _check_log_probabilities(config: GenerationConfig, rows: Rows) -> None:
    count = num_alternatives(rows.budgets.tolist(), config)
    if count > MOST_ALTERNATIVES:
        raise ValueError(
            f"output_logprobs {config.output_logprobs} for {len(rows)} prompts of up to {int(rows.budgets.max())} new "
            f"tokens may be {count:,} values, more than {MOST_ALTERNATIVES:,}; lower it, max_new_tokens or the batch "
            "size"
        )


def row_budgets(prompts: Sequence[Sequence[int]], config: GenerationConfig) -> list[int]:
    budgets = [config.row_budget(len(prompt)) for prompt in prompts]
    full = [row for row, budget in enumerate(budgets) if budget < 1]
    if full:
        raise ValueError(
            f"max_length {config.max_length} leaves no room for a new token after the prompts of rows {full}"
        )
    return budgets


def check_limits(model: Any, prompts: Sequence[Sequence[int]], budgets: np.ndarray) -> None:
    """Refuses ids that the model does not have and rows that would grow beyond its length, if its config tells."""
    vocab_size, seq_length = limits_of(model)
    for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        smallest, largest = min(prompt, default=0), max(prompt, default=0)
        if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
            allowed = f"0 to {vocab_size - 1}" if vocab_size is not None else "0 and above"
            raise ValueError(
                f"row {row} has token id {smallest if smallest < 0 else largest}; the model's ids are {allowed}"
            )
        if seq_length is not None and seq_length < len(prompt) + budget:
            raise ValueError(
                f"row {row}: {len(prompt)} prompt tokens + {budget} new tokens exceed the model's length {seq_length}; "
                "set max_new_tokens or max_length"
            )


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    ids = input_ids.asnumpy()
    if ids.ndim != 2 or not ids.size:
        raise ValueError(f"input_ids must be of shape [batch, length] with at least one token, not {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"input_ids must be integers, not {ids.dtype}")
    if attention_mask is None:
        return ids.tolist()
    mask = attention_mask.asnumpy() != 0
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {mask.shape}, input_ids {ids.shape}")
    if not mask.any(axis=1).all():
        raise ValueError(f"attention_mask leaves no token in rows {np.flatnonzero(~mask.any(axis=1)).tolist()}")
    if (np.diff(mask.astype(np.int8), axis=1) < 0).any():
        raise ValueError("attention_mask has pads after real tokens; generate() needs batches padded on the left")
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]

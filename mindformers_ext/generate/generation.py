"""``generate()``: token ids in, token ids out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.generate.sampler import greedy_sample
from mindformers_ext.generate.utils import GenerationConfig


@dataclass
class GenerationStats:
    """Time and tokens of one or more generations, prompts and answers apart; seconds."""

    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0


@dataclass(frozen=True)
class GeneratedRow:
    """What one row got.

    Attributes:
        token_ids: new tokens only; an EOS that ended the row is the last of them.
        finish_reason: ``eos`` or ``length``.
    """

    token_ids: list[int]
    finish_reason: Literal["eos", "length"]


def generate(
    model: Any,
    input_ids: Tensor,
    generation_config: GenerationConfig | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Extends each row of a batch.

    Args:
        model: any Cell that meets the contract of `BatchForward`; it is put into evaluation for the call.
        input_ids: integers ``[B, S]``, padded on the left.
        generation_config: options; None takes the defaults.
        attention_mask: ``[B, S]``, 1 for a real token and 0 for a pad; None means that there are no pads.

    Returns:
        int32 ``[B, longest]``: the row's real prompt, its new tokens, then pads.

    Raises:
        ValueError: shapes do not fit, a row without a token, or pads that are not on the left.
    """
    config = generation_config or GenerationConfig()
    prompts = _prompts(input_ids, attention_mask)
    rows = [prompt + row.token_ids for prompt, row in zip(prompts, generate_rows(model, prompts, config), strict=True)]
    result = np.full((len(rows), max(map(len, rows))), config.filler, np.int32)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return Tensor.from_numpy(result)


def generate_rows(
    model: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig, stats: GenerationStats | None = None
) -> list[GeneratedRow]:
    """Extends each prompt; an answer does not depend on the other prompts of the batch.

    Args:
        model: see `generate`.
        prompts: token ids of each row, none empty.
        config: options.
        stats: is added to.

    Raises:
        FloatingPointError: the model gave no finite score for a row.
    """
    stats = GenerationStats() if stats is None else stats
    training = bool(getattr(model, "training", False))
    model.set_train(False)
    try:
        with ms._no_grad():
            return _decode(model, prompts, config, stats)
    finally:
        model.set_train(training)


def _decode(
    model: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig, stats: GenerationStats
) -> list[GeneratedRow]:
    tokens: list[list[int]] = [[] for _ in prompts]
    reasons: list[Literal["eos", "length"]] = ["length"] * len(prompts)
    eos = np.array(config.eos_token_ids, np.int64)
    alive = np.arange(len(prompts))  # rows of the batch that the forward still holds ...
    running = np.ones(len(prompts), bool)  # ... and which of those are not finished
    batch = BatchForward(model, prompts, config.max_new_tokens, config.use_cache, config.prefill_chunk_size)
    try:
        started = time.perf_counter()
        scores = batch.prefill()
        stats.prefill_seconds += time.perf_counter() - started
        stats.prefill_tokens += sum(map(len, prompts))
        for step in range(config.max_new_tokens):
            started = time.perf_counter()
            chosen = greedy_sample(scores)
            for row in np.flatnonzero(running):
                tokens[alive[row]].append(int(chosen[row]))
            stats.decode_tokens += int(running.sum())
            ended = running & np.isin(chosen, eos)
            for row in np.flatnonzero(ended):
                reasons[alive[row]] = "eos"
            running &= ~ended
            if not running.any() or step + 1 == config.max_new_tokens:
                break
            if 2 * running.sum() <= len(running):
                kept = np.flatnonzero(running)
                batch.keep(kept)
                alive, chosen, running = alive[kept], chosen[kept], running[kept]
            scores = batch.step(chosen)
            stats.decode_seconds += time.perf_counter() - started
    finally:
        batch.close()
    return [GeneratedRow(row, reason) for row, reason in zip(tokens, reasons, strict=True)]


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    ids = input_ids.asnumpy()
    if ids.ndim != 2 or not ids.size:
        raise ValueError(f"input_ids must be of shape [batch, length] with at least one token, not {ids.shape}")
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

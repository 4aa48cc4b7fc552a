"""Log-probabilities of given continuations: token ids in, numbers out.

Where several continuations follow the same context, its cache is filled once and its rows are copied, and the
continuations run over the copies. Otherwise each context is read together with its continuation, in one forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np

from mindformers_ext import ops
from mindformers_ext.generate.gathering import Logits, from_last_stage
from mindformers_ext.generate.generation import evaluating
from mindformers_ext.generate.kv_cache import KVCache
from mindformers_ext.generate.model_call import ModelCall, Outputs, limits_of, pads_obstacle
from mindformers_ext.generate.stats import GenerationStats
from mindformers_ext.generate.utils import left_pad, right_pad
from mindformers_ext.ops.token_scores import BEST, HIGHEST, SUM, TARGET

# Ids of a context, and those of a continuation of it, neither of them empty.
Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]

# Continuations of one context that run at the same time: each needs a copy of the context's cache.
_ROWS_A_CONTEXT = 4
_NOT_ASKED = -100
# Rows of a foreign model's logits that are copied at the same time.
_FOREIGN_ROWS = 64


@dataclass(frozen=True)
class Likelihood:
    """What a model says of a continuation.

    Attributes:
        token_logprobs: natural logarithm of the probability of each token, given the context and the tokens before it.
        is_greedy: whether each of the tokens is the most likely one at its place (of equal ones the lowest id).
    """

    token_logprobs: list[float]
    is_greedy: bool

    @cached_property
    def total(self) -> float:
        """The log-likelihood of the continuation."""
        return math.fsum(self.token_logprobs)


def score_groups(
    model: Any,
    groups: Sequence[Sequence[Pair]],
    stats: GenerationStats | None = None,
    *,
    share_prefix: bool = True,
    chunk_size: int = 512,
    before_forward: Callable[[], None] | None = None,
) -> list[list[Likelihood]]:
    """Returns the likelihood of every continuation; it does not depend on the others of the batch.

    Args:
        model: meets the contract of `mindformers_ext.generate.generate`; logits of all positions, or a parameter
            ``score_targets``, see `GPTModel.construct`.
        groups: what belongs together, such as the choices of one question. So many contexts as there are groups are
            run at the same time.
        stats: is added to.
        share_prefix: run equal contexts once.
        chunk_size: most tokens of a row in one forward.
        before_forward: is called before each forward; what it raises ends the call.

    Raises:
        ValueError: an empty context or continuation, an id that the model does not have, or a pair whose tokens but
            the last do not fit into the model's length.
        FloatingPointError: the probability of a token is no finite number.
    """
    pairs = [pair for group in groups for pair in group]
    check_pairs(model, pairs)
    found: dict[int, Likelihood] = {}
    with ms._no_grad(), evaluating(model):
        call = ModelCall(model, before_forward)
        forwards = _Forwards(call, chunk_size, GenerationStats() if stats is None else stats)
        for chosen in _batches(pairs, len(groups)):
            part = [pairs[index] for index in chosen]
            is_shared = share_prefix and len({_context_of(pairs, number) for number in chosen}) < len(part)
            scores = _read_once(forwards, part) if is_shared else None
            if scores is None:
                scores = _read_together(forwards, part, _ROWS_A_CONTEXT * len(groups))
            found |= zip(chosen, _likelihoods(forwards.joined(scores), part), strict=True)
        call.finish()
    scored = iter([found[index] for index in range(len(pairs))])
    return [[next(scored) for _ in group] for group in groups]


def check_pairs(model: Any, pairs: Sequence[Pair]) -> None:
    """Refuses pairs that a model cannot score.

    Raises:
        ValueError: see `score_groups`; names the first one by its number.
    """
    vocab_size, seq_length = limits_of(model)
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise ValueError(f"pair {number} has an empty {'context' if not len(context) else 'continuation'}")
        ids = [*context, *continuation]
        if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"pair {number} has token id {wrong}, which the model does not have")
        if seq_length is not None and seq_length < len(ids) - 1:
            raise ValueError(
                f"pair {number}: {len(context)} tokens of context + {len(continuation)} of the continuation, of which "
                f"the last is not read, exceed the model's length {seq_length}"
            )


def _context_of(pairs: Sequence[Pair], number: int) -> tuple[int, ...]:
    """What is equal for pairs that share a context; one of a single token, a prefix, is nothing to share."""
    context = pairs[number][0]
    return tuple(context) if len(context) > 1 else (number,)


def _batches(pairs: Sequence[Pair], num_contexts: int) -> list[list[int]]:
    """Numbers of the pairs that run at the same time: those of up to ``num_contexts`` different contexts."""
    by_context: dict[tuple[int, ...], list[int]] = {}
    for number in range(len(pairs)):
        by_context.setdefault(_context_of(pairs, number), []).append(number)
    numbers = list(by_context.values())
    return [
        [number for some in numbers[start : start + num_contexts] for number in some]
        for start in range(0, len(numbers), num_contexts)
    ]


def _read_together(forwards: _Forwards, pairs: Sequence[Pair], num_rows: int) -> list[np.ndarray]:
    """Scores of each pair's continuation, float32 ``[n, 4]``; every row is a context and its continuation."""
    takes_pads = pads_obstacle(forwards.call.model) is None
    scores: list[np.ndarray] = []
    for start in range(0, len(pairs), num_rows):
        part = pairs[start : start + num_rows]
        rows = [[*context, *continuation][:-1] for context, continuation in part]
        targets = [continuation for _, continuation in part]
        if takes_pads:
            (ids, mask), asked = left_pad(rows), _aligned(rows, targets, right=True)
        else:
            # What follows a token changes nothing before it.
            ids, asked = right_pad(rows), _aligned(rows, targets, right=False)
            mask = np.ones_like(ids)
        scores += _of_targets(forwards.read(ids, mask, asked), asked)
    return scores


def _read_once(forwards: _Forwards, pairs: Sequence[Pair]) -> list[np.ndarray] | None:
    """Like `_read_together`; every context runs once. None if the model keeps no cache, or reads pads as tokens."""
    contexts = list(dict.fromkeys(tuple(context) for context, _ in pairs))
    row_of = {context: row for row, context in enumerate(contexts)}
    rows = np.array([row_of[tuple(context)] for context, _ in pairs])
    ids, mask = left_pad(contexts)
    if (mask == 0).any() and pads_obstacle(forwards.call.model) is not None:
        return None
    longest = max(len(continuation) for _, continuation in pairs)
    cache = forwards.call.new_cache(len(contexts), ids.shape[1] + longest - 1)
    if cache is None:
        return None
    try:
        logits = forwards.prefill(ids, mask, cache)
        if not forwards.call.keeps_cache:
            return None
        firsts = np.array([continuation[0] for _, continuation in pairs])
        scores = [part[None] for part in forwards.scores_of(logits, firsts, rows)]
        # Rows of like length together; those of one token are done.
        rest = sorted(
            (number for number, (_, continuation) in enumerate(pairs) if len(continuation) > 1),
            key=lambda number: -len(pairs[number][1]),
        )
        for start in range(0, len(rest), _ROWS_A_CONTEXT * len(contexts)):
            chosen = rest[start : start + _ROWS_A_CONTEXT * len(contexts)]
            continuations = [list(pairs[number][1]) for number in chosen]
            read = [one[:-1] for one in continuations]
            ids, asked = right_pad(read), _aligned(read, [one[1:] for one in continuations], right=False)
            copied = cache.copied(rows[chosen])
            try:
                found = forwards.read(ids, np.concatenate((mask[rows[chosen]], np.ones_like(ids)), 1), asked, copied)
            finally:
                copied.clear()
            for number, more in zip(chosen, _of_targets(found, asked), strict=True):
                scores[number] = np.concatenate((scores[number], more))
        return scores
    finally:
        cache.clear()


def _aligned(rows: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], right: bool) -> np.ndarray:
    """The tokens asked for after each row's last ids, int32 ``[B, S]``; ``right``: the rows end together."""
    longest = max(map(len, rows))
    asked = np.full((len(rows), longest), _NOT_ASKED, np.int32)
    for row, (given, wanted) in enumerate(zip(rows, targets, strict=True)):
        end = longest if right else len(given)
        asked[row, end - len(wanted) : end] = wanted
    return asked


def _of_targets(scores: np.ndarray, asked: np.ndarray) -> list[np.ndarray]:
    """Those of scores ``[B, S, 4]`` that were asked for, row by row."""
    return [row[wanted] for row, wanted in zip(scores, asked >= 0, strict=True)]


def _likelihoods(joined: np.ndarray, pairs: Sequence[Pair]) -> list[Likelihood]:
    found = []
    start = 0
    for _, continuation in pairs:
        logprobs, best = joined[start : start + len(continuation)].T
        found.append(Likelihood(logprobs.tolist(), bool((best == np.asarray(continuation)).all())))
        start += len(continuation)
    return found


class _Forwards:
    """Runs a model for the scores of given tokens.

    Args:
        call: runs the model.
        chunk_size: see `score_groups`.
        stats: see there.
    """

    def __init__(self, call: ModelCall, chunk_size: int, stats: GenerationStats) -> None:
        self.call, self._chunk_size, self._stats = call, chunk_size, stats

    def prefill(self, ids: np.ndarray, mask: np.ndarray, cache: KVCache) -> Logits:
        """Fills a cache with rows ``[B, S]`` that are padded on the left.

        Returns:
            Logits that follow the last tokens. Of no use if it turns out that the model keeps no cache.
        """
        length = ids.shape[1]
        for start in range(0, length, self._chunk_size):
            end = min(start + self._chunk_size, length)
            outputs = self._run(ids[:, start:end], mask[:, :end], cache)
            if not self.call.keeps_cache:
                break
        return self.call.last_logits(outputs, len(ids))

    def read(self, ids: np.ndarray, mask: np.ndarray, targets: np.ndarray, cache: KVCache | None = None) -> np.ndarray:
        """Runs rows ``[B, S]`` and returns the scores of their targets, float32 ``[B, S, 4]``.

        Args:
            ids: of the new tokens.
            mask: ``[B, past + S]`` of all tokens, 1 real, 0 pad.
            targets: see `GPTModel.construct`.
            cache: of the tokens before; None if there are none.
        """
        batch, length = ids.shape
        past = mask.shape[1] - length
        step = self._chunk_size if self.call.keeps_cache else length
        own = None
        if cache is None and length > step:
            cache = own = self.call.new_cache(batch, length)
        scores: list[np.ndarray] = []
        try:
            for start in range(0, length, step):
                part = slice(start, start + step)
                outputs = self._run(ids[:, part], mask[:, : past + start + step], cache, targets[:, part])
                if own is not None and not self.call.keeps_cache:
                    return self.read(ids, mask, targets)
                scores.append(self._scores(outputs, targets[:, part]))
        finally:
            if own is not None:
                own.clear()
        return np.concatenate(scores, axis=1)

    def scores_of(self, logits: Logits, targets: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The scores ``[N, 4]`` of targets ``[N]``, each after a row of logits; zeros outside the last stage."""
        if logits.local is None:
            return np.zeros((len(targets), 4), np.float32)
        return ops.token_scores(logits.local, targets, logits.first_id, rows)

    def joined(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        """Log-probabilities and the best ids, float64 ``[N, 2]``, from scores ``[n, 4]`` of several continuations.

        Raises:
            FloatingPointError: on all processes, if one is no finite number.
        """
        parts, layout = np.concatenate(scores), self.call.layout
        is_last = layout.pp.rank == layout.pp.size - 1
        joined = _joined_parts(layout.tp.all_gather(parts)) if is_last else None
        joined = from_last_stage(joined, (len(parts), 2), np.float32, layout.pp, self.call.waiting)
        if not np.isfinite(joined[:, 0]).all():
            raise FloatingPointError("the model gave no finite log-probability for a token of a continuation")
        return joined.astype(np.float64)

    def _run(
        self, ids: np.ndarray, mask: np.ndarray, cache: KVCache | None, targets: np.ndarray | None = None
    ) -> Outputs:
        """One forward of new tokens ``[B, S]``, those before them in ``mask`` ``[B, past + S]`` being in the cache."""
        length, kept = ids.shape[1], 1
        if targets is not None:
            asked = np.flatnonzero((targets >= 0).any(0))
            kept = length - (int(asked[0]) if len(asked) else 0)
        with self._stats.prefill(int(mask[:, -length:].sum())):
            outputs = self.call.run(ids, mask, cache, kept, targets)
        self._stats.add_forwards(1, 0 if cache is None else cache.nbytes)
        if cache and not self.call.keeps_cache:
            name = type(self.call.model).__name__
            raise ValueError(f"{name} returned no past_key_values after it had returned some")
        return outputs

    def _scores(self, outputs: Outputs, targets: np.ndarray) -> np.ndarray:
        """The scores ``[B, S, 4]`` of a forward; zeros where nothing is asked, and outside the last stage."""
        scores = np.zeros((*targets.shape, 4), np.float32)
        if outputs.scores is not None:
            return outputs.scores.asnumpy()
        if outputs.logits is None:
            return scores
        rows, columns = np.nonzero(targets >= 0)
        logits = outputs.logits.asnumpy()
        kept = columns - targets.shape[1] + logits.shape[1]
        for start in range(0, len(rows), _FOREIGN_ROWS):
            part = slice(start, start + _FOREIGN_ROWS)
            chosen = logits[rows[part], kept[part]].astype(np.float32, copy=False)
            scores[rows[part], columns[part]] = ops.token_scores(chosen, targets[rows[part], columns[part]])
        return scores


def _joined_parts(parts: np.ndarray) -> np.ndarray:
    """Log-probability of the target and the best id, float32 ``[N, 2]``, from ``[parts, N, 4]`` of a vocabulary.

    The parts come in the order of their ids, so the first of equal ones has the lowest.
    """
    highest = parts[:, :, HIGHEST].max(axis=0)
    with np.errstate(invalid="ignore"):
        total = (parts[:, :, SUM] * np.exp(parts[:, :, HIGHEST] - highest)).sum(axis=0)
        logprobs = parts[:, :, TARGET].max(axis=0) - highest - np.log(total)
    first = parts[:, :, HIGHEST].argmax(axis=0)
    best = np.take_along_axis(parts[:, :, BEST], first[None], axis=0)[0]
    return np.stack((logprobs, best), axis=1)

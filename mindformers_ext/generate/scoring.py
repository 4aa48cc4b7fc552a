"""Log-probabilities of given continuations: token ids in, numbers out.

Where several continuations follow the same context, its cache is filled once and its rows are copied, and the
continuations run over the copies. Otherwise each context is read together with its continuation, in one forward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.generate.forward import lockstep_of, unpacked
from mindformers_ext.generate.generation import evaluating
from mindformers_ext.generate.kv_cache import KVCache
from mindformers_ext.generate.stats import GenerationStats
from mindformers_ext.generate.utils import _build_combined_mask, build_position_ids, left_pad
from mindformers_ext.ops.token_scores import BEST, HIGHEST, SUM, TARGET
from mindformers_ext.parallel.groups import single

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
        forwards = _Forwards(model, chunk_size, before_forward, GenerationStats() if stats is None else stats)
        for chosen in _batches(pairs, len(groups)):
            part = [pairs[index] for index in chosen]
            is_shared = share_prefix and len({_context_of(pairs, number) for number in chosen}) < len(part)
            scores = _read_once(forwards, part) if is_shared else None
            if scores is None:
                scores = _read_together(forwards, part, _ROWS_A_CONTEXT * len(groups))
            found |= zip(chosen, _likelihoods(forwards.joined(scores), part), strict=True)
        forwards.finish()
    scored = iter([found[index] for index in range(len(pairs))])
    return [[next(scored) for _ in group] for group in groups]


def check_pairs(model: Any, pairs: Sequence[Pair]) -> None:
    """Refuses pairs that a model cannot score.

    Raises:
        ValueError: see `score_groups`; names the first one by its number.
    """
    limits = getattr(model, "config", None)
    vocab_size, seq_length = getattr(limits, "vocab_size", None), getattr(limits, "seq_length", None)
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise ValueError(f"pair {number} has an empty {'context' if not len(context) else 'continuation'}")
        ids = [*context, *continuation]
        if min(ids) < 0 or (isinstance(vocab_size, int) and max(ids) >= vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"pair {number} has token id {wrong}, which the model does not have")
        if isinstance(seq_length, int) and 0 < seq_length < len(ids) - 1:
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
    scores: list[np.ndarray] = []
    for start in range(0, len(pairs), num_rows):
        part = pairs[start : start + num_rows]
        rows = [[*context, *continuation][:-1] for context, continuation in part]
        targets = [continuation for _, continuation in part]
        if forwards.takes_pads:
            (ids, mask), asked = left_pad(rows), _aligned(rows, targets, right=True)
        else:
            ids, asked = _filled(rows), _aligned(rows, targets, right=False)
            mask = np.ones_like(ids)
        scores += _of_targets(forwards.read(ids, mask, asked), asked)
    return scores


def _read_once(forwards: _Forwards, pairs: Sequence[Pair]) -> list[np.ndarray] | None:
    """Like `_read_together`; every context runs once. None if the model keeps no cache."""
    contexts = list(dict.fromkeys(tuple(context) for context, _ in pairs))
    row_of = {context: row for row, context in enumerate(contexts)}
    rows = np.array([row_of[tuple(context)] for context, _ in pairs])
    ids, mask = left_pad(contexts)
    longest = max(len(continuation) for _, continuation in pairs)
    cache = forwards.new_cache(len(contexts), ids.shape[1] + longest - 1)
    if cache is None:
        return None
    try:
        logits = forwards.prefill(ids, mask, cache)
        if not forwards.keeps_cache:
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
            ids, asked = _filled(read), _aligned(read, [one[1:] for one in continuations], right=False)
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


def _filled(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Ids int32 ``[B, S]``, filled up on the right: what follows a token changes nothing before it."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, given in enumerate(rows):
        ids[row, : len(given)] = given
    return ids


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
        model: see `score_groups`, as the rest.
        chunk_size: see there.
        before_forward: see there.
        stats: see there.

    Attributes:
        keeps_cache: whether the model returns a cache, as far as is known.
        takes_pads: whether rows may be padded on the left.
    """

    def __init__(
        self, model: Any, chunk_size: int, before_forward: Callable[[], None] | None, stats: GenerationStats
    ) -> None:
        self._model, self._chunk_size, self._before_forward, self._stats = model, chunk_size, before_forward, stats
        shard = getattr(model, "model_shard", None)
        self._layout = single() if shard is None else shard.context
        runtime = getattr(model, "runtime", None)
        self._waiting = nullcontext if runtime is None else runtime.waiting
        self._accepts = set(inspect.signature(model.construct).parameters)
        self._in_place = hasattr(model, "new_cache")
        self._lockstep = lockstep_of(model)
        self.keeps_cache = "past_key_values" in self._accepts
        self.takes_pads = {"attention_mask", "position_ids"} <= self._accepts

    def new_cache(self, num_rows: int, length: int) -> KVCache | None:
        """An empty cache for rows of up to ``length`` tokens; None if the model keeps none."""
        if not self.keeps_cache:
            return None
        return KVCache(self._model.new_cache(num_rows, length) if self._in_place else ())

    def prefill(self, ids: np.ndarray, mask: np.ndarray, cache: KVCache) -> np.ndarray:
        """Fills a cache with rows ``[B, S]`` that are padded on the left.

        Returns:
            Logits that follow the last tokens, float32 ``[B, V_local]``; zeros outside the last stage. Of no use if
            it turns out that the model keeps no cache.
        """
        length = ids.shape[1]
        logits = None
        for start in range(0, length, self._chunk_size):
            end = min(start + self._chunk_size, length)
            logits = self._run(ids[:, start:end], mask[:, :end], cache)["logits"]
            if not self.keeps_cache:
                break
        if logits is None:
            return np.zeros((len(ids), 1), np.float32)
        return logits.asnumpy()[:, -1].astype(np.float32, copy=False)

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
        step = self._chunk_size if self.keeps_cache else length
        own = None
        if cache is None and length > step:
            cache = own = self.new_cache(batch, length)
        scores: list[np.ndarray] = []
        try:
            for start in range(0, length, step):
                part = slice(start, start + step)
                outputs = self._run(ids[:, part], mask[:, : past + start + step], cache, targets[:, part])
                if own is not None and not self.keeps_cache:
                    return self.read(ids, mask, targets)
                scores.append(self._scores(outputs, targets[:, part]))
        finally:
            if own is not None:
                own.clear()
        return np.concatenate(scores, axis=1)

    def scores_of(self, logits: np.ndarray, targets: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The scores ``[N, 4]`` of targets ``[N]``, each after a row of logits."""
        if not self._is_last:
            return np.zeros((len(targets), 4), np.float32)
        first = 0 if self._layout.tp.size == 1 else self._model.model_shard.vocab[0]
        return ops.token_scores(logits, targets, first, rows)

    def joined(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        """Log-probabilities and the best ids, float64 ``[N, 2]``, from scores ``[n, 4]`` of several continuations.

        Raises:
            FloatingPointError: on all processes, if one is no finite number.
        """
        parts = np.concatenate(scores)
        if self._is_last:
            parts = _joined_parts(self._layout.tp.all_gather(parts))
        else:
            parts = np.zeros((len(parts), 2), np.float32)
        pp = self._layout.pp
        if pp.size > 1:
            with self._waiting():
                parts = pp.broadcast(parts, pp.size - 1)
        if not np.isfinite(parts[:, 0]).all():
            raise FloatingPointError("the model gave no finite log-probability for a token of a continuation")
        return parts.astype(np.float64)

    def finish(self) -> None:
        """Lets processes that share parameters with this one come to their end."""
        if self._lockstep is not None:
            self._lockstep.finish()

    @property
    def _is_last(self) -> bool:
        return bool(self._layout.pp.rank == self._layout.pp.size - 1)

    def _run(
        self, ids: np.ndarray, mask: np.ndarray, cache: KVCache | None, targets: np.ndarray | None = None
    ) -> Mapping[str, Any]:
        """One forward of new tokens ``[B, S]``, those before them in ``mask`` ``[B, past + S]`` being in the cache."""
        length = ids.shape[1]
        is_padded = bool((mask == 0).any())
        given_mask = None
        if self._in_place:
            given_mask = mask if is_padded else None
        elif is_padded or length > 1:
            given_mask = _build_combined_mask(mask, length)
        given: dict[str, Any] = {
            "position_ids": _tensor(build_position_ids(mask)[:, -length:]),
            "attention_mask": None if given_mask is None else _tensor(given_mask),
            "past_key_values": cache if self._in_place or cache else None,
        }
        if targets is None:
            given["logits_to_keep"] = 1
        else:
            asked = np.flatnonzero((targets >= 0).any(0))
            given |= {
                "score_targets": _tensor(targets),
                "logits_to_keep": length - (int(asked[0]) if len(asked) else 0),
            }
        if self._before_forward is not None:
            self._before_forward()
        if self._lockstep is not None:
            self._lockstep.forward()
        with self._stats.prefill(int(mask[:, -length:].sum())):
            outputs = self._model(
                _tensor(ids), **{name: value for name, value in given.items() if name in self._accepts}
            )
        self._stats.forwards += 1
        if cache is not None:
            self._stats.cache_bytes = max(self._stats.cache_bytes, cache.nbytes)
        if isinstance(outputs, dict) and "scores" in outputs:
            return outputs
        logits, past_key_values = unpacked(outputs)
        if cache is not None and not self._in_place:
            self.keeps_cache = past_key_values is not None
            cache.update(past_key_values or ())
        return {"logits": logits}

    def _scores(self, outputs: Mapping[str, Any], targets: np.ndarray) -> np.ndarray:
        """The scores ``[B, S, 4]`` of a forward; zeros where nothing is asked, and outside the last stage."""
        scores = np.zeros((*targets.shape, 4), np.float32)
        if "scores" in outputs:
            return scores if outputs["scores"] is None else outputs["scores"].asnumpy()
        rows, columns = np.nonzero(targets >= 0)
        logits = outputs["logits"].asnumpy()
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


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array))

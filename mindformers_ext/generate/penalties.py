"""Processors of scores that work in every mode: what was said before, what must not come, and where an answer may end.

Each function returns a processor ``(scores float32 [R, V], context) -> scores`` that changes the scores in place.
Formulas are those of transformers 5.24 (``generation/logits_process.py``), except that pads are never part of a
history: an answer must not depend on its partners in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mindformers_ext.generate.context import Processor, StepContext


def repetition_penalty(penalty: float) -> Processor:
    """Divides positive and multiplies negative scores of every id in the history, once for each distinct id."""

    def process(scores: np.ndarray, context: StepContext) -> np.ndarray:
        return penalize_seen(scores, *context.history(scores.shape[1]), penalty)

    return process


def penalize_seen(scores: np.ndarray, rows: np.ndarray, ids: np.ndarray, penalty: float) -> np.ndarray:
    """`repetition_penalty` for pairs of row and id; a pair that comes twice counts once."""
    seen = scores[rows, ids]
    scores[rows, ids] = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))
    return scores


def no_repeat_ngram(size: int) -> Processor:
    """Bans every id that would complete ``size`` ids that the history has already."""

    def process(scores: np.ndarray, context: StepContext) -> np.ndarray:
        rows, ids = context.rows, context.ids
        starts = len(ids) - size + 1
        if starts < 1:
            return scores
        repeats = rows[:starts] == rows[size - 1 :]  # the n-gram lies within one row ...
        tails = context.tails(size - 1)
        for offset in range(size - 1):  # ... and begins like the end of that row
            repeats &= ids[offset : offset + starts] == tails[rows[:starts], offset]
        found = np.flatnonzero(repeats)
        banned = ids[found + size - 1]
        inside = banned < scores.shape[1]
        scores[rows[found[inside]], banned[inside]] = -np.inf
        return scores

    return process


def sequence_bias(entries: Sequence[tuple[Sequence[int], float]], vocab_size: int) -> Processor:
    """Adds a bias to the last id of a sequence wherever the history ends with the ids before it; biases add up.

    Args:
        entries: (token ids, bias); of the same ids the last entry counts.
        vocab_size: V.
    """
    biases = {tuple(ids): bias for ids, bias in entries}
    single = np.zeros(vocab_size, np.float32)
    groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in biases.items():
        if len(ids) == 1:
            single[ids[0]] = bias
        else:
            groups.setdefault(len(ids) - 1, []).append((ids, bias))
    longer = [
        (
            np.array([ids[:-1] for ids, _ in group], np.int64),
            np.array([ids[-1] for ids, _ in group], np.int64),
            np.array([bias for _, bias in group], np.float32),
        )
        for group in groups.values()
    ]
    has_single = bool(single.any())

    def process(scores: np.ndarray, context: StepContext) -> np.ndarray:
        if has_single:
            scores += single
        for prefixes, last, bias in longer:
            tails = context.tails(prefixes.shape[1])
            rows, words = np.nonzero((tails[:, None] == prefixes).all(axis=2))
            np.add.at(scores, (rows, last[words]), bias[words])
        return scores

    return process


def bad_words(words: Sequence[Sequence[int]], eos: Sequence[int], vocab_size: int) -> Processor:
    """Bans the last id of each word where the history ends with the ids before it; EOS ids alone are no bad words."""
    return sequence_bias(
        [(word, -np.inf) for word in words if len(word) > 1 or word[0] not in eos],
        vocab_size,
    )


def ban(ids: Sequence[int], when: Callable[[StepContext], np.ndarray] | None = None) -> Processor:
    """Bans ids, always or in the rows ``[R]`` that ``when`` marks."""
    columns = np.unique(np.array(ids, np.int64))

    def process(scores: np.ndarray, context: StepContext) -> np.ndarray:
        if when is None:
            scores[:, columns] = -np.inf
        else:
            scores[np.ix_(np.flatnonzero(when(context)), columns)] = -np.inf
        return scores

    return process


def force(ids: Sequence[int], when: Callable[[StepContext], np.ndarray]) -> Processor:
    """Leaves nothing but ``ids``, with score 0, in the rows ``[R]`` that ``when`` marks."""
    columns = np.unique(np.array(ids, np.int64))

    def process(scores: np.ndarray, context: StepContext) -> np.ndarray:
        rows = np.flatnonzero(when(context))
        scores[rows] = -np.inf
        scores[np.ix_(rows, columns)] = 0
        return scores

    return process


def remove_invalid_values(scores: np.ndarray, _: StepContext) -> np.ndarray:
    """Turns nan into 0 and infinities into the ends of float32; what was banned before becomes finite, too."""
    return np.nan_to_num(scores, copy=False)


def exponential_decay(start: int, factor: float, eos: Sequence[int]) -> Processor:
    """Adds ``|score| * (factor ** (new - start) - 1)`` to the EOS ids once there are more than ``start`` new tokens."""
    columns = np.unique(np.array(eos, np.int64))

    def process(scores: np.ndarray, context: StepContext) -> np.ndarray:
        over = np.maximum(context.new_lengths - start, 0)[:, None]
        with np.errstate(over="ignore"):
            growth = np.minimum(np.float64(factor) ** over - 1, np.finfo(np.float32).max)
        ends = scores[:, columns].astype(np.float64)
        finite = np.isfinite(ends)
        raised = np.where(finite, ends, 0) * np.where(ends < 0, 1 - growth, 1 + growth)
        scores[:, columns] = np.where(finite, np.minimum(raised, np.finfo(np.float32).max), ends)
        return scores

    return process


def custom(call: Callable[..., Any], plugin: Callable[..., Any], filler: int) -> Processor:
    """A user's plug-in, which sees ids ``[R, T]`` padded on the left with ``filler``."""

    def process(scores: np.ndarray, context: StepContext) -> np.ndarray:
        result: np.ndarray = call(plugin, context.padded(filler), scores)
        # What the plug-in keeps for itself must not be changed by the processors that follow.
        return result if result is scores else result.copy()

    return process

"""Scores of the next token that several processes hold in parts, and what these exchange to choose by them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindformers_ext.generate import warpers
from mindformers_ext.generate.topk import check_finite, log_sum_exp, top_candidates
from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.parallel.plan import split_evenly


@dataclass(frozen=True)
class Logits:
    """The scores that follow the rows of a batch.

    All processes of a unit call the same methods in the same order. What a method gives in the last stage of a pipeline
    is None in the others, unless it says otherwise; `shared` passes it on.

    Attributes:
        local: this process' part of the vocabulary, float32 ``[R, V_local]``; None outside the last stage.
        num_rows: R.
        vocab_size: V.
        context: the groups.
        waiting: a block of time in which a stage waits for the last one.
    """

    local: np.ndarray | None
    num_rows: int
    vocab_size: int
    context: ParallelContext
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_split(self) -> bool:
        """Whether other processes hold scores that this one does not."""
        return self.context.tp.size > 1 or self.context.pp.size > 1

    @property
    def first_id(self) -> int:
        """The id that the first column of `local` is for."""
        return split_evenly(self.vocab_size, self.context.tp.size, self.context.tp.rank)[0]

    def select(self, rows: np.ndarray) -> Logits:
        """The scores of some rows, int ``[new R]``; a row may be taken more than once."""
        return replace(self, local=None if self.local is None else self.local[rows], num_rows=len(rows))

    def with_rows(self, others: Logits) -> Logits:
        """These scores, and those of others behind them."""
        local = None
        if self.local is not None and others.local is not None:
            local = np.concatenate((self.local, others.local))
        return replace(self, local=local, num_rows=self.num_rows + others.num_rows)

    def whole(self) -> np.ndarray:
        """The scores of the whole vocabulary, float32 ``[R, V]``, on all processes."""
        return self.shared(self.joined(), (self.num_rows, self.vocab_size), np.float32)

    def joined(self) -> np.ndarray | None:
        """The scores of the whole vocabulary, float32 ``[R, V]``."""
        return (
            None if self.local is None else gather_vocab_parallel_logits(self.local, self.vocab_size, self.context.tp)
        )

    def best_tokens(self) -> np.ndarray | None:
        """The token with the highest score of each row, int32 ``[R]``; of equal ones the lowest, -1 if none is finite.

        Processes exchange one value and one id a row, whatever the size of the vocabulary.
        """
        if self.local is None:
            return None
        ids = self.local.argmax(1)[:, None]  # nan counts as the highest
        values, ids, _ = self._exchanged(np.take_along_axis(self.local, ids, 1), ids)
        # Parts are in the order of their ids, so the first of equal values has the lowest.
        chosen = np.take_along_axis(ids, values.argmax(1)[:, None], 1)[:, 0]
        return np.where(np.isfinite(values.max(1)), chosen, -1)

    def contenders(self, count: int, temperature: float) -> np.ndarray | None:
        """Rows float32 ``[R, V]`` of the ``count`` highest scores and of all that equal their last; others are -inf.

        Processes exchange the ``count`` best of their parts. Where more scores than these equal the last, which is
        rare, the rows concerned are joined as a whole; so all are where that is less to send.

        Args:
            count: how many.
            temperature: scores are compared after the division by it, which may make different ones equal; those
                returned are not divided.
        """
        if self.local is None or 2 * count * self.context.tp.size >= self.vocab_size or self.context.tp.size == 1:
            return self.joined()
        scaled = self.local if temperature == 1.0 else warpers.temperature(self.local.copy(), temperature)
        best, ids = top_candidates(scaled, count)
        more = (scaled >= best[:, -1:]).sum(1) > count
        sent = np.take_along_axis(self.local, ids, 1)
        sent[np.isnan(scaled.max(1)), 0] = np.nan  # such rows are refused
        values, ids, all_more = self._exchanged(sent, ids, more)
        scaled = values if temperature == 1.0 else warpers.temperature(values.copy(), temperature)
        border = np.partition(scaled, -count, axis=1)[:, -count, None]
        rows = np.full((self.num_rows, self.vocab_size), -np.inf, np.float32)
        np.put_along_axis(rows, ids, np.where(scaled < border, np.float32(-np.inf), values), 1)
        last_ones = scaled.reshape(self.num_rows, -1, count)[:, :, -1]
        cut = np.flatnonzero(((all_more != 0) & (last_ones >= border)).any(1))
        if len(cut):
            whole = self.select(cut).joined()
            assert whole is not None
            rows[cut] = whole
        return rows

    def ranked(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``count`` highest scores of each row in place, and the log-sum-exp of all, on all processes.

        Of equal scores the lower ids count first. Processes exchange their ``count`` best and one number a row.

        Returns:
            float32 ``[R, V]``, -inf for all other scores, and float32 ``[R, 1]``.

        Raises:
            FloatingPointError: a row has no finite score, or has nan.
        """
        if 2 * count * self.context.tp.size >= self.vocab_size:
            whole = self.whole()
            return whole, log_sum_exp(whole)
        packed = None
        if self.local is not None:
            normaliser = _log_sum_exp_or_bad(self.local)
            values, ids, normalisers = self._exchanged(*top_candidates(self.local, count), normaliser.view(np.int32))
            order = np.argsort(-values, axis=1, kind="stable")[:, :count]
            total = _joined_log_sums(normalisers.view(np.float32))
            packed = _packed(np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1), total[:, None])
        packed = self.shared(packed, (self.num_rows, 2 * count + 1), np.int32)
        values, ids, total = _unpacked(packed)
        offsets = total.view(np.float32)
        check_finite(offsets[:, 0])
        rows = np.full((self.num_rows, self.vocab_size), -np.inf, np.float32)
        np.put_along_axis(rows, ids, values, 1)
        return rows, offsets

    def shared(self, array: np.ndarray | None, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Gives all stages what the last one has, of this shape and type."""
        return from_last_stage(array, shape, dtype, self.context.pp, self.waiting)

    def _exchanged(
        self, values: np.ndarray, ids: np.ndarray, extra: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Joins scores and ids ``[R, n]`` of the parts, ``[R, parts * n]`` in their order, and a number a row of each.

        Args:
            values: float32.
            ids: counted within this part; those returned are within the vocabulary.
            extra: ``[R]``, anything that int32 holds; None sends nothing.

        Returns:
            float32, int32, and int32 ``[R, parts]``, or ``[R, 0]``.
        """
        extra = np.zeros((len(values), 0), np.int32) if extra is None else extra[:, None]
        received = self.context.tp.all_gather(_packed(values, ids + self.first_id, extra))
        parts, rows, width = received.shape
        values, ids, extras = _unpacked(received.reshape(parts * rows, width))

        def by_row(array: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(np.moveaxis(array.reshape(parts, rows, -1), 0, 1)).reshape(rows, -1)

        return by_row(values), by_row(ids), by_row(extras)


def from_last_stage(
    array: np.ndarray | None,
    shape: tuple[int, ...],
    dtype: Any,
    stages: Group,
    waiting: Callable[[], AbstractContextManager[None]],
) -> np.ndarray:
    """Gives all stages of a pipeline what the last one has.

    Args:
        array: of this shape and type in the last stage; of no meaning in the others.
        shape: see there.
        dtype: see there.
        stages: the processes, all of which call this.
        waiting: a block of time in which a stage waits for the last one.
    """
    if stages.size == 1:
        assert array is not None
        return array
    with waiting():
        sent = np.zeros(shape, dtype) if array is None else array.astype(dtype, copy=False)
        return stages.broadcast(sent, stages.size - 1)


def gather_vocab_parallel_logits(local: np.ndarray, vocab_size: int, group: Group) -> np.ndarray:
    """Joins the parts of the vocabulary.

    Args:
        local: logits of this process' part, float32 ``[rows, V_local]``.
        vocab_size: V.
        group: the processes that have a part each.

    Returns:
        float32 ``[rows, V]``.
    """
    if group.size == 1:
        return local
    parts = [split_evenly(vocab_size, group.size, index) for index in range(group.size)]
    gathered = group.all_gather_parts(local.T, [end - begin for begin, end in parts])
    return np.ascontiguousarray(np.concatenate(gathered).T)


def _packed(values: np.ndarray, ids: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """One message int32 ``[R, 2 n + 1]``, ``[R, 2 n]`` where ``extra`` is ``[R, 0]``: a call costs more than bytes."""
    bits = np.ascontiguousarray(values, np.float32).view(np.int32)
    return np.concatenate((bits, ids.astype(np.int32), extra.astype(np.int32, copy=False)), axis=1)


def _unpacked(message: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = message.shape[1] // 2
    values = np.ascontiguousarray(message[:, :count]).view(np.float32)
    return values, np.ascontiguousarray(message[:, count : 2 * count]), np.ascontiguousarray(message[:, 2 * count :])


def _log_sum_exp_or_bad(scores: np.ndarray) -> np.ndarray:
    """``ln sum exp`` of each row, float32 ``[R]``; the highest score where that is no finite number."""
    result = scores.max(axis=1)
    finite = np.isfinite(result)
    if finite.all():
        return log_sum_exp(scores)[:, 0]
    if finite.any():
        result[finite] = log_sum_exp(scores[finite])[:, 0]
    return result


def _joined_log_sums(parts: np.ndarray) -> np.ndarray:
    """``ln sum exp`` of rows from those of their parts ``[R, parts]``, as int32 bits ``[R]``; nan if there is none."""
    highest = parts.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (highest + np.log(np.exp(parts - highest).sum(axis=1, keepdims=True)))[:, 0].view(np.int32)

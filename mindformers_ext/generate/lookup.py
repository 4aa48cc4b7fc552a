"""Prompt lookup: what followed the last tokens before is tried as what follows them now.

The model reads the drafted tokens in one forward, as cheap as a step of one token where reading the weights is what
costs. At each of them the next token is chosen as ever, from the scores, by the processors and with the noise of that
step; a draft is worth something as long as it is what was chosen. So tokens are those of decoding without drafts,
greedy or sampled (Saxena 2023; transformers' PromptLookupCandidateGenerator has the same options).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mindformers_ext.generate.choice import Choice, Chosen
from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.kv_cache import KVCache, can_crop
from mindformers_ext.generate.model_call import layout_of, pads_obstacle
from mindformers_ext.generate.rows import GeneratedRow, Rows
from mindformers_ext.generate.stepwise import Answers, Loop, check_room, run_prompts, scores_of
from mindformers_ext.generate.stopping import RUNNING
from mindformers_ext.models.cache import RowCopy

# Tokens that may wait to be read again with the next draft, where a state cannot take back what it has read.
_MOST_WAITING = 16


def lookup_obstacle(model: Any, num_rows: int) -> str | None:
    """Says why this model cannot try drafts for so many rows at a time; None if it can."""
    if num_rows == 1:
        return None
    alone = "give one prompt and one answer at a time (inference.batch_size: 1)"
    if not getattr(model, "can_crop_cache", True):
        return f"layers that cannot take tokens back try drafts for one row only; {alone}"
    if layout_of(model).cp.size > 1:
        return f"under context parallelism drafts are tried for one row only; {alone}"
    obstacle = pads_obstacle(model)
    if obstacle is not None:
        return f"{obstacle}, so rows cannot go apart; {alone}"
    return None


def propose(ids: np.ndarray, count: int, longest: int, stop: Sequence[int] = ()) -> np.ndarray:
    """What followed the first earlier occurrence of the last tokens, of as many of these as were found.

    Args:
        ids: tokens so far, int ``[T]``.
        count: most tokens to propose.
        longest: most last tokens that are looked for.
        stop: ids that are not proposed, nor what follows them.

    Returns:
        int64 ``[n]``, n up to ``count``.
    """
    for size in range(min(longest, len(ids) - 1), 0, -1):
        tail = ids[len(ids) - size :]
        starts = len(ids) - size  # an occurrence begins before the tail itself does
        found = np.ones(starts, bool)
        for place in range(size):
            found &= ids[place : place + starts] == tail[place]
        matches = np.flatnonzero(found)
        if matches.size:
            draft = ids[matches[0] + size : matches[0] + size + count]
            ends = np.flatnonzero(np.isin(draft, np.asarray(stop, np.int64)))
            return draft[: ends[0]] if ends.size else draft
    return ids[:0]


@dataclass(eq=False, repr=False)
class DraftForward(BatchForward):
    """A batch whose rows get several tokens at a time, of which each keeps a number of its own.

    Slots of tokens that a row does not keep are masked like pads, or dropped where no row keeps any. A state that
    cannot drop tokens is put back to what it was before them; those to be kept are read again with the next ones.

    Args:
        num_drafts: most drafted tokens of a row; the rest is that of `BatchForward`.

    Raises:
        ValueError: see `BatchForward`.
    """

    num_drafts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._width = 0
        self._spare: KVCache | None = None
        if self._cache is not None and not can_crop(self.call.model, self._cache):
            self._spare = self.call.new_cache(1, self._capacity)
        self._saved = 0  # tokens of the state that `_spare` holds

    @property
    def is_behind(self) -> bool:
        """Whether so many tokens wait to be read that the next forward should have no draft."""
        return self._spare is not None and self.length - self._held > _MOST_WAITING

    def extend(self, tokens: Sequence[np.ndarray]) -> Logits:
        """Appends tokens to each row, int ``[n]`` with n of at least 1 for each of them.

        Returns:
            The logits that follow each of them, ``[R * longest n, V]``, one row after the other; those beyond a row's
            own n mean nothing.
        """
        width = max(map(len, tokens))
        if self.length + width > self._capacity:
            self._close_gaps()
        ids, mask = (np.zeros((len(self._ids), width), np.int32) for _ in range(2))
        for row, given in zip(self._live, tokens, strict=True):
            ids[row, : len(given)], mask[row, : len(given)] = given, 1
        self._ids, self._mask = np.concatenate((self._ids, ids), axis=1), np.concatenate((self._mask, mask), axis=1)
        self._width = width
        if self._spare is not None and width > 1:
            self._save(self._spare)
        logits = self._last(self._run(self._held, self.length, width), width)
        wanted = (self._live[:, None] * width + np.arange(width)).reshape(-1)
        return logits if len(wanted) == logits.num_rows else logits.select(wanted)

    def keep(self, counts: np.ndarray) -> None:
        """Forgets all but the first ``counts[i]`` of the tokens that row i got last, int ``[R]``, at least 1 each."""
        first = self.length - self._width
        end = first + int(counts.max())
        for row, count in zip(self._live, counts, strict=True):
            self._mask[row, first + count :] = 0
        if end < self.length:
            self._ids, self._mask = self._ids[:, :end], self._mask[:, :end]
            if self._spare is not None:
                self._restore(self._spare)
            elif self._cache is not None:
                self._cache.crop(end)

    def close(self) -> None:
        """See `BatchForward.close`."""
        super().close()
        if self._spare is not None:
            self._spare.clear()

    def _measure(self) -> None:
        super()._measure()
        if self._spare is not None and self._cache is not None:
            self.cache_bytes = max(self.cache_bytes, self._cache.nbytes + self._spare.nbytes)

    @property
    def _most_added(self) -> int:
        return self.max_new_tokens + self.num_drafts

    @property
    def _held(self) -> int:
        return 0 if self._cache is None else self._cache.length

    def _save(self, spare: KVCache) -> None:
        assert self._cache is not None
        self._saved = self._held
        for kept, entry in zip(spare, self._cache, strict=True):
            if not entry.can_crop:
                kept.take(entry, [RowCopy(0, 0, 0, self._saved)], self._saved)

    def _restore(self, spare: KVCache) -> None:
        assert self._cache is not None
        for kept, entry in zip(spare, self._cache, strict=True):
            if entry.can_crop:
                entry.crop(self._saved)
            else:
                entry.take(kept, [RowCopy(0, 0, 0, self._saved)], self._saved)

    def _close_gaps(self) -> None:
        """Moves the tokens of each row to the right, over the slots that it did not keep."""
        real = self._mask != 0
        length = int(real[self._live].sum(axis=1).max())
        slots = np.argsort(real, axis=1, kind="stable")[:, self.length - length :]
        self._ids, self._mask = (np.take_along_axis(array, slots, axis=1) for array in (self._ids, self._mask))
        if self._cache is not None:
            self._cache.rearrange(slots)


def choose_drafted_tokens(forward: DraftForward, rows: Rows, loop: Loop) -> list[GeneratedRow]:
    """Runs a batch to its end, like `choose_tokens`, with ``config.prompt_lookup_num_tokens`` drafted tokens a step.

    Args:
        forward: the batch, nothing of it run yet.
        rows: its rows; a streamer gets the tokens of one only.
        loop: the rest.
    """
    config, stats = loop.config, loop.stats
    logits, rows = run_prompts(forward, rows, config, stats)
    if loop.step_scores is not None:
        check_room(logits.vocab_size, rows)
    chooser = _Chooser(logits.vocab_size, rows, loop)
    # Rows advance at their own pace, so each is a batch of its own to all but the forward.
    running = [rows.select(np.array([row])) for row in range(len(rows))]
    drafts = [np.empty(0, np.int64)] * len(rows)
    width = 0
    while True:
        with stats.decode():
            counts = [
                chooser.follow(row, draft, partial(_at, logits, index * max(width, 1)))
                for index, (row, draft) in enumerate(zip(running, drafts, strict=True))
            ]
            going = np.array([index for index, count in enumerate(counts) if count is not None], np.int64)
            if not len(going):
                return chooser.answers.rows
            if len(going) < len(running):
                running = [running[index] for index in going]
                forward.select(going)
            if width:
                forward.keep(np.array([counts[index] for index in going], np.int64))
            drafts = [_draft(row, config, forward.is_behind) for row in running]
            tokens = [np.append(row.new_tokens()[0, -1:], draft) for row, draft in zip(running, drafts, strict=True)]
            logits, width = forward.extend(tokens), max(map(len, tokens))
            stats.drafted_tokens += sum(map(len, drafts))


def _at(logits: Logits, first: int, place: int) -> Logits:
    return logits.select(np.array([first + place]))


def _draft(row: Rows, config: GenerationConfig, is_behind: bool) -> np.ndarray:
    """What is proposed to follow a row, no more than would fit before its last token."""
    assert config.prompt_lookup_num_tokens is not None
    room = int(row.budgets[0]) - row.step - 1
    count = 0 if is_behind else min(config.prompt_lookup_num_tokens, room)
    return propose(row.context().sequences[0], count, config.max_matching_ngram_size, config.eos_token_ids)


class _Chooser:
    """Chooses tokens of single rows, and notes what they got.

    Args:
        vocab_size: V.
        rows: all rows.
        loop: see `choose_drafted_tokens`.
    """

    def __init__(self, vocab_size: int, rows: Rows, loop: Loop) -> None:
        self.answers = Answers(len(rows), int(rows.budgets.max()), loop.config)
        self._choose = Choice(loop.config, vocab_size, watched=loop.step_scores is not None)
        self._loop = loop

    def follow(self, row: Rows, draft: np.ndarray, logits_at: Callable[[int], Logits]) -> int | None:
        """Chooses the tokens of a row as far as its draft is right, and one more.

        Args:
            row: is appended them.
            draft: what was proposed.
            logits_at: the scores that follow the row, with so many drafted tokens.

        Returns:
            How many of the tokens that the model read stay, the one before the draft included; None at the row's end.
        """
        for place in range(len(draft) + 1):
            step = self._choose(logits_at(place), row)
            self._note(row, step)
            right = place < len(draft) and step.tokens[0] == draft[place]
            self._loop.stats.accepted_tokens += int(right)
            self._loop.stats.decode_tokens += int(row.step > 0)
            row.append(step.tokens)
            if self._loop.streamer is not None:
                self._loop.streamer.put(step.tokens)
            verdict = self._loop.stopping.check(step.tokens, row.step, row.budgets, row.context, scores_of(step))
            if verdict.codes[0] != RUNNING:
                self.answers.finish(row, verdict)
                return None
            if not right:
                break
        return place + 1

    def _note(self, row: Rows, step: Chosen) -> None:
        self.answers.record(row, step)
        step_scores = self._loop.step_scores
        if step_scores is None:
            return
        assert step.scores is not None
        if row.step == len(step_scores):
            step_scores.append(self.answers.spread(row, step.scores, np.nan))
        step_scores[row.step][row.origins] = step.scores

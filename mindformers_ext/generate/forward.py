"""Feeding a left-padded batch to a model, token by token, with or without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.kv_cache import KVCache
from mindformers_ext.generate.model_call import ModelCall, Outputs, pads_obstacle
from mindformers_ext.generate.utils import left_pad

# Pads that all rows have in front are left alone up to so many, or to a quarter of all slots: taking them away moves
# the whole cache.
_FEW_PADS = 32


@dataclass(eq=False, repr=False)
class BatchForward:
    """A batch in the middle of a generation.

    Args:
        call: runs the model; batches that are parts of this one share it.
        prompts: token ids of each row, none empty.
        max_new_tokens: most tokens that will be added to a row.
        use_cache: False runs the whole sequence at every step.
        chunk_size: most prompt tokens in one forward.
        fill: is given this object before the prompts run; it puts the first tokens of the rows into the cache and says
            how many slots of each row, pads included, these take.

    Attributes:
        cache_bytes: the most that the cache has held so far.

    Raises:
        ValueError: prompts of different lengths for a model that takes no mask or no positions.
    """

    call: ModelCall
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    use_cache: bool
    chunk_size: int
    fill: Callable[[BatchForward], int] | None = None

    def __post_init__(self) -> None:
        self.cache_bytes = 0
        self._ids, self._mask = left_pad(self.prompts)
        obstacle = pads_obstacle(self.call.model) if (self._mask == 0).any() else None
        if obstacle is not None:
            raise ValueError(f"{obstacle}, so its prompts must be of equal length or given one at a time")
        # Rows that are still asked for; the others are carried along until it pays to drop them.
        self._live = np.arange(len(self._ids))
        self._capacity = self.length + self._most_added
        self._cache = self.call.new_cache(len(self._ids), self._capacity) if self.use_cache else None

    @property
    def cache(self) -> KVCache | None:
        """What the layers remember of the tokens so far; None where the model keeps nothing."""
        return self._cache

    @property
    def num_forwards(self) -> int:
        """How often the model was run, for parts of this batch too."""
        return self.call.num_forwards

    @property
    def _most_added(self) -> int:
        """Most tokens that a row will have behind its prompt at any time."""
        return self.max_new_tokens

    def part(self, prompts: Sequence[Sequence[int]], fill: Callable[[BatchForward], int] | None = None) -> BatchForward:
        """Another batch of the same model, for some tokens of this one; nothing is generated after them."""
        return BatchForward(self.call, prompts, 0, True, self.chunk_size, fill)

    @property
    def length(self) -> int:
        """Tokens of each row, pads included."""
        return self._ids.shape[1]

    def prefill(self) -> Logits:
        """Runs the prompts; returns the logits ``[B, V]`` that follow their last tokens."""
        length = self.length
        start = 0 if self.fill is None else self.fill(self)
        while self._cache is not None and start + self.chunk_size < length:
            self._run(start, start + self.chunk_size)
            start += self.chunk_size
        return self._last(self._run(0 if self._cache is None else start, length))

    def step(self, tokens: np.ndarray) -> Logits:
        """Appends one token to each row, int ``[B]``; returns the logits ``[B, V]`` that follow."""
        column = np.zeros((len(self._ids), 1), np.int32)
        column[self._live, 0] = tokens
        self._ids = np.concatenate((self._ids, column), axis=1)
        self._mask = np.concatenate((self._mask, np.ones_like(column)), axis=1)
        logits = self._last(self._run(0 if self._cache is None else self.length - 1, self.length))
        return logits if np.array_equal(self._live, np.arange(len(self._ids))) else logits.select(self._live)

    def select(self, rows: np.ndarray, shared: int = 0) -> None:
        """Makes row ``i`` what was row ``rows[i]``; there may be more or fewer rows than before.

        Args:
            rows: int ``[new B]``.
            shared: the first so many tokens of a row, pads included, equal those of the row that it becomes.
        """
        sources = self._live[rows]
        if len(rows) == len(self._live):
            order = np.arange(len(self._ids))
            order[self._live] = sources
            self._reorder(order, shared)
        elif 2 * len(rows) > len(self._ids) and (np.diff(rows) > 0).all():
            self._live = sources
        else:
            self._reorder(sources, 0)
            self._live = np.arange(len(rows))

    def retire(self, rows: np.ndarray) -> None:
        """Goes on with the rows ``rows``, int, ascending; the others keep their places for rows that come in."""
        self._live = self._live[rows]

    def take_in(self, other: BatchForward, max_length: int, remaining: int) -> None:
        """Takes in the rows of another batch whose prompts have run, behind the rows of this one.

        They get the places of rows that have ended. Rows end together, so those with less tokens have pads in front;
        where all rows have many, these are taken away.

        Args:
            other: the batch, with the same `call`; of no use any more after this.
            max_length: see `limit`; of the rows of both.
            remaining: see there.
        """
        places = np.setdiff1d(np.arange(len(self._ids)), self._live)[: len(other._ids)]
        missing = len(other._ids) - len(places)
        if missing:
            places = np.append(places, np.arange(len(self._ids), len(self._ids) + missing))
            self._reorder(np.append(np.arange(len(self._ids)), np.zeros(missing, np.int64)), 0)
        longest = int(max(self._mask[self._live].sum(axis=1).max(initial=0), other._mask.sum(axis=1).max()))
        self.limit(max_length, remaining)
        if longest > self.length or self.length - longest > max(_FEW_PADS, self.length // 4):
            self._shift(longest - self.length)
            self.limit(max_length, remaining)
        kept = min(self.length, other.length)
        for mine, others in ((self._ids, other._ids), (self._mask, other._mask)):
            mine[places] = 0
            mine[places, self.length - kept :] = others[:, other.length - kept :]
        if self._cache is not None:
            assert other._cache is not None
            self._cache.take_rows(places, other._cache)
        self._live = np.append(self._live, places)

    def limit(self, max_length: int, remaining: int) -> None:
        """Says how far the cache may grow.

        Args:
            max_length: real tokens of the longest row at its end, with the pads that `take_in` leaves; rows that come
                in later should find that room.
            remaining: most tokens that a row will still get.
        """
        usual = max_length + max(_FEW_PADS, max_length // 3 + 1)
        if self._cache is not None:
            self._cache.limit(max(usual, self.length + remaining))

    def _shift(self, by: int) -> None:
        for name in ("_ids", "_mask"):
            array = getattr(self, name)
            setattr(self, name, np.pad(array, ((0, 0), (by, 0))) if by > 0 else array[:, -by:].copy())
        if self._cache is not None:
            self._cache.shift(by)

    def finish(self) -> None:
        """Lets processes that share parameters with this one come to their end."""
        self.call.finish()
        self._measure()

    def close(self) -> None:
        """Frees the cache."""
        self._measure()
        if self._cache is not None:
            self._cache.clear()

    def _measure(self) -> None:
        if self._cache is not None:
            self.cache_bytes = max(self.cache_bytes, self._cache.nbytes)

    def _reorder(self, order: np.ndarray, shared: int) -> None:
        if len(order) < len(self._ids):
            self._measure()
        self._ids, self._mask = self._ids[order], self._mask[order]
        if self._cache is not None:
            self._cache.reorder(order, shared)

    def _run(self, start: int, end: int, kept: int = 1) -> Outputs:
        """Runs tokens ``start`` to ``end``, those before being in the cache, for the logits of the last ``kept``."""
        outputs = self.call.run(self._ids[:, start:end], self._mask[:, :end], self._cache, kept)
        if not self.call.keeps_cache:
            self._cache = None  # every step runs the whole sequence
        return outputs

    def _last(self, outputs: Outputs, kept: int = 1) -> Logits:
        """The logits of the last ``kept`` tokens of each row."""
        return self.call.last_logits(outputs, len(self._ids), kept)

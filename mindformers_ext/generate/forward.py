"""Feeding a left-padded batch to a model, token by token, with or without a cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.kv_cache import KVCache
from mindformers_ext.generate.utils import _build_combined_mask, build_position_ids, left_pad
from mindformers_ext.parallel.groups import single
from mindformers_ext.parallel.lockstep import Lockstep

# Pads that all rows have in front are left alone up to so many, or to a quarter of all slots: taking them away moves
# the whole cache.
_FEW_PADS = 32


class BatchForward:
    """A batch in the middle of a generation.

    Any Cell works whose ``construct`` takes ``input_ids`` int32 ``[B, S]`` and, by name, what it needs of

    - ``position_ids`` int32 ``[B, S]``,
    - ``attention_mask`` additive float32 ``[B, 1, S, T]`` over all T tokens so far, or None where a causal mask does;
      a model with ``new_cache`` gets int32 ``[B, T]`` instead, 1 for real tokens and 0 for pads, or None without pads,
    - ``past_key_values``: what it returned last, pairs (K, V) ``[B, heads, past, D]``; None at first,
    - ``logits_to_keep``: how many of the last positions' logits are read, mostly 1,

    and which returns logits ``[B, S, V]``, or of these positions only: alone, as the first of a tuple with
    ``past_key_values`` the second, or in a dict under these names. A model with ``new_cache(batch_size, max_length)``
    gets a cache that it extends in place; one that returns no ``past_key_values`` is run on the whole sequence at every
    step.

    Args:
        model: the Cell.
        prompts: token ids of each row, none empty.
        max_new_tokens: most tokens that will be added to a row.
        use_cache: False runs the whole sequence at every step.
        chunk_size: most prompt tokens in one forward.
        before_forward: is called before each forward; what it raises ends the batch.
        fill: is given this object before the prompts run; it puts the first tokens of the rows into the cache and says
            how many slots of each row, pads included, these take.

    Attributes:
        prompts: as given.
        num_forwards: how often the model was run.
        cache_bytes: the most that the cache has held so far.

    Raises:
        ValueError: prompts of different lengths for a model that takes no mask or no positions.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        use_cache: bool,
        chunk_size: int,
        before_forward: Callable[[], None] | None = None,
        fill: Callable[[BatchForward], int] | None = None,
    ) -> None:
        self._model = model
        self.prompts, self._fill = prompts, fill
        self._before_forward = before_forward
        self.num_forwards = self.cache_bytes = 0
        shard = getattr(model, "model_shard", None)
        self._layout = single() if shard is None else shard.context
        runtime = getattr(model, "runtime", None)
        self._waiting = nullcontext if runtime is None else runtime.waiting
        self._accepts = set(inspect.signature(model.construct).parameters)
        self._ids, self._mask = left_pad(prompts)
        self._padded = bool((self._mask == 0).any())
        missing = [name for name in ("attention_mask", "position_ids") if name not in self._accepts]
        if self._padded and missing:
            raise ValueError(
                f"{type(model).__name__}.construct takes no {' and no '.join(missing)}, so its prompts must be of "
                "equal length or given one at a time"
            )
        self._lockstep = lockstep_of(model)
        self._chunk_size = chunk_size
        rows, length = self._ids.shape
        # Rows that are still asked for; the others are carried along until it pays to drop them.
        self._live = np.arange(rows)
        self._in_place = hasattr(model, "new_cache")
        self._cache: KVCache | None = None
        if use_cache and "past_key_values" in self._accepts:
            self._cache = KVCache(model.new_cache(rows, length + max_new_tokens) if self._in_place else ())

    @property
    def cache(self) -> KVCache | None:
        """What the layers remember of the tokens so far; None where the model keeps nothing."""
        return self._cache

    def part(self, prompts: Sequence[Sequence[int]], fill: Callable[[BatchForward], int] | None = None) -> BatchForward:
        """Another batch of the same model, for some tokens of this one; nothing is generated after them."""
        return BatchForward(self._model, prompts, 0, True, self._chunk_size, self._before_forward, fill)

    @property
    def length(self) -> int:
        """Tokens of each row, pads included."""
        return self._ids.shape[1]

    def prefill(self) -> Logits:
        """Runs the prompts; returns the logits ``[B, V]`` that follow their last tokens."""
        length = self.length
        start = 0 if self._fill is None else self._fill(self)
        while self._cache is not None and start + self._chunk_size < length:
            self._run(start, start + self._chunk_size)
            start += self._chunk_size
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
            self._padded = bool((self._mask == 0).any())

    def retire(self, rows: np.ndarray) -> None:
        """Goes on with the rows ``rows``, int, ascending; the others keep their places for rows that come in."""
        self._live = self._live[rows]

    def take_in(self, other: BatchForward, max_length: int, remaining: int) -> None:
        """Takes in the rows of another batch whose prompts have run, behind the rows of this one.

        They get the places of rows that have ended. Rows end together, so those with less tokens have pads in front;
        where all rows have many, these are taken away.

        Args:
            other: the batch, of the same model; of no use any more after this.
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
        self._padded = bool((self._mask == 0).any())
        if self._cache is not None:
            assert other._cache is not None
            self._cache.take_rows(places, other._cache)
        self._live = np.append(self._live, places)
        self.num_forwards += other.num_forwards

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
        if self._lockstep is not None:
            self._lockstep.finish()
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

    def _run(self, start: int, end: int, kept: int = 1) -> Tensor | None:
        """Runs tokens ``start`` to ``end``, those before being in the cache; returns what logits there are here.

        These are the logits of the last ``kept`` tokens, or of all.
        """
        mask = self._mask[:, :end]
        given_mask = None
        if self._in_place:
            given_mask = Tensor.from_numpy(np.ascontiguousarray(mask)) if self._padded else None
        elif self._padded or end - start > 1:
            given_mask = Tensor.from_numpy(_build_combined_mask(mask, end - start))
        positions = np.ascontiguousarray(build_position_ids(mask)[:, start:end])
        given = {
            "position_ids": Tensor.from_numpy(positions),
            "attention_mask": given_mask,
            "past_key_values": self._past(),
            "logits_to_keep": kept,
        }
        if self._before_forward is not None:
            self._before_forward()
        if self._lockstep is not None:
            self._lockstep.forward()
        self.num_forwards += 1
        outputs = self._model(
            Tensor.from_numpy(np.ascontiguousarray(self._ids[:, start:end])),
            **{name: value for name, value in given.items() if name in self._accepts},
        )
        logits, past_key_values = unpacked(outputs)
        if self._cache is not None and not self._in_place:
            self._store(past_key_values)
        return logits

    def _last(self, logits: Tensor | None, kept: int = 1) -> Logits:
        """The logits of the last ``kept`` tokens of each row, from what the forward gave this process."""
        last = None
        if logits is not None:
            last = logits if logits.shape[1] == kept else logits[:, -kept:]
            last = last.asnumpy().reshape(-1, last.shape[-1]).astype(np.float32, copy=False)
        is_whole = self._layout.tp.size == 1  # then a foreign model needs no config
        vocab_size = last.shape[1] if last is not None and is_whole else self._model.config.vocab_size
        return Logits(last, len(self._ids) * kept, vocab_size, self._layout, self._waiting)

    def _past(self) -> Any:
        if self._cache is None or (not self._in_place and not len(self._cache)):
            return None
        return self._cache if self._in_place else self._cache.past_key_values

    def _store(self, past_key_values: Any) -> None:
        if past_key_values is None:
            self._cache = None  # the model keeps no cache: every step runs the whole sequence
        elif self._cache is not None:
            self._cache.update(past_key_values)


def run_idle(model: Any) -> None:
    """Takes part in the forwards of processes that share parameters with this one, which has nothing to do itself."""
    lockstep = lockstep_of(model)
    if lockstep is not None:
        with ms._no_grad():
            lockstep.finish()


def lockstep_of(model: Any) -> Lockstep | None:
    """Returns what keeps processes that share parameters at the same number of forwards; None if there are none."""
    shard = getattr(model, "model_shard", None)
    if shard is None:
        return None

    def idle() -> None:
        model(Tensor.from_numpy(np.zeros((1, 1), np.int32)), logits_to_keep=1)

    return Lockstep(shard.context.groups["dp_shard"], idle)


def unpacked(outputs: Any) -> tuple[Tensor | None, Any]:
    """Takes logits and past_key_values out of what a model returned."""
    if isinstance(outputs, dict):
        return outputs["logits"], outputs.get("past_key_values")
    if isinstance(outputs, tuple | list):
        return outputs[0], outputs[1] if len(outputs) > 1 else None
    return outputs, None

"""Prompts that begin alike: what they share is computed once, and each row starts from a copy of its state.

A state remembers rotated keys or sums over tokens, both of which depend on positions alone. So it can be copied behind
any number of pads, and a batch whose rows got the state of their first tokens looks like one whose prompts are being
computed in pieces: pads on the left, then the tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np

from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.generate.kv_cache import KVCache, can_crop
from mindformers_ext.generate.model_call import ModelCall, layout_of
from mindformers_ext.generate.stats import GenerationStats
from mindformers_ext.models.cache import RowCopy

# Prefixes below this are not worth a forward of their own: it reads all weights, as much work as so many tokens.
LEAST_TOKENS = 32
# States that are kept for the next batches: a header, and the one that it takes turns with.
_KEPT = 2


@dataclass(frozen=True)
class SharedPrefix:
    """The state of tokens that prompts begin with.

    Attributes:
        model: that it belongs to.
        ids: the tokens, int64 ``[P]``.
        cache: their state, one row.
    """

    model: Any
    ids: np.ndarray
    cache: KVCache

    def __len__(self) -> int:
        return len(self.ids)

    def expand(self, rows: int, max_length: int) -> KVCache:
        """Returns a cache for ``rows`` rows of up to ``max_length`` tokens, each of which begins with these tokens."""
        cache = KVCache(self.model.new_cache(rows, max_length))
        cache.take(self.cache, [RowCopy(0, row, 0, len(self)) for row in range(rows)], len(self))
        return cache


def sharing_obstacle(model: Any, use_cache: bool = True) -> str | None:
    """Says why prompts of this model cannot share the state of their first tokens; None if they can."""
    if not use_cache:
        return "use_cache is false, so nothing is remembered of a prompt"
    if not hasattr(model, "new_cache"):
        return f"{type(model).__name__} has no new_cache(), so its cache cannot be filled"
    if layout_of(model).cp.size > 1:
        return "under context parallelism each process keeps other tokens of a row, by their place in the batch"
    return None


def shared_prefix(
    model: Any,
    ids: Sequence[int],
    chunk_size: int = 512,
    before_forward: Callable[[], None] | None = None,
) -> SharedPrefix:
    """Computes the state of tokens that several rows begin with; all processes of a unit call it.

    Args:
        model: has ``new_cache``, and is in evaluation.
        ids: the tokens, at least one.
        chunk_size: most tokens in one forward.
        before_forward: is called before each forward; what it raises ends the call.

    Raises:
        ValueError: the model's rows cannot share a state; see `sharing_obstacle`.
    """
    obstacle = sharing_obstacle(model)
    if obstacle is not None:
        raise ValueError(f"prompts cannot share a prefix: {obstacle}")
    with ms._no_grad():
        forward = BatchForward(ModelCall(model, before_forward), [ids], 0, True, chunk_size)
        forward.prefill()
    assert forward.cache is not None
    return SharedPrefix(model, np.asarray(ids, np.int64), forward.cache)


class PrefixCache:
    """The common beginnings of the prompts of a run, batch after batch.

    A batch computes what its prompts have in common once, and so what they have in common with the batch before. The
    last such state stays, and the one before it unless both have more tokens than the batch.

    Args:
        model: what all batches are for.
        stats: is added to.
        least: fewest tokens that are worth sharing.
    """

    def __init__(self, model: Any, stats: GenerationStats, least: int = LEAST_TOKENS) -> None:
        self._model, self._stats, self._least = model, stats, least
        self._kept: list[SharedPrefix] = []  # the one used last is the last one
        self._before = np.empty(0, np.int64)  # a prompt of the last batch
        self._unit = layout_of(model).unit

    def fill(self, forward: BatchForward) -> int:
        """Gives rows the state of their common beginning; see ``fill`` of `BatchForward`."""
        if forward.cache is None:
            return 0
        prompts = [np.asarray(prompt, np.int64) for prompt in forward.prompts]
        common = _common(prompts)[: min(map(len, prompts)) - 1]  # of each row a token is left, whose logits are wanted
        state, size, again = self._known(common)
        self._before = prompts[0]
        # What the batch before began with too will be wanted again; the rest serves the rows of this batch.
        for goal, users in ((again, 2), (len(common), len(prompts))):
            if goal - size >= self._least and users > 1:
                state, size = self._computed(common[:goal], state, size, forward), goal
        if state is None or size < self._least:
            return 0
        self._keep(state, forward)
        filled, taken = _place(forward, state, size)
        self._stats.shared_tokens += taken
        return filled

    def _known(self, common: np.ndarray) -> tuple[SharedPrefix | None, int, int]:
        """The kept state that spares most of ``common``, how many tokens that is, and how many the last batch had."""
        best, size = None, 0
        for state in self._kept:
            usable = len(_common([state.ids, common]))
            if not can_crop(self._model, state.cache) and usable < len(state):
                continue
            if usable > size:
                best, size = state, usable
        again = len(_common([self._before, common]))
        # A batch that failed on one process alone may have left them with different states.
        everyone = self._unit.all_gather(np.array([size, again], np.int64))
        if (everyone != everyone[0]).any():
            self._kept.clear()
            return None, 0, 0
        return best, size, again

    def _computed(self, ids: np.ndarray, state: SharedPrefix | None, size: int, forward: BatchForward) -> SharedPrefix:
        """The state of ``ids``, of which ``state`` has the first ``size``."""
        fill = None if state is None else lambda part: _place(part, state, size)[0]
        part = forward.part([ids.tolist()], fill)
        part.prefill()
        assert part.cache is not None
        self._stats.prefix_tokens += len(ids) - size
        computed = SharedPrefix(self._model, ids, part.cache)
        self._keep(computed, forward)
        return computed

    def clear(self) -> None:
        """Frees all states."""
        self._kept.clear()

    def _keep(self, state: SharedPrefix, forward: BatchForward) -> None:
        self._kept = [*(kept for kept in self._kept if kept is not state), state][-_KEPT:]
        if sum(map(len, self._kept)) > len(forward.prompts) * forward.length:
            self._kept = [state]
        held = sum(kept.cache.nbytes for kept in self._kept)
        self._stats.prefix_bytes = max(self._stats.prefix_bytes, held)


def _common(rows: Sequence[np.ndarray]) -> np.ndarray:
    """What the rows begin with."""
    shortest = min(map(len, rows))
    first = rows[0][:shortest]
    for row in rows[1:]:
        differs = np.flatnonzero(row[: len(first)] != first)
        first = first[: differs[0]] if differs.size else first
    return first


def _place(forward: BatchForward, prefix: SharedPrefix, count: int) -> tuple[int, int]:
    """Gives each row the state of its first ``count`` tokens, which ``prefix`` begins with.

    Rows end at the same slot, so those with a short rest have their prefix further to the right. Keys of fewer tokens
    are as good: all rows then lack as many tokens as the one with the longest rest. Sums over tokens are not, so rows
    with equal rests are completed together up to their last token.

    Returns:
        How many slots of each row are filled, pads included, and how many tokens of all rows came from ``prefix``.
    """
    assert forward.cache is not None
    lengths = np.array([len(prompt) for prompt in forward.prompts])
    rests, pads = lengths - count, forward.length - lengths
    if can_crop(prefix.model, prefix.cache) or (rests == rests[0]).all():
        rest = int(rests.max())
        copies = [RowCopy(0, row, int(pads[row]), int(size)) for row, size in enumerate(lengths - rest) if size > 0]
        forward.cache.take(prefix.cache, copies, forward.length - rest)
        return forward.length - rest, sum(copy.count for copy in copies)
    for rest in np.unique(rests).tolist():
        rows = np.flatnonzero(rests == rest).tolist()
        cache, sources = prefix.cache, [0] * len(rows)
        if rest > 1:
            prompts = [list(forward.prompts[row])[:-1] for row in rows]
            part = forward.part(prompts, lambda it: _place(it, prefix, count)[0])
            part.prefill()
            assert part.cache is not None
            cache, sources = part.cache, list(range(len(rows)))
        copies = [
            RowCopy(source, row, int(pads[row]), count + rest - 1) for source, row in zip(sources, rows, strict=True)
        ]
        forward.cache.take(cache, copies, forward.length - 1)
    return forward.length - 1, count * len(lengths)

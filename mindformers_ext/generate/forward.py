"""Feeding a left-padded batch to a model, token by token, with or without a cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from mindformers_ext.generate.kv_cache import KVCache
from mindformers_ext.generate.utils import _build_combined_mask, build_position_ids, left_pad


class BatchForward:
    """A batch in the middle of a generation.

    Any Cell works whose ``construct(input_ids, position_ids, attention_mask, past_key_values)`` returns a dict with
    ``logits`` ``[B, S, V]`` and, if it can, ``past_key_values`` as a list of (K, V) pairs ``[B, heads, S, D]``. A
    model with ``new_cache(batch_size, max_length)`` gets a cache that it extends in place; one that returns no
    ``past_key_values`` is run on the whole sequence at every step.

    Args:
        model: the Cell.
        prompts: token ids of each row, none empty.
        max_new_tokens: most tokens that will be added to a row.
        use_cache: False runs the whole sequence at every step.
        chunk_size: most prompt tokens in one forward.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, use_cache: bool, chunk_size: int
    ) -> None:
        self._model = model
        self._ids, self._mask = left_pad(prompts)
        self._padded = bool((self._mask == 0).any())
        self._chunk_size = chunk_size
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.construct).parameters
        self._cache: KVCache | None = None
        if use_cache:
            rows, length = self._ids.shape
            preallocated = hasattr(model, "new_cache")
            self._cache = KVCache(model.new_cache(rows, length + max_new_tokens) if preallocated else ())
            self._in_place = preallocated

    def prefill(self) -> np.ndarray:
        """Runs the prompts; returns the logits float32 ``[B, V]`` of their last tokens."""
        length = self._ids.shape[1]
        if self._cache is None or not self._in_place:
            return self._run(0, length)
        for start in range(0, length, self._chunk_size):
            logits = self._run(start, min(start + self._chunk_size, length))
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Appends one token to each row, int ``[B]``; returns the logits float32 ``[B, V]`` that follow."""
        self._ids = np.concatenate((self._ids, tokens[:, None].astype(np.int32)), axis=1)
        self._mask = np.concatenate((self._mask, np.ones((len(tokens), 1), np.int32)), axis=1)
        length = self._ids.shape[1]
        return self._run(0 if self._cache is None else length - 1, length)

    def keep(self, rows: np.ndarray) -> None:
        """Drops all rows but ``rows``."""
        self._ids, self._mask = self._ids[rows], self._mask[rows]
        self._padded = bool((self._mask == 0).any())
        if self._cache is not None:
            self._cache.reorder(rows)

    def close(self) -> None:
        """Frees the cache."""
        if self._cache is not None:
            self._cache.clear()

    def _run(self, start: int, end: int) -> np.ndarray:
        """Runs tokens ``start`` to ``end``, those before being in the cache; returns the last one's logits."""
        mask = self._mask[:, :end]
        positions = build_position_ids(mask)[:, start:end]
        combined = None
        if self._padded or end - start > 1:
            combined = Tensor.from_numpy(_build_combined_mask(mask, end - start))
        outputs = self._model(
            Tensor.from_numpy(np.ascontiguousarray(self._ids[:, start:end])),
            position_ids=Tensor.from_numpy(np.ascontiguousarray(positions)),
            attention_mask=combined,
            past_key_values=self._past(),
            **({"logits_to_keep": 1} if self._keeps_logits else {}),
        )
        if self._cache is not None and not self._in_place:
            self._store(outputs.get("past_key_values"))
        return outputs["logits"][:, -1].asnumpy().astype(np.float32, copy=False)

    def _past(self) -> Any:
        if self._cache is None or (not self._in_place and not len(self._cache)):
            return None
        return self._cache if self._in_place else self._cache.past_key_values

    def _store(self, past_key_values: Any) -> None:
        if past_key_values is None:
            self._cache = None  # the model keeps no cache: every step runs the whole sequence
        elif self._cache is not None:
            self._cache.update(past_key_values)

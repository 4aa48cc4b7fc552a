"""The cache of a whole model: one entry a layer, whatever that layer remembers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from mindformers_ext.models.cache import RowCopy, copy_rows


def can_crop(model: Any, cache: KVCache) -> bool:
    """Whether all layers of a model can forget their last tokens, those on other stages of a pipeline included."""
    return bool(getattr(model, "can_crop_cache", cache.can_crop))


class KVCache(Sequence[Any]):
    """State of all layers.

    An entry is either the state object of one of this package's layers, which its layer extends in place, or a pair
    of tensors (key, value) ``[B, heads, S, D]`` as a foreign model returns them.

    Args:
        layers: one entry a layer.
    """

    def __init__(self, layers: Sequence[Any] = ()) -> None:
        self._layers = list(layers)

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._layers)

    @property
    def past_key_values(self) -> list[Any]:
        """The entries as a plain list."""
        return list(self._layers)

    @property
    def length(self) -> int:
        """Tokens that each row holds, pads included."""
        if not self._layers:
            return 0
        first = self._layers[0]
        return first[0].shape[2] if isinstance(first, tuple | list) else first.length

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(
            sum(t.size * t.itemsize for t in entry) if isinstance(entry, tuple | list) else entry.nbytes
            for entry in self._layers
        )

    def update(self, past_key_values: Sequence[Any]) -> None:
        """Replaces the entries by what the model returned for all tokens so far.

        Raises:
            ValueError: another number of layers than before.
        """
        if self._layers and len(past_key_values) != len(self._layers):
            raise ValueError(f"the model returned {len(past_key_values)} cache entries, {len(self._layers)} before")
        self._layers = list(past_key_values)

    def merge(self, past_key_values: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Appends keys and values of new tokens, pairs ``[B, heads, S, D]``, along the sequence."""
        if not self._layers:
            self._layers = [tuple(pair) for pair in past_key_values]
            return
        merged: list[Any] = []
        for entry, (key, value) in zip(self._layers, past_key_values, strict=True):
            if isinstance(entry, tuple | list):
                merged.append((ops.cat((entry[0], key), 2), ops.cat((entry[1], value), 2)))
            else:
                entry.update(key, value)
                merged.append(entry)
        self._layers = merged

    def reorder(self, rows: np.ndarray, shared: int = 0) -> None:
        """Makes row ``i`` of every entry a copy of what was row ``rows[i]``.

        Args:
            rows: int ``[new B]``.
            shared: the first so many tokens of both rows are known to be equal and need no copying.
        """
        for index, entry in enumerate(self._layers):
            if isinstance(entry, tuple | list):
                self._layers[index] = tuple(ops.gather(t, Tensor(rows.astype(np.int32)), 0) for t in entry)
            else:
                entry.reorder(rows, shared)

    def limit(self, max_length: int) -> None:
        """Changes how many tokens a row will ever hold; pairs of tensors hold what they hold."""
        for entry in self._layers:
            if not isinstance(entry, tuple | list):
                entry.limit(max_length)

    def shift(self, by: int) -> None:
        """Puts so many pads in front of every row, or, negative, takes them away."""
        for index, entry in enumerate(self._layers):
            if isinstance(entry, tuple | list):
                self._layers[index] = tuple(Tensor.from_numpy(_last_slots(t, t.shape[2] + by)) for t in entry)
            else:
                entry.shift(by)

    def take_rows(self, rows: np.ndarray, source: KVCache) -> None:
        """Makes rows those of another cache, whose last tokens are then the last ones here.

        Args:
            rows: int ``[n]``.
            source: a cache of n rows of the same model. What it holds beyond `length` tokens are pads.
        """
        for index, (entry, other) in enumerate(zip(self._layers, source, strict=True)):
            if isinstance(entry, tuple | list):
                arrays = [tensor.asnumpy().copy() for tensor in entry]
                for array, tensor in zip(arrays, other, strict=True):
                    array[rows] = _last_slots(tensor, array.shape[2])
                self._layers[index] = tuple(map(Tensor.from_numpy, arrays))
            else:
                entry.take_rows(rows, other)

    def copied(self, rows: np.ndarray) -> KVCache:
        """Returns a cache whose row ``i`` is a copy of row ``rows[i]``; this one stays as it is."""
        return KVCache(
            [
                tuple(ops.gather(t, Tensor(rows.astype(np.int32)), 0) for t in entry)
                if isinstance(entry, tuple | list)
                else copy_rows(entry, rows)
                for entry in self._layers
            ]
        )

    def crop(self, length: int) -> None:
        """Forgets all tokens from ``length`` on."""
        for index, entry in enumerate(self._layers):
            if isinstance(entry, tuple | list):
                self._layers[index] = tuple(mint.narrow(t, 2, 0, min(length, t.shape[2])) for t in entry)
            else:
                entry.crop(length)

    @property
    def can_crop(self) -> bool:
        """Whether every entry can forget its last tokens."""
        return all(isinstance(entry, tuple | list) or entry.can_crop for entry in self._layers)

    def take(self, source: KVCache, copies: Sequence[RowCopy], length: int) -> None:
        """Takes over rows of another cache of the same model; see `LayerState.take`."""
        for entry, given in zip(self._layers, source, strict=True):
            entry.take(given, copies, length)

    def rearrange(self, slots: np.ndarray) -> None:
        """Makes slot ``t`` of row ``i`` what was slot ``slots[i, t]``, int ``[B, T]``; others are forgotten."""
        for index, entry in enumerate(self._layers):
            if isinstance(entry, tuple | list):
                where = slots[:, None, :, None]
                self._layers[index] = tuple(
                    Tensor.from_numpy(np.take_along_axis(part.asnumpy(), where, axis=2)) for part in entry
                )
            else:
                entry.rearrange(slots)

    def detach(self) -> KVCache:
        """Cuts pairs of tensors off the gradient graph; state objects never are on it."""
        self._layers = [
            tuple(ops.stop_gradient(t) for t in entry) if isinstance(entry, tuple | list) else entry
            for entry in self._layers
        ]
        return self

    def clear(self) -> None:
        """Frees everything."""
        for entry in self._layers:
            if not isinstance(entry, tuple | list):
                entry.clear()
        self._layers = []


def _last_slots(tensor: Tensor, count: int) -> np.ndarray:
    """The last ``count`` slots of ``[B, heads, S, D]``; zeros in front where there are less."""
    array = tensor.asnumpy()
    result = np.zeros((*array.shape[:2], count, *array.shape[3:]), array.dtype)
    kept = min(count, array.shape[2])
    result[:, :, count - kept :] = array[:, :, array.shape[2] - kept :]
    return result

"""What the layers of one forward need to know of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
from mindspore import Tensor

from mindformers_ext.models.mask import attention_bias, check_mask
from mindformers_ext.models.rope import RotaryTable
from mindformers_ext.models.sequence_share import SequenceShare, share_of
from mindformers_ext.parallel.groups import ParallelContext

Value = TypeVar("Value")


class ForwardContext:
    """The tokens of one forward: which are real, where they stand, and what follows from that.

    A batch is aligned by slots: each of its B rows has ``past + length`` of them, and pads come first.

    Args:
        input_ids: int32 ``[B, S]``.
        position_ids: int ``[B or 1, S]``; None counts the real tokens of each row. Those of pads do not matter.
        attention_mask: None (no pads), ``[B, past + S]`` with 1 for a real token and 0 for a pad, or additive floats
            ``[B or 1, 1, S, past + S]``.
        past: tokens in the cache before these, pads included.
        tables: rotary tables by kind.

    Attributes:
        batch: rows B.
        length: new tokens S of each row.
        past: as given.
        input_ids: as given.
        positions: int ``[B, S]``; 0 at a row's first real token, and at its pads.
        real: bool ``[B, past + S]``, False for pads; None if there are none.
        real_rows: which of the new tokens are real, bool ``[B * S]``; None if all are.

        share: how processes share the tokens of this forward, of which those here are a part; None: they do not.

    Raises:
        ValueError: mask or positions have another shape.
    """

    def __init__(
        self,
        input_ids: Tensor,
        position_ids: np.ndarray | None,
        attention_mask: np.ndarray | None,
        past: int,
        tables: Mapping[str, RotaryTable],
    ) -> None:
        self.input_ids = input_ids
        self.batch, self.length = input_ids.shape
        self.past = past
        self._tables = tables
        self._rotary: dict[str, tuple[Tensor, Tensor]] = {}
        self._biases: dict[int, Tensor] = {}
        self._cached: dict[Hashable, Any] = {}
        self.share: SequenceShare | None = None
        if attention_mask is not None:
            check_mask(attention_mask, self.batch, self.length, past)
        self._mask = attention_mask
        self.real: np.ndarray | None = None
        if attention_mask is not None and attention_mask.ndim == 2 and not attention_mask.all():
            self.real = attention_mask != 0
        new = None if self.real is None else self.real[:, past:]
        self.real_rows = None if new is None or new.all() else new.reshape(-1)
        if position_ids is None and self.real is not None:
            position_ids = self.real.cumsum(1)[:, past:] - 1
        elif position_ids is None:
            position_ids = np.broadcast_to(np.arange(past, past + self.length), (self.batch, self.length))
        if position_ids.shape not in ((self.batch, self.length), (1, self.length)):
            raise ValueError(
                f"position_ids of shape {position_ids.shape} do not fit {self.batch} rows of {self.length} new tokens: "
                f"give [{self.batch}, {self.length}], or [1, {self.length}] for all rows"
            )
        position_ids = np.broadcast_to(position_ids, (self.batch, self.length))
        self.positions = position_ids if new is None else np.where(new, position_ids, 0)

    @property
    def has_additive_mask(self) -> bool:
        """Whether the caller says with additive floats which tokens see each other."""
        return self._mask is not None and self._mask.ndim == 4

    def rotary(self, kind: str = "main") -> tuple[Tensor, Tensor]:
        """Returns cos and sin of the new tokens, float32 ``[B, S, rotary_dim]``, both halves equal."""
        if kind not in self._rotary:
            cos, sin = self._tables[kind].lookup(self.positions)
            self._rotary[kind] = (Tensor.from_numpy(cos), Tensor.from_numpy(sin))
        return self._rotary[kind]

    def rotary_at(self, kind: str, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns cos and sin, float32 ``[..., rotary_dim]``, at other positions ``[...]``."""
        return self._tables[kind].lookup(positions)

    def shared(self, parallel: ParallelContext) -> ForwardContext:
        """Returns the tokens that this process computes where several share the sequence."""
        share = share_of(parallel, self.past, self.length, lambda: self.bias(self.length))
        if share is None or not share.is_split:
            self.share = share
            return self
        begin, end = share.own
        mask = None if self._mask is None else self._mask[..., :end]
        if mask is not None and mask.ndim == 4:
            mask = mask[:, :, begin:end]
        part = ForwardContext(
            Tensor.from_numpy(np.ascontiguousarray(self.input_ids.asnumpy()[:, begin:end])),
            self.positions[:, begin:end],
            mask,
            begin,
            self._tables,
        )
        part.share = share
        return part

    def bias(self, slots: int) -> Tensor:
        """Returns the causal bias, float32 ``[B or 1, 1, S, slots]``; pads and slots past the new tokens are masked."""
        if slots not in self._biases:
            bias = attention_bias(self._mask, self.batch, self.length, self.past, slots)
            self._biases[slots] = Tensor.from_numpy(bias)
        return self._biases[slots]

    def visible(self, slots: int) -> np.ndarray | Tensor:
        """Returns what each new token may see, as `ops.attention_block` takes it.

        The first slot of each row, int64 ``[B]``, where pads come first and causality says the rest; else `bias`.
        """
        if self.has_additive_mask:
            return self.bias(slots)
        first = self.cached("first slots", self._first_slots)
        return self.bias(slots) if first is None else first

    def _first_slots(self) -> np.ndarray | None:
        if self.real is None:
            return np.zeros(self.batch, np.int64)
        if (self.real[:, 1:] < self.real[:, :-1]).any():
            return None
        return self.real.shape[1] - self.real.sum(1, dtype=np.int64)

    def cached(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns what ``make()`` gives, which is called once a key: for what several layers derive from the tokens."""
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

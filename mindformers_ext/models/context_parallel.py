"""Sequences that several processes share.

The first tokens of a sequence are split into contiguous parts, one a process. Each process computes its own tokens
against the keys of all, and keeps its own keys. Later tokens are computed by all processes; their keys go to one
process after the other, and what each process finds in its part of the cache is joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.models.cache import LayerState, SlotState
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.mask import MASKED
from mindformers_ext.models.sequence_share import SequenceShare
from mindformers_ext.parallel.collectives import Group


class SharedState(LayerState):
    """The keys of some slots of a sequence that several processes share.

    Args:
        state: buffers for the slots of this process.
        group: the processes that share the sequence.

    Attributes:
        length: tokens of the whole sequence.
        slots: int ``[n]``, the slots that are kept here, ascending, in the order of the buffers.
    """

    can_crop = True

    def __init__(self, state: SlotState, group: Group) -> None:
        super().__init__(state.max_length)
        self.state, self._group = state, group
        # A part of the first tokens and a part of those after them, each rounded up.
        state.max_length = state.max_length // group.size + 2
        self.slots = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of this process."""
        return self.state.nbytes

    def reserve(self, length: int) -> None:
        """See `LayerState.reserve`."""
        super().reserve(length)
        # Of the new tokens a process keeps its part, and one more where they do not divide.
        self.state.reserve(min(len(self.slots) + (length - self.length) // self._group.size + 1, self.state.max_length))

    def keep(self, share: SequenceShare, *values: Tensor) -> None:
        """Adds those new tokens that this process keeps.

        Args:
            share: the tokens of this forward.
            values: ``[B, heads, S, D]`` of the tokens that this process computes, one tensor a buffer.
        """
        chosen, (begin, _) = share.kept(), share.own
        if len(chosen) == values[0].shape[2]:
            self.state.append(*values)
        elif len(chosen):
            self.state.append(
                *(Tensor.from_numpy(np.ascontiguousarray(value.asnumpy()[:, :, chosen])) for value in values)
            )
        self.slots = np.concatenate((self.slots, share.past + begin + chosen))
        self.length = share.past + share.total

    def bias(self, context: ForwardContext) -> Tensor:
        """Bias of the new tokens over the slots of this process, float32 ``[B or 1, 1, S, capacity]``."""

        def make() -> Tensor:
            whole = context.bias(context.past + context.length).asnumpy()
            bias = np.full((*whole.shape[:3], self.state.capacity), MASKED, np.float32)
            bias[..., : len(self.slots)] = whole[..., self.slots]
            return Tensor.from_numpy(bias)

        return context.cached(("shared", self.state.capacity), make)

    def reorder(self, rows: np.ndarray, shared: int = 0) -> None:
        """See `LayerState.reorder`."""
        self.state.reorder(rows, int(np.searchsorted(self.slots, shared)))

    def crop(self, length: int) -> None:
        """See `LayerState.crop`."""
        self.length = min(self.length, length)
        self.slots = self.slots[self.slots < length]
        self.state.crop(len(self.slots))

    def clear(self) -> None:
        """See `LayerState.clear`."""
        self.state.clear()
        self.slots, self.length = self.slots[:0], 0


def join_parts(out: Tensor, logs: Tensor, group: Group) -> Tensor:
    """Joins what the processes of a group found in their parts of the keys; see `ops.partial_attention`."""
    weights = ops.join_weights(Tensor.from_numpy(group.all_gather(logs.asnumpy()))).asnumpy()[group.rank]
    rows, heads = weights.shape
    scaled = out.asnumpy().reshape(rows, heads, -1) * weights[..., None]
    return Tensor.from_numpy(group.all_reduce(scaled.reshape(rows, -1)))


def shared_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: ForwardContext,
    share: SequenceShare,
    state: SharedState | None,
    scale: float,
) -> Tensor:
    """Grouped-query attention of the tokens that this process computes over the whole sequence.

    Args:
        query: float32 ``[B, N, G, S, D]`` of these tokens.
        key: float32 ``[B, N, S, D]`` of them; so ``value``.
        value: see there.
        context: these tokens.
        share: how the processes share the sequence.
        state: keys and values that this process keeps.
        scale: factor of the scores.

    Returns:
        float32 ``[B * S, N * G * Dv]``.
    """
    if state is not None:
        state.keep(share, key, value)
    if share.is_split:
        if share.ulysses.size > 1:
            return _by_heads(query, key, value, context, share, scale)
        keys, values = share.gather(key, 2), share.gather(value, 2)
        return ops.attention(query, keys, values, context.bias(share.total), scale)
    if state is None:
        return ops.attention(query, key, value, context.bias(share.total), scale)
    kept_key, kept_value = state.state.buffers
    parts = ops.partial_attention(query, kept_key, kept_value, state.bias(context), scale)
    return join_parts(*parts, share.group)


def _by_heads(
    query: Tensor, key: Tensor, value: Tensor, context: ForwardContext, share: SequenceShare, scale: float
) -> Tensor:
    """Exchanges tokens for heads, attends with some heads, and exchanges back (DeepSpeed Ulysses, arXiv 2309.14509).

    Neighbours exchange: each has then some heads of the tokens of all of them. The keys of these heads are gathered
    from the other groups of neighbours, if there are any.
    """
    group, batch, mine = share.ulysses, context.batch, share.length
    # With fewer key-value heads than processes, each copy of one goes with a part of its queries.
    copies = group.size // math.gcd(group.size, key.shape[1])
    first = share.group.rank - group.rank
    begin, end = share.block(first // group.size)
    parts = [share.part(first + index) for index in range(group.size)]
    longest = max(stop - start for start, stop in parts)

    def by_head(array: np.ndarray) -> Tensor:
        """``[B, N, ..., S_own, D]`` of all heads to ``[B, N / size, ..., S_block, D]`` of some."""
        heads = array.shape[1] // group.size
        moved = np.moveaxis(array.reshape(batch, group.size, heads, *array.shape[2:]), (1, -2), (0, 1))
        sent = np.zeros((group.size, longest, *moved.shape[2:]), np.float32)
        sent[:, :mine] = moved
        received = group.all_to_all(sent)
        tokens = np.concatenate([rows[: stop - start] for rows, (start, stop) in zip(received, parts, strict=True)])
        return Tensor.from_numpy(np.ascontiguousarray(np.moveaxis(tokens, 0, -2)))

    def bias() -> Tensor:
        assert share.bias is not None
        return Tensor.from_numpy(np.ascontiguousarray(share.bias().asnumpy()[:, :, begin:end]))

    queries = query.asnumpy().reshape(batch, key.shape[1] * copies, -1, *query.shape[-2:])
    keys, values = (by_head(part.asnumpy().repeat(copies, axis=1)) for part in (key, value))
    attended = ops.attention(
        *(by_head(queries), share.gather_blocks(keys, 2), share.gather_blocks(values, 2)),
        *(context.cached("bias of neighbours", bias), scale),
    )
    tokens = attended.asnumpy().reshape(batch, end - begin, -1)
    sent = np.zeros((group.size, batch, longest, tokens.shape[-1]), np.float32)
    for index, (start, stop) in enumerate(parts):
        sent[index, :, : stop - start] = tokens[:, start - begin : stop - begin]
    received = group.all_to_all(sent)[:, :, :mine]
    return Tensor.from_numpy(np.ascontiguousarray(received.transpose(1, 2, 0, 3)).reshape(batch * mine, -1))


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def joined_attend(share: SequenceShare) -> Attend:
    """Returns attention over a process' part of the keys, joined over the group: ``(query, keys, bias, scale)``."""

    def attend(query: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
        return join_parts(*ops.partial_attention(query, keys, keys, bias, scale), share.group)

    return attend

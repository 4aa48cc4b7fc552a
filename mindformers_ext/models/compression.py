"""Which tokens of a forward close which windows, worked out once for all layers of one rate.

Rows of a batch may have different numbers of pads, so they are at different places of their windows. Everything is
computed from a token's position in its row: position p belongs to window ``p // rate``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from mindspore import Tensor

from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.mask import MASKED


@dataclass(frozen=True)
class CompressionPlan:
    """The windows that the tokens of a forward close.

    Attributes:
        rate: tokens of a window.
        count: blocks of the longest row, with those that close now.
        closed: most windows M that one row closes now.
        offsets: int ``[B * S]``, place of each new token in its window.
        index: int32 ``[B, M, W]``, the rows of a table of tokens that each block mixes; see `compression_plan`.
        rotary: cos and sin at the first token of each of these windows, float32 ``[B * M, rotary_dim]``.
        rows: int ``[n]``, rows of the batch of the n windows that really close; others fill up ``index``.
        slots: int ``[n]``, numbers of their blocks.
        chosen: int ``[n]``, their places among the B times M.
    """

    rate: int
    count: int
    closed: int
    offsets: np.ndarray
    index: np.ndarray
    rotary: tuple[Tensor, Tensor]
    rows: np.ndarray
    slots: np.ndarray
    chosen: np.ndarray


def pads_of(context: ForwardContext) -> np.ndarray:
    """Pads of each row among the slots so far, int ``[B]``.

    Raises:
        ValueError: pads stand behind real tokens.
    """
    real = context.real
    if real is None:
        return np.zeros(context.batch, np.int64)

    def count() -> np.ndarray:
        if (real[:, :-1] & ~real[:, 1:]).any():
            raise ValueError("attention_mask has pads behind real tokens; sparse attention needs all pads on the left")
        return real.shape[1] - real.sum(1)

    return context.cached("pads", count)


def visible_blocks(context: ForwardContext, rate: int) -> np.ndarray:
    """Blocks that each new token may attend to: those of windows that end with it or before, int ``[B or 1, S]``."""
    pads = pads_of(context)
    first = pads if context.real is not None else pads[:1]
    slots = np.arange(context.past, context.past + context.length)
    return np.maximum(slots - first[:, None] + 1, 0) // rate


def block_bias(context: ForwardContext, plan: CompressionPlan) -> Tensor:
    """Bias ``[B or 1, S, T]`` under which a token sees all blocks that it may attend to."""

    def make() -> Tensor:
        visible = np.arange(plan.count) < visible_blocks(context, plan.rate)[..., None]
        return Tensor.from_numpy(np.where(visible, np.float32(0), MASKED))

    return context.cached(("blocks", plan.rate, plan.count), make)


def compression_plan(context: ForwardContext, rate: int, series: int, has_state: bool) -> CompressionPlan:
    """Plans the windows of one forward.

    ``index`` counts in a table of the rows' tokens, one row after the other, each token as ``series`` entries: its part
    in the next window's block and the one in its own, or only the latter. A row's tokens are

    - with state and one new token: the ring of ``series * rate`` slots, which holds the new token already;
    - with state and more: that ring as it was before, then the new tokens;
    - without state: ``(series - 1) * rate`` slots before the first token, then the new tokens.
    """
    return context.cached(("plan", rate, series, has_state), lambda: _make_plan(context, rate, series, has_state))


def _make_plan(context: ForwardContext, rate: int, series: int, has_state: bool) -> CompressionPlan:
    past, length, pads = context.past, context.length, pads_of(context)
    first, last = (np.maximum(end - pads, 0) // rate for end in (past, past + length))
    closed = int((last - first).max())
    slots = np.arange(past, past + length)
    offsets = ((slots - pads[:, None]) % rate).reshape(-1)
    windows = first[:, None] + np.arange(closed)
    closes = windows < last[:, None]
    places = np.arange(series * rate) - (series - 1) * rate
    tokens = (windows * rate + pads[:, None])[:, :, None] + places
    ring = (series if has_state else series - 1) * rate
    inside = tokens % ring if ring else tokens
    if has_state and length == 1:
        width = ring
    else:
        width = ring + length
        inside = np.where(tokens >= past, ring + tokens - past, inside)
    inside = np.where(closes[:, :, None], inside, 0) + np.arange(context.batch)[:, None, None] * width
    index = inside * series + (places >= 0) if series == 2 else inside
    cos, sin = context.rotary_at("compress", (windows * rate).reshape(-1))
    rows, columns = np.nonzero(closes)
    return CompressionPlan(
        rate=rate,
        count=int(last.max()),
        closed=closed,
        offsets=offsets,
        index=index.astype(np.int32),
        rotary=(Tensor.from_numpy(cos), Tensor.from_numpy(sin)),
        rows=rows,
        slots=windows[rows, columns],
        chosen=rows * closed + columns,
    )

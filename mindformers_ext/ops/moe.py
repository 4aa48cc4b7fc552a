"""Mixture of experts: which experts a token gets, and their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function

from mindformers_ext.ops import autograd, host, native
from mindformers_ext.ops.backend import device_target, recording_gradient
from mindformers_ext.ops.native.packed import PackedStack, packed_experts

_NOT_CHOSEN = np.float32(-np.inf)
_TINY = 1e-20


@dataclass(frozen=True)
class Routing:
    """How tokens choose their experts.

    Attributes:
        top_k: experts of a token.
        score_function: ``softmax``, ``sigmoid`` or ``sqrtsoftplus`` of the router's logits.
        normalise: divide the weights of a token's experts by their sum.
        scale: factor of the weights.
        groups: groups of experts; the best of them are chosen by the sum of their two best scores.
        group_top_k: groups from which a token chooses.
    """

    top_k: int
    score_function: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    group_top_k: int = 1


def route(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    chosen: np.ndarray | None = None,
    real: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of every token (grouped choice and bias: DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        logits: float32 ``[N, E]``.
        routing: the rule.
        bias: float32 ``[E]``, added to the scores for the choice only.
        chosen: int32 ``[N, K]``, where the choice is given and only the weights are computed.
        real: bool ``[N]``, False for pads, which get no expert; None if all are real.

    Returns:
        Experts int32 ``[N, K]``, -1 for those of pads, and their weights float32 ``[N, K]``. Equal scores: the lower
        index wins.
    """
    if device_target() == "CPU" and not recording_gradient():
        scores = _host_scores(logits.asnumpy(), routing.score_function)
        ids = _host_choice(scores, routing, bias) if chosen is None else chosen
        weights = np.take_along_axis(scores, ids, 1)
        if routing.normalise:
            weights /= weights.sum(1, keepdims=True) + np.float32(_TINY)
        weights *= np.float32(routing.scale)
        ids = ids if real is None else np.where(real[:, None], ids, -1)
        return Tensor.from_numpy(np.ascontiguousarray(ids, np.int32)), Tensor.from_numpy(weights)
    scores = _reference_scores(logits, routing.score_function)
    if chosen is None:
        selected = _reference_choice(ops.stop_gradient(scores), routing, bias)
    else:
        selected = Tensor(np.ascontiguousarray(chosen, np.int32))
    weights = ops.gather_d(scores, 1, selected)
    if routing.normalise:
        weights = weights / (weights.sum(1, keepdims=True) + _TINY)
    if real is not None:
        keep = Tensor(real.astype(np.int32)).reshape(-1, 1)
        selected = selected * keep + (keep - 1)
    return selected, weights * routing.scale


def _host_scores(logits: np.ndarray, function: str) -> np.ndarray:
    if function == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        return scores
    if function == "sigmoid":
        with np.errstate(over="ignore"):
            return np.float32(1) / (np.float32(1) + np.exp(-logits))
    return np.sqrt(np.logaddexp(logits, np.float32(0)))


def _host_choice(scores: np.ndarray, routing: Routing, bias: Tensor | None) -> np.ndarray:
    ranked = scores if bias is None else scores + bias.asnumpy()
    if routing.groups > 1:
        grouped = ranked.reshape(len(ranked), routing.groups, -1)
        best = -np.partition(-grouped, 1, axis=-1)[..., :2].sum(-1) if grouped.shape[-1] > 2 else grouped.sum(-1)
        kept = _top(best, routing.group_top_k)
        allowed = np.zeros(best.shape, bool)
        np.put_along_axis(allowed, kept, True, 1)
        ranked = np.where(allowed[..., None], grouped, _NOT_CHOSEN).reshape(ranked.shape)
    return _top(ranked, routing.top_k)


def _top(values: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def _reference_scores(logits: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return ops.softmax(logits, -1)
    if function == "sigmoid":
        return ops.sigmoid(logits)
    # softplus by operations whose gradients a CPU has.
    return ops.sqrt(ops.relu(logits) + ops.log(1.0 + ops.exp(-ops.abs(logits))))


def _reference_choice(scores: Tensor, routing: Routing, bias: Tensor | None) -> Tensor:
    ranked = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = ranked.reshape(ranked.shape[0], routing.groups, -1)
        best = ops.topk(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        kept = ops.topk(best, routing.group_top_k)[1]
        allowed = (kept.expand_dims(-1) == ops.arange(routing.groups)).astype(ms.float32).sum(1)
        ranked = (grouped + (allowed.expand_dims(-1) - 1.0) * 1e30).reshape(ranked.shape)
    return ops.topk(ranked, routing.top_k)[1].astype(ms.int32)


def experts(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    weight1: Tensor | PackedStack,
    weight2: Tensor | PackedStack,
    limit: float = 0.0,
) -> Tensor:
    """Sends tokens through their experts and sums what comes back: one product an expert that has tokens.

    Args:
        x: float32 ``[N, H]``.
        ids: int32 ``[N, K]``, experts of each token, -1 for none.
        factors: float32 ``[N, K]``, their weights.
        weight1: float32 ``[E, H, 2 F]``, gate beside up; or packed, and then so is ``weight2``.
        weight2: float32 ``[E, F, H]``.
        limit: see `mindformers_ext.ops.swiglu`.

    Returns:
        float32 ``[N, H]``: the sum over k of ``factors[:, k] * (silu(x gate) * (x up)) weight2``.
    """
    if isinstance(weight1, PackedStack) and isinstance(weight2, PackedStack):
        pairs = sort_by_expert(ids.asnumpy(), len(weight1.matrices))
        return packed_experts(x, pairs, factors, weight1, weight2, limit)
    if isinstance(weight1, PackedStack) or isinstance(weight2, PackedStack):
        raise TypeError("either both weights of the experts are packed or none")
    if device_target() != "CPU":
        return _reference_experts(x, ids, factors, weight1, weight2, limit)
    if recording_gradient():
        return _Experts.apply(x, ids, factors, weight1, weight2, limit)
    if native.available():
        return native.experts(x, sort_by_expert(ids.asnumpy(), weight1.shape[0]), factors, weight1, weight2, limit)
    return _host_experts(x, ids, factors, weight1, weight2, limit)


@dataclass(frozen=True)
class Pairs:
    """The pairs (token, expert) of a batch, by expert.

    Attributes:
        slots: int ``[P]``, index into the flat ``[N * K]`` choice of each pair.
        rows: int32 ``[P]``, token of each pair.
        starts: int64 ``[E + 1]``, where each expert's pairs begin.
    """

    slots: np.ndarray
    rows: np.ndarray
    starts: np.ndarray

    def used(self) -> list[tuple[int, slice]]:
        """Every expert that has pairs, and where they are."""
        begins, ends = self.starts[:-1].tolist(), self.starts[1:].tolist()
        return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(begins, ends, strict=True)) if a < b]


def sort_by_expert(ids: np.ndarray, num_experts: int) -> Pairs:
    """Sorts the choice int32 ``[N, K]`` by expert; -1 drops out."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    starts = np.searchsorted(flat[order], np.arange(num_experts + 1))
    order = order[starts[0] :]
    return Pairs(order, (order // ids.shape[1]).astype(np.int32), (starts - starts[0]).astype(np.int64))


def _reference_experts(
    x: Tensor, ids: Tensor, factors: Tensor, weight1: Tensor, weight2: Tensor, limit: float
) -> Tensor:
    pairs = sort_by_expert(ids.asnumpy(), weight1.shape[0])
    parts = []
    for expert, where in pairs.used():
        rows = ops.gather(x, Tensor(pairs.rows[where]), 0)
        gate, up = ops.Split(-1, 2)(ops.MatMul()(rows, weight1[expert]))
        if limit:
            gate, up = ops.clamp(gate, max=limit), ops.clamp(up, -limit, limit)
        parts.append(ops.MatMul()(mint.nn.functional.silu(gate) * up, weight2[expert]))
    # Back in the order of the choice, where pads find a row of zeros.
    count, top_k = ids.shape
    places = np.full(count * top_k, len(pairs.slots), np.int32)
    places[pairs.slots] = np.arange(len(pairs.slots))
    joined = ops.cat([*parts, ops.zeros((1, x.shape[1]), ms.float32)], 0)
    by_choice = ops.gather(joined, Tensor(places), 0).reshape(count, top_k, -1)
    return (by_choice * factors.expand_dims(-1)).sum(1)


def _host_experts(x: Tensor, ids: Tensor, factors: Tensor, weight1: Tensor, weight2: Tensor, limit: float) -> Tensor:
    values, flat = x.asnumpy(), factors.asnumpy().reshape(-1)
    pairs = sort_by_expert(ids.asnumpy(), weight1.shape[0])
    first, second = weight1.asnumpy(), weight2.asnumpy()
    result = np.zeros(values.shape, np.float32)
    for expert, where in pairs.used():
        hidden = values[pairs.rows[where]] @ first[expert]
        gate, up = np.split(hidden, 2, axis=1)
        active = np.empty(gate.shape, np.float32)
        host.gated_product(gate, up, limit, active)
        # A token has an expert once at most, so no row is there twice.
        result[pairs.rows[where]] += (active @ second[expert]) * flat[pairs.slots[where], None]
    return Tensor.from_numpy(result)


class _Experts(_Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, factors: Tensor, weight1: Tensor, weight2: Tensor, limit: float
    ) -> Tensor:
        ctx.x, ctx.ids, ctx.factors, ctx.limit = x.asnumpy(), ids.asnumpy(), factors.asnumpy(), limit
        ctx.weights = weight1.asnumpy(), weight2.asnumpy()
        return _host_experts(x, ids, factors, weight1, weight2, limit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        first, second = ctx.weights
        pairs, flat, by_result = sort_by_expert(ctx.ids, len(first)), ctx.factors.reshape(-1), gradient.asnumpy()
        by_x, by_factors = np.zeros_like(ctx.x), np.zeros_like(flat)
        by_first, by_second = np.zeros_like(first), np.zeros_like(second)
        for expert, where in pairs.used():
            rows, slots = pairs.rows[where], pairs.slots[where]
            gate, up = np.split(ctx.x[rows] @ first[expert], 2, axis=1)
            active = np.empty(gate.shape, np.float32)
            host.gated_product(gate, up, ctx.limit, active)
            by_rows = by_result[rows]
            by_active = by_rows @ second[expert].T
            by_factors[slots] = np.einsum("nf,nf->n", by_active, active)
            by_active *= flat[slots, None]
            by_second[expert] = active.T @ (by_rows * flat[slots, None])
            by_hidden = np.concatenate(autograd.gated_product_gradient(gate, up, ctx.limit, by_active), axis=1)
            by_first[expert] = ctx.x[rows].T @ by_hidden
            by_x[rows] += by_hidden @ first[expert].T
        by_factors = by_factors.reshape(ctx.factors.shape)
        return (
            Tensor.from_numpy(by_x),
            None,
            Tensor.from_numpy(by_factors),
            Tensor.from_numpy(by_first),
            Tensor.from_numpy(by_second),
            None,
        )

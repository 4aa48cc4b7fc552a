"""The numpy operations of `host` with gradients of their own, for training on a CPU.

MindSpore's gradients of these small operations cost several times the matrix products between which they stand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from mindformers_ext.ops import host, reference


def _norm_gradient(
    x: np.ndarray, weight: np.ndarray, eps: float, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient of ``x r(x) weight`` by ``x``, and ``gradient x r``, whose sum over rows is the gradient by ``weight``.

    With ``r = 1 / sqrt(mean(x^2) + eps)`` and ``g = gradient * weight``: ``r g - x r^3 mean(g x)``.
    """
    inverse = host.inverse_rms(x, eps)
    normed = x * inverse
    weighted = gradient * weight
    projection = np.einsum("...i,...i->...", weighted, normed)[..., None] * np.float32(1 / x.shape[-1])
    weighted -= normed * projection
    weighted *= inverse
    normed *= gradient
    return weighted, normed


class _RmsNorm(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.x, ctx.weight, ctx.eps = x.asnumpy(), weight.asnumpy(), eps
        return host.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        by_x, factors = _norm_gradient(ctx.x, ctx.weight, ctx.eps, gradient.asnumpy())
        return Tensor.from_numpy(by_x), Tensor.from_numpy(factors.sum(0)), None


class _AddRmsNorm(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed = host.add_rms_norm(x, update, weight, eps)
        ctx.total, ctx.weight, ctx.eps = total.asnumpy(), weight.asnumpy(), eps
        return total, normed

    @staticmethod
    def backward(ctx: Any, by_total: Tensor, by_normed: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        by_x, factors = _norm_gradient(ctx.total, ctx.weight, ctx.eps, by_normed.asnumpy())
        by_x += by_total.asnumpy()
        return Tensor.from_numpy(by_x), Tensor.from_numpy(by_x.copy()), Tensor.from_numpy(factors.sum(0)), None


class _Swiglu(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.x, ctx.limit = x.asnumpy(), limit
        return host.swiglu(x, limit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        values, by_result = ctx.x, gradient.asnumpy()
        by_x = np.empty_like(values)

        def block(rows: slice) -> None:
            by_x[rows, ::2], by_x[rows, 1::2] = gated_product_gradient(
                values[rows, ::2], values[rows, 1::2], ctx.limit, by_result[rows]
            )

        host.by_blocks(block, *values.shape)
        return Tensor.from_numpy(by_x), None


def gated_product_gradient(
    gate: np.ndarray, up: np.ndarray, limit: float, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradients of `host.gated_product` by gate and by up, all ``[N, F]``."""
    bounded_gate, bounded_up = gate, up
    if limit:
        bounded_gate = np.minimum(gate, np.float32(limit))
        bounded_up = np.clip(up, np.float32(-limit), np.float32(limit))
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-bounded_gate))
    part = gradient * sigmoid
    by_up = part * bounded_gate
    by_gate = part * (1 + bounded_gate * (1 - sigmoid)) * bounded_up
    if limit:
        by_gate[gate > limit] = 0
        by_up[np.abs(up) > limit] = 0
    return by_gate, by_up


class _QkvHeads(_Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, query_norm: Any, key_norm: Any, options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, eps, dim, gated = options
        norms = None if query_norm is None else (query_norm, key_norm)
        ctx.qkv, ctx.cos, ctx.sin, ctx.groups, ctx.eps = qkv.asnumpy(), cos.asnumpy(), sin.asnumpy(), groups, eps
        ctx.norms = (None, None) if norms is None else (query_norm.asnumpy(), key_norm.asnumpy())
        return host.qkv_heads(qkv, cos, sin, groups, norms, eps, dim, gated)

    @staticmethod
    def backward(ctx: Any, by_query: Tensor, by_key: Tensor, by_value: Tensor) -> tuple[Any, ...]:
        batch, length, rotary_dim = ctx.cos.shape
        heads, dim, half = by_query.shape[2], by_query.shape[4], rotary_dim // 2
        by_qkv = np.zeros_like(ctx.qkv).reshape(batch, length, ctx.groups, -1, dim)  # 0 for gates
        values = ctx.qkv.reshape(by_qkv.shape)
        cos, sin = ctx.cos[:, :, None, None], ctx.sin[:, :, None, None]
        by_norms: list[Tensor | None] = []
        for part, gradient, weight in (
            (slice(heads), by_query.asnumpy().transpose(0, 3, 1, 2, 4), ctx.norms[0]),
            (slice(-2, -1), by_key.asnumpy()[:, :, None].transpose(0, 3, 1, 2, 4), ctx.norms[1]),
        ):
            target = by_qkv[:, :, :, part]
            np.multiply(gradient[..., :rotary_dim], cos, out=target[..., :rotary_dim])
            target[..., :half] += gradient[..., half:rotary_dim] * sin[..., half:]
            target[..., half:rotary_dim] -= gradient[..., :half] * sin[..., :half]
            target[..., rotary_dim:] = gradient[..., rotary_dim:]
            if weight is not None:
                target[...], factors = _norm_gradient(values[:, :, :, part], weight, ctx.eps, target)
                by_norms.append(Tensor.from_numpy(factors.sum((0, 1, 2, 3))))
            else:
                by_norms.append(None)
        by_qkv[:, :, :, -1] = by_value.asnumpy().transpose(0, 2, 1, 3)
        return Tensor.from_numpy(by_qkv.reshape(ctx.qkv.shape)), None, None, *by_norms, None


class _AttentionWeights(_Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, scale: float) -> Tensor:
        weights = host.attention_weights(scores.copy(), bias, scale)
        ctx.weights, ctx.scale = weights.asnumpy(), scale
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        by_scores = gradient.asnumpy() - np.einsum("...i,...i->...", gradient.asnumpy(), ctx.weights)[..., None]
        by_scores *= ctx.weights
        by_scores *= np.float32(ctx.scale)
        return Tensor.from_numpy(by_scores), None, None


class _MergeHeads(_Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor) -> Tensor:
        ctx.shape = mixed.shape
        return host.merge_heads(mixed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        batch, groups, heads, length, dim = ctx.shape
        values = gradient.asnumpy().reshape(batch, length, groups, heads, dim)
        return Tensor.from_numpy(np.ascontiguousarray(values.transpose(0, 2, 3, 1, 4)))


class _CrossEntropy(_Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        ctx.labels, ctx.shape, ctx.ignore_index = labels.asnumpy(), logits.shape, ignore_index
        ctx.probabilities, loss = host.softmax_and_loss(logits.asnumpy(), ctx.labels, ignore_index)
        return Tensor.from_numpy(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows = np.flatnonzero(ctx.labels != ctx.ignore_index)
        by_rows = ctx.probabilities.copy()
        by_rows[np.arange(len(rows)), ctx.labels[rows]] -= 1
        by_rows *= gradient.asnumpy() / max(len(rows), 1)
        by_logits = np.zeros(ctx.shape, np.float32)
        by_logits[rows] = by_rows
        return Tensor.from_numpy(by_logits), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mindformers_ext.ops.rms_norm`."""
    return _RmsNorm.apply(x, weight, eps)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `mindformers_ext.ops.add_rms_norm`."""
    return _AddRmsNorm.apply(x, update, weight, eps)


def swiglu(x: Tensor, limit: float = 0.0) -> Tensor:
    """See `mindformers_ext.ops.swiglu`."""
    return _Swiglu.apply(x, limit)


def qkv_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    dim: int | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `mindformers_ext.ops.qkv_heads`."""
    query_norm, key_norm = (None, None) if norms is None else norms
    return _QkvHeads.apply(qkv, cos, sin, query_norm, key_norm, (groups, eps, dim, gated))


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """See `mindformers_ext.ops.attention`."""
    weights = _AttentionWeights.apply(reference.attention_scores(query, key), bias, scale)
    return _MergeHeads.apply(reference.attention_mix(weights, value))


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """See `mindformers_ext.ops.cross_entropy`."""
    return _CrossEntropy.apply(logits, labels, ignore_index)

"""Tensor operations, and which implementation each device gets.

Every function takes and returns MindSpore tensors. `reference` holds the plain, differentiable MindSpore
version that runs on every device; `host` holds numpy versions for the small tensors of a decode step on a CPU,
where dispatching a MindSpore operation costs more than its arithmetic. A gradient is never recorded through
`host`.
"""

from __future__ import annotations

from mindspore import Tensor

from mindformers_ext.ops import host, reference
from mindformers_ext.ops.backend import describe, host_pays
from mindformers_ext.ops.reference import cross_entropy, embedding, linear

__all__ = [
    "attention",
    "cross_entropy",
    "describe",
    "embedding",
    "linear",
    "rms_norm",
    "rotary",
    "swiglu",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation over the last axis: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: float32, any shape ``[..., D]``.
        weight: float32, shape ``[D]`` or one that broadcasts against ``x``.
        eps: added to the mean square.
    """
    return (host if host_pays(x) else reference).rms_norm(x, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs ``(x[i], x[i + D/2])`` of the last axis by the angles whose cos and sin are given.

    Args:
        x: float32 ``[..., D]``.
        cos: float32, broadcasts against ``x``; both halves of its last axis are equal.
        sin: as ``cos``.
    """
    return (host if host_pays(x) else reference).rotary(x, cos, sin)


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` where gate and up alternate along the last axis.

    Args:
        x: float32 ``[N, 2 F]``; even columns are gates, odd columns are ups.

    Returns:
        float32 ``[N, F]``.
    """
    return (host if host_pays(x) else reference).swiglu(x)


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Grouped-query attention: ``softmax(scale * query key^T + bias) value``.

    Args:
        query: float32 ``[B, N, G, S, D]``: N key-value heads, G query heads for each of them.
        key: float32 ``[B, N, T, D]``.
        value: float32 ``[B, N, T, Dv]``.
        bias: float32, ``[B or 1, 1, S, T]``.
        scale: factor of the scores.

    Returns:
        float32 ``[B, S, N * G * Dv]``.
    """
    softmax = host.attention_weights if host_pays(query) else reference.attention_weights
    return reference.attention(query, key, value, bias, scale, softmax)

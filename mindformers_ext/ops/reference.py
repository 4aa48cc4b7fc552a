"""Plain MindSpore implementations: differentiable, and made of operations that every device has."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, mint, ops

_matmul_transposed = ops.MatMul(transpose_b=True)
_batch_matmul = ops.BatchMatMul()
_batch_matmul_transposed = ops.BatchMatMul(transpose_b=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias`` for x ``[N, in]`` and weight ``[out, in]``, without transposing the weight in memory."""
    product = _matmul_transposed(x, weight)
    return product if bias is None else product + bias


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows ``ids`` (int32, any shape) of ``table`` ``[V, H]``."""
    return ops.gather(table, ids, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mindformers_ext.ops.rms_norm`."""
    return x * ops.rsqrt(mint.mean(ops.square(x), -1, True) + eps) * weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `mindformers_ext.ops.rotary`."""
    first, second = mint.split(x, x.shape[-1] // 2, -1)
    return x * cos + ops.cat((-second, first), -1) * sin


def swiglu(x: Tensor) -> Tensor:
    """See `mindformers_ext.ops.swiglu`."""
    pairs = x.reshape(x.shape[0], -1, 2)
    gate, up = pairs[:, :, 0], pairs[:, :, 1]
    return mint.nn.functional.silu(gate) * up


def attention_weights(scores: Tensor, bias: Tensor, scale: float) -> Tensor:
    """``softmax(scale * scores + bias)`` over the last axis; scores ``[B, N, G, S, T]``, bias ``[B or 1, 1, S, T]``."""
    return ops.softmax(scores * scale + bias.expand_dims(1), -1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: float,
    softmax: Callable[[Tensor, Tensor, float], Tensor] = attention_weights,
) -> Tensor:
    """See `mindformers_ext.ops.attention`; ``softmax`` turns scores into weights."""
    batch, groups, heads, length, dim = query.shape
    rows = (batch * groups, heads * length, -1)
    # The query heads of a group share its keys: they become rows of one product instead of copies of the keys.
    scores = _batch_matmul_transposed(query.reshape(rows), key.reshape(batch * groups, -1, dim))
    weights = softmax(scores.reshape(batch, groups, heads, length, -1), bias, scale)
    mixed = _batch_matmul(weights.reshape(rows), value.reshape(batch * groups, -1, value.shape[-1]))
    if length > 1:
        mixed = mixed.reshape(batch, groups, heads, length, -1).permute(0, 3, 1, 2, 4)
    return mixed.reshape(batch, length, -1)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean negative log likelihood (scalar float32) of labels int32 ``[N]`` under logits ``[N, V]``.

    Labels equal to ``ignore_index`` do not count; with none left the loss is 0.
    """
    total = ops.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    counted = (labels != ignore_index).astype(ms.float32).sum()
    return total / ops.maximum(counted, Tensor(1.0, ms.float32))

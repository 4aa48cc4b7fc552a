"""Plain MindSpore implementations: differentiable, and made of operations that every device has."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

_matmul_transposed = ops.MatMul(transpose_b=True)
_batch_matmul = ops.BatchMatMul()
_batch_matmul_transposed = ops.BatchMatMul(transpose_b=True)
# Not mint.split: on the CPU its gradient is wrong when its parts are joined again.
_halves = ops.Split(-1, 2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias`` for x ``[N, in]`` and weight ``[out, in]``, without transposing the weight in memory."""
    product = _matmul_transposed(x, weight)
    return product if bias is None else product + bias


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows ``ids`` (int32, any shape) of ``table`` ``[V, H]``."""
    return ops.gather(table, ids, 0)


def embedding_part(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Rows of ids from ``first`` on, which ``table`` ``[R, H]`` holds; zeros for all other ids.

    Args:
        ids: int32 of any shape.
        table: float32 ``[R, H]``, the rows of the ids ``first`` to ``first + R - 1``.
        first: smallest of these ids.
    """
    local = ids - first
    inside = ops.logical_and(local >= 0, local < table.shape[0])
    rows = ops.gather(table, local * inside.astype(ms.int32), 0)
    return rows * inside.astype(ms.float32).expand_dims(-1)


def sigmoid(x: Tensor) -> Tensor:
    """See `mindformers_ext.ops.sigmoid`."""
    return ops.sigmoid(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mindformers_ext.ops.rms_norm`; any leading axes will do."""
    return x * ops.rsqrt(mint.mean(ops.square(x), -1, True) + eps) * weight


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `mindformers_ext.ops.add_rms_norm`."""
    total = x + update
    return total, rms_norm(total, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs ``(x[i], x[i + R/2])`` of the first R elements of the last axis; R is the size of cos and sin."""
    size = cos.shape[-1]
    turned = x if size == x.shape[-1] else x[..., :size]
    first, second = _halves(turned)
    turned = turned * cos + ops.cat((-second, first), -1) * sin
    return turned if size == x.shape[-1] else ops.cat((turned, x[..., size:]), -1)


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
    batch, length, rotary_dim = cos.shape
    parts = qkv.reshape(batch, length, groups, -1, dim or rotary_dim).permute(0, 2, 3, 1, 4)
    heads = (parts.shape[2] - 2) // (2 if gated else 1)
    query, key, value = parts[:, :, :heads], parts[:, :, -2], parts[:, :, -1]
    if norms is not None:
        query, key = rms_norm(query, norms[0], eps), rms_norm(key, norms[1], eps)
    cos, sin = cos.expand_dims(1), sin.expand_dims(1)
    return rotary(query, cos.expand_dims(1), sin.expand_dims(1)), rotary(key, cos, sin), value


def gate_heads(x: Tensor, qkv: Tensor, groups: int, dim: int) -> Tensor:
    """See `mindformers_ext.ops.gate_heads`."""
    parts = qkv.reshape(qkv.shape[0], groups, -1, dim)
    heads = parts.shape[2] // 2 - 1
    return x * ops.sigmoid(parts[:, :, heads : 2 * heads].reshape(x.shape))


def swiglu(x: Tensor, limit: float = 0.0) -> Tensor:
    """See `mindformers_ext.ops.swiglu`."""
    gate, up = _halves(x.reshape(x.shape[0], -1, 2))
    if limit:
        gate, up = ops.clamp(gate, max=limit), ops.clamp(up, -limit, limit)
    return (mint.nn.functional.silu(gate) * up).reshape(x.shape[0], -1)


def attention_scores(query: Tensor, key: Tensor) -> Tensor:
    """Products of queries ``[B, N, G, S, D]`` with keys ``[B, N, T, D]``: ``[B, N, G, S, T]``."""
    batch, groups, heads, length, dim = query.shape
    # The query heads of a group share its keys: they become rows of one product instead of copies of the keys.
    rows = query.reshape(batch * groups, heads * length, dim)
    return _batch_matmul_transposed(rows, key.reshape(batch * groups, -1, dim)).reshape(*query.shape[:4], -1)


def attention_mix(weights: Tensor, value: Tensor) -> Tensor:
    """Values ``[B, N, T, Dv]`` mixed by weights ``[B, N, G, S, T]``: ``[B, N, G, S, Dv]``."""
    batch, groups, heads, length, slots = weights.shape
    rows = weights.reshape(batch * groups, heads * length, slots)
    return _batch_matmul(rows, value.reshape(batch * groups, slots, -1)).reshape(*weights.shape[:4], -1)


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """See `mindformers_ext.ops.attention`."""
    weights = ops.softmax(attention_scores(query, key) * scale + bias.expand_dims(1), -1)
    mixed = attention_mix(weights, value)
    return mixed.permute(0, 3, 1, 2, 4).reshape(query.shape[0] * query.shape[3], -1)


def write_slots(buffer: Tensor, start: int, values: Tensor) -> None:
    """See `mindformers_ext.ops.write_slots`."""
    buffer[:, :, start : start + values.shape[2]] = values


def move_rows(buffer: Tensor, rows: np.ndarray, start: int, stop: int) -> None:
    """See `mindformers_ext.ops.move_rows`."""
    if start < stop:
        buffer[:, :, start:stop] = ops.gather(buffer[:, :, start:stop], Tensor(rows.astype(np.int32)), 0)


def put_rows(buffer: Tensor, rows: np.ndarray, end: int, source: Tensor, start: int, stop: int) -> None:
    """See `mindformers_ext.ops.put_rows`."""
    first = end - (stop - start)
    for index, row in enumerate(rows.tolist()):
        if first:
            buffer[row : row + 1, :, :first] = 0
        if start < stop:
            buffer[row : row + 1, :, first:end] = source[index : index + 1, :, start:stop]


def shift_slots(buffer: Tensor, by: int, length: int) -> None:
    """See `mindformers_ext.ops.shift_slots`."""
    if by < 0 and length + by > 0:
        buffer[:, :, : length + by] = buffer[:, :, -by:length].copy()
    elif by > 0:
        buffer[:, :, by : by + length] = buffer[:, :, :length].copy()
        buffer[:, :, :by] = 0


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """See `mindformers_ext.ops.cross_entropy`."""
    total = ops.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    counted = (labels != ignore_index).astype(ms.float32).sum()
    return total / ops.maximum(counted, Tensor(1.0, ms.float32))

"""Tensor operations, and which implementation each device gets.

Every function takes and returns MindSpore tensors. `reference` holds the plain, differentiable MindSpore version that
runs on every device. On a CPU, MindSpore's element-wise kernels are two to eight times slower than numpy at every size,
and their gradients more than that. There `native` (C++, compiled on first use) takes their place, or `host` (numpy)
where there is no compiler, and `autograd` (numpy) while a gradient is being recorded.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
from mindspore import Tensor

from mindformers_ext.ops import autograd, host, native, reference
from mindformers_ext.ops.attention_parts import join_weights, partial_attention
from mindformers_ext.ops.backend import device_target, recording_gradient
from mindformers_ext.ops.compression import (
    compressor_gates,
    index_scores,
    pool_windows,
    put_ring_rows,
    read_ring,
    select_blocks,
    shift_ring,
    write_blocks,
    write_ring,
)
from mindformers_ext.ops.delta_rule import causal_conv, delta_gates, gated_delta_rule, gated_rms_norm, zero_rows
from mindformers_ext.ops.hyper_connections import hyper_collapse, hyper_expand, hyper_head
from mindformers_ext.ops.latent_attention import absorbed_attention, latent_heads, split_latent
from mindformers_ext.ops.moe import Routing, experts, route
from mindformers_ext.ops.native import packed
from mindformers_ext.ops.native.build import num_threads
from mindformers_ext.ops.native.packed import (
    AttentionBlock,
    DenseLayer,
    DenseLayers,
    PackedStack,
    PackedWeight,
    attention_block,
    dense_layers,
    mlp,
)
from mindformers_ext.ops.sparse_attention import (
    grouped_linear,
    partial_rotary,
    sink_attention,
    window_attention,
)
from mindformers_ext.ops.token_scores import token_scores
from mindformers_ext.ops.weights import can_pack, rounded

__all__ = [
    "AttentionBlock",
    "DenseLayer",
    "DenseLayers",
    "PackedStack",
    "PackedWeight",
    "Routing",
    "absorbed_attention",
    "add_rms_norm",
    "attention",
    "attention_block",
    "can_pack",
    "causal_conv",
    "compressor_gates",
    "cross_entropy",
    "delta_gates",
    "dense_layers",
    "describe",
    "embedding",
    "embedding_part",
    "experts",
    "gate_heads",
    "gated_delta_rule",
    "gated_rms_norm",
    "grouped_linear",
    "hyper_collapse",
    "hyper_expand",
    "hyper_head",
    "index_scores",
    "join_weights",
    "latent_heads",
    "linear",
    "mlp",
    "move_rows",
    "partial_attention",
    "partial_rotary",
    "pool_windows",
    "put_ring_rows",
    "put_rows",
    "qkv_heads",
    "read_ring",
    "rms_norm",
    "rounded",
    "route",
    "select_blocks",
    "shift_ring",
    "shift_slots",
    "sigmoid",
    "sink_attention",
    "split_latent",
    "swiglu",
    "token_scores",
    "unit_offset",
    "view_rows",
    "window_attention",
    "write_blocks",
    "write_ring",
    "write_slots",
    "zero_rows",
]


def _implementation() -> ModuleType:
    if device_target() != "CPU":
        return reference
    if recording_gradient():
        return autograd
    return native if native.available() else host


def describe() -> dict[str, str]:
    """Returns which implementation is in use, by kind of operation."""
    small = products = "mindspore"
    if device_target() == "CPU":
        small = "C++" if native.available() else "numpy"
    if can_pack():
        products = f"C++, {native.instruction_set()}, {num_threads()} threads, weights of 32, 16 or 8 bits"
    return {
        "device": device_target(),
        "products of a prediction": products,
        "other products of up to 32 rows": "C++" if small == "C++" else "mindspore",
        "other products": "mindspore",
        "element-wise": small,
        "element-wise with gradient": "numpy" if device_target() == "CPU" else "mindspore",
    }


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias``.

    Args:
        x: float32 ``[N, in]``.
        weight: float32 ``[out, in]``, or packed, with its bias.
        bias: float32 ``[out]``.

    Returns:
        float32 ``[N, out]``.
    """
    if isinstance(weight, PackedWeight):
        return packed.product(x, weight)
    return (native if _implementation() is native else reference).linear(x, weight, bias)


def embedding(ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    """Rows ``ids`` (int32, any shape) of ``table`` ``[V, H]``, as float32 ``[..., H]``."""
    if isinstance(table, PackedWeight):
        return Tensor.from_numpy(table.read_rows(ids.asnumpy()))
    return reference.embedding(ids, table)


def embedding_part(ids: Tensor, table: Tensor | PackedWeight, first: int) -> Tensor:
    """Rows of ids from ``first`` on, which ``table`` ``[R, H]`` holds; zeros for all other ids.

    Args:
        ids: int32 of any shape.
        table: the rows of the ids ``first`` to ``first + R - 1``.
        first: smallest of these ids.
    """
    if not isinstance(table, PackedWeight):
        return reference.embedding_part(ids, table, first)
    local = ids.asnumpy() - np.int32(first)
    inside = (local >= 0) & (local < table.shape[0])
    rows = table.read_rows(np.where(inside, local, 0))
    rows[~inside] = 0
    return Tensor.from_numpy(rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation over the last axis: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: float32 ``[N, H]``.
        weight: float32 ``[H]``.
        eps: added to the mean square.
    """
    return _implementation().rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds ``update`` to the residual stream and normalises the sum.

    Args:
        x: float32 ``[N, H]``.
        update: float32 ``[N, H]``.
        weight: float32 ``[H]``.
        eps: see `rms_norm`.

    Returns:
        ``x + update`` and its norm, both ``[N, H]``.
    """
    return _implementation().add_rms_norm(x, update, weight, eps)


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
    """Takes a fused projection apart into heads, normalises queries and keys if asked to, and rotates both.

    Args:
        qkv: float32 ``[B * S, N * (G + 2) * D]``; each of the N groups has G query heads, a key and a value.
        cos: float32 ``[B, S, R]``, both halves of the last axis equal; the first R elements of a head are rotated.
        sin: as ``cos``.
        groups: N.
        norms: weights ``[D]`` of the RMS norms of queries and of keys.
        eps: of these norms.
        dim: D; None takes R.
        gated: behind its query heads a group has G gates, ``[B * S, N * (2 G + 2) * D]`` in all; see `gate_heads`.

    Returns:
        Queries ``[B, N, G, S, D]``, keys and values ``[B, N, S, D]``.
    """
    return _implementation().qkv_heads(qkv, cos, sin, groups, norms, eps, dim, gated)


def gate_heads(x: Tensor, qkv: Tensor, groups: int, dim: int) -> Tensor:
    """Multiplies the output of attention by the sigmoid of its gates (Qwen3-Next, Qwen3.5).

    Args:
        x: float32 ``[B * S, N * G * D]``.
        qkv: the gated projection of `qkv_heads`, ``[B * S, N * (2 G + 2) * D]``.
        groups: N.
        dim: D.

    Returns:
        float32 ``[B * S, N * G * D]``.
    """
    on_host = device_target() == "CPU" and not recording_gradient()
    return (host if on_host else reference).gate_heads(x, qkv, groups, dim)


def unit_offset(weight: Tensor) -> Tensor:
    """``1 + weight``: the factor of a norm whose weight is stored around zero.

    Args:
        weight: float32 ``[H]``.
    """
    if device_target() == "CPU" and not recording_gradient():
        return Tensor.from_numpy(weight.asnumpy() + np.float32(1))
    return weight + 1.0


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` of float32 of any shape."""
    return reference.sigmoid(x)


def swiglu(x: Tensor, limit: float = 0.0) -> Tensor:
    """``silu(gate) * up`` where gate and up alternate along the last axis.

    Args:
        x: float32 ``[N, 2 F]``; even columns are gates, odd columns are ups.
        limit: gates are bounded by it from above, ups to both sides; 0 for no bound.

    Returns:
        float32 ``[N, F]``.
    """
    return _implementation().swiglu(x, limit)


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Grouped-query attention: ``softmax(scale * query key^T + bias) value``.

    Args:
        query: float32 ``[B, N, G, S, D]``: N key-value heads, G query heads for each of them.
        key: float32 ``[B, N, T, D]``.
        value: float32 ``[B, N, T, Dv]``.
        bias: float32, ``[B or 1, 1, S, T]``.
        scale: factor of the scores.

    Returns:
        float32 ``[B * S, N * G * Dv]``.
    """
    return _implementation().attention(query, key, value, bias, scale)


def write_slots(buffer: Tensor, start: int, values: Tensor) -> None:
    """Writes ``values`` ``[B, N, S, D]`` into ``buffer`` ``[B, N, T, D]`` from slot ``start`` on, in place."""
    (host if device_target() == "CPU" else reference).write_slots(buffer, start, values)


def move_rows(buffer: Tensor, rows: np.ndarray, start: int, stop: int) -> None:
    """Makes slots ``start`` to ``stop`` of row ``i`` those of row ``rows[i]`` in ``buffer`` ``[B, N, T, ...]``."""
    (host if device_target() == "CPU" else reference).move_rows(buffer, rows, start, stop)


def put_rows(buffer: Tensor, rows: np.ndarray, end: int, source: Tensor, start: int, stop: int) -> None:
    """Writes slots ``start`` to ``stop`` of ``source`` ``[n, N, S, ...]`` into rows of a buffer, in place.

    Args:
        buffer: ``[B, N, T, ...]``.
        rows: int ``[n]``, the rows; their slots before the written ones become 0.
        end: the slot after the last one that is written.
        source: what is written.
        start: see above.
        stop: see above.
    """
    (host if device_target() == "CPU" else reference).put_rows(buffer, rows, end, source, start, stop)


def shift_slots(buffer: Tensor, by: int, length: int) -> None:
    """Moves the first ``length`` slots of ``buffer`` ``[B, N, T, ...]`` by so many to the right, or, negative, left.

    What is moved beyond the first slot is lost; slots that become free in front are 0.
    """
    (host if device_target() == "CPU" else reference).shift_slots(buffer, by, length)


def view_rows(buffer: Tensor, begin: int, end: int) -> Tensor:
    """Returns rows ``begin`` to ``end`` of a buffer, in its own memory."""
    if device_target() == "CPU":
        return Tensor.from_numpy(buffer.asnumpy()[begin:end])
    return buffer.narrow(0, begin, end - begin)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean negative log likelihood (scalar float32) of labels int32 ``[N]`` under logits ``[N, V]``.

    Labels equal to ``ignore_index`` do not count; with none left the loss is 0.
    """
    implementation = _implementation()
    return (host if implementation is native else implementation).cross_entropy(logits, labels, ignore_index)

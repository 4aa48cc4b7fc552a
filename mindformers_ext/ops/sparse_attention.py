"""Attention with sinks over one key that is its own value, a window of tokens and compressed blocks of older ones.

Sources: DeepSeek-V4 report, section 2.3; sinks as in gpt-oss (arXiv 2508.10925, section 2.2). All query heads share one
key head (arXiv 1911.02150), whose trailing channels carry interleaved rotary positions.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, ops

from mindformers_ext.ops import host, native, reference
from mindformers_ext.ops.backend import device_target, recording_gradient
from mindformers_ext.ops.native import sparse_attention as kernels

# Added to a score that must not count; finite, so that nothing becomes nan.
MASKED = np.finfo(np.float32).min
# With more query tokens the products are large enough for MindSpore's.
_MAX_NATIVE_TOKENS = 32
# Query tokens of one product are at least so many, however short the window.
_MIN_QUERY_BLOCK = 64

_batch_matmul = ops.BatchMatMul()
_batch_matmul_transposed = ops.BatchMatMul(transpose_b=True)


def _on_host() -> bool:
    return device_target() == "CPU" and not recording_gradient()


def partial_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    weight: Tensor | None = None,
    eps: float | None = None,
    inverse: bool = False,
) -> Tensor:
    """Rotates pairs of neighbours among the last R channels of every head, after an RMS norm if asked for.

    Args:
        x: float32 ``[N, heads * D]`` for N tokens.
        cos: float32 ``[..., R]`` for N tokens, both halves equal; pair i of a head turns by the angle of entry i.
        sin: as ``cos``.
        heads: heads of each token.
        weight: float32 ``[D]`` of the norm; None leaves the factor out.
        eps: epsilon of the norm over each head; None for no norm.
        inverse: turns back instead.

    Returns:
        float32 ``[N, heads * D]``.
    """
    if not _on_host():
        return _reference_rotary(x, cos, sin, heads, weight, eps, inverse)
    if native.available():
        return kernels.partial_rotary(x, cos, sin, heads, weight, eps, inverse)
    return _host_rotary(x, cos, sin, heads, weight, eps, inverse)


def grouped_linear(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Maps each of G groups of channels by rows of its own of ``weight`` (DeepSeek-V4 report, section 2.3.1).

    Args:
        x: float32 ``[N, G * in]``.
        weight: float32 ``[G * out, in]``.
        groups: G.

    Returns:
        float32 ``[N, G * out]``.
    """
    rows = x.shape[0]
    if _on_host() and native.available() and rows <= _MAX_NATIVE_TOKENS:
        return kernels.grouped_linear(x, weight, groups)
    by_group = x.reshape(rows, groups, -1).permute(1, 0, 2)
    product = _batch_matmul_transposed(by_group, weight.reshape(groups, -1, weight.shape[1]))
    return product.permute(1, 0, 2).reshape(rows, -1)


def sink_attention(
    query: Tensor,
    keys: Tensor,
    bias: Tensor,
    sinks: Tensor,
    scale: float,
    blocks: Tensor | None = None,
    block_bias: Tensor | None = None,
) -> Tensor:
    """``softmax([scale query keys^T + bias, sink]) keys`` without the sink's column.

    Args:
        query: float32 ``[B, S, N, D]``.
        keys: float32 ``[B, K, D]``, keys and values at once.
        bias: float32 ``[B or 1, S, K]``.
        sinks: float32 ``[N]``, a further score of each head that only takes weight away.
        scale: factor of the products.
        blocks: float32 ``[B, C, D]``, more keys, of which the first T are used.
        block_bias: float32 ``[B or 1, S, T]``.

    Returns:
        float32 ``[B * S, N * D]``; 0 for a token that sees nothing.
    """
    if not _on_host():
        return _reference_attention(query, keys, bias, sinks, scale, blocks, block_bias)
    if native.available() and query.shape[0] * query.shape[1] <= _MAX_NATIVE_TOKENS:
        return kernels.sink_attention(query, keys, bias, sinks, scale, blocks, block_bias)
    return _host_attention(query, keys, bias, sinks, scale, blocks, block_bias)


def window_attention(
    query: Tensor,
    keys: Tensor,
    sinks: Tensor,
    scale: float,
    window: int,
    hidden: np.ndarray | None = None,
    blocks: Tensor | None = None,
    block_bias: Tensor | None = None,
) -> Tensor:
    """`sink_attention` of S new tokens over the last ``window`` tokens, themselves included.

    Args:
        query: float32 ``[B, S, N, D]``.
        keys: float32 ``[B, K, D]``; the last S belong to the new tokens, the others to those right before them.
        sinks: see `sink_attention`.
        scale: see `sink_attention`.
        window: tokens that a token sees, with itself.
        hidden: int ``[B]``, keys at the start of each row that are pads; None for none.
        blocks: see `sink_attention`.
        block_bias: see `sink_attention`.

    Returns:
        float32 ``[B * S, N * D]``.
    """
    batch, length, heads, dim = query.shape
    past = keys.shape[1] - length
    step = max(window, _MIN_QUERY_BLOCK) if _on_host() else length
    parts = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        first, last = max(0, past + start - window + 1), past + stop
        bias = Tensor.from_numpy(_window_bias(np.arange(past + start, last), np.arange(first, last), window, hidden))
        part, part_keys, part_bias = query, keys, block_bias
        if stop - start < length:
            part = query[:, start:stop]
            part_bias = None if block_bias is None else _used(block_bias[:, start:stop])
        if (first, last) != (0, keys.shape[1]):
            part_keys = keys[:, first:last]
        parts.append(sink_attention(part, part_keys, bias, sinks, scale, blocks, part_bias))
    if len(parts) == 1:
        return parts[0]
    rows = [part.asnumpy().reshape(batch, -1, heads * dim) for part in parts]
    return Tensor.from_numpy(np.concatenate(rows, 1).reshape(batch * length, -1))


def _window_bias(queries: np.ndarray, keys: np.ndarray, window: int, hidden: np.ndarray | None) -> np.ndarray:
    """0 or `MASKED` ``[B or 1, S, K]`` for slots ``queries`` ``[S]`` and ``keys`` ``[K]``."""
    distance = queries[:, None] - keys
    visible = ((distance >= 0) & (distance < window))[None]
    if hidden is not None:
        visible = visible & (keys >= hidden[:, None])[:, None]
    return np.where(visible, np.float32(0), MASKED)


def _used(bias: Tensor) -> Tensor:
    """Leaves out the blocks at the end that no token sees."""
    values = bias.asnumpy()
    seen = np.flatnonzero((values > MASKED).any((0, 1)))
    return Tensor.from_numpy(np.ascontiguousarray(values[..., : seen[-1] + 1 if seen.size else 0]))


def _reference_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, weight: Tensor | None, eps: float | None, inverse: bool
) -> Tensor:
    rows, pairs = x.shape[0], cos.shape[-1] // 2
    values = x.reshape(rows, heads, -1)
    dim = values.shape[-1]
    if eps is not None:
        one = Tensor(np.ones(dim, np.float32)) if weight is None else weight
        values = reference.rms_norm(values, one, eps)
    # The channels in front turn by the angle 0.
    still = dim // 2 - pairs
    cosine = ops.pad(cos.reshape(rows, 1, -1)[..., :pairs], [still, 0], value=1.0)
    sine = ops.pad(sin.reshape(rows, 1, -1)[..., :pairs], [still, 0], value=0.0)
    if inverse:
        sine = -sine
    even, odd = (part.reshape(rows, heads, -1) for part in ops.Split(-1, 2)(values.reshape(rows, heads, -1, 2)))
    turned = (even * cosine - odd * sine, odd * cosine + even * sine)
    return ops.cat([part.expand_dims(-1) for part in turned], -1).reshape(rows, -1)


def _host_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, weight: Tensor | None, eps: float | None, inverse: bool
) -> Tensor:
    size, rows = cos.shape[-1], x.shape[0]
    values = x.asnumpy().reshape(rows, heads, -1)
    cosine, sine = (table.asnumpy().reshape(rows, 1, size)[..., : size // 2] for table in (cos, sin))
    if inverse:
        sine = -sine
    result = values.copy() if eps is None else values * host.inverse_rms(values, eps)
    if weight is not None:
        result *= weight.asnumpy()
    tail = result[..., -size:]
    even, odd = tail[..., ::2].copy(), tail[..., 1::2].copy()
    tail[..., ::2] = even * cosine - odd * sine
    tail[..., 1::2] = odd * cosine + even * sine
    return Tensor.from_numpy(result.reshape(rows, -1))


def _with_blocks(keys: Tensor, bias: Tensor, blocks: Tensor | None, block_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and blocks, and their biases, in one tensor each."""
    if blocks is None or block_bias is None or not block_bias.shape[-1]:
        return keys, bias
    count = block_bias.shape[-1]
    used = blocks if blocks.shape[1] == count else blocks[:, :count]
    rows = max(bias.shape[0], block_bias.shape[0])
    biases = [part.broadcast_to((rows, *part.shape[1:])) for part in (bias, block_bias)]
    return ops.cat((keys, used), 1), ops.cat(biases, -1)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """Products ``[B, S, N, K]``: the heads of a token are rows of one product, as they share the keys."""
    batch, length, heads, dim = query.shape
    return _batch_matmul_transposed(query.reshape(batch, -1, dim), keys).reshape(batch, length, heads, -1)


def _mix(weights: Tensor, keys: Tensor) -> Tensor:
    batch, length, heads, slots = weights.shape
    return _batch_matmul(weights.reshape(batch, -1, slots), keys).reshape(batch * length, -1)


def _reference_attention(
    query: Tensor,
    keys: Tensor,
    bias: Tensor,
    sinks: Tensor,
    scale: float,
    blocks: Tensor | None,
    block_bias: Tensor | None,
) -> Tensor:
    keys, bias = _with_blocks(keys, bias, blocks, block_bias)
    scores = _scores(query, keys) * scale + bias.expand_dims(2)
    sink = sinks.reshape(1, 1, -1, 1)
    top = ops.stop_gradient(ops.maximum(ops.ReduceMax(True)(scores, -1), sink))
    weights = ops.exp(scores - top)
    total = ops.ReduceSum(True)(weights, -1) + ops.exp(sink - top)
    return _mix(weights / total, keys)


def _host_attention(
    query: Tensor,
    keys: Tensor,
    bias: Tensor,
    sinks: Tensor,
    scale: float,
    blocks: Tensor | None,
    block_bias: Tensor | None,
) -> Tensor:
    keys, bias = _with_blocks(keys, bias, blocks, block_bias)
    scores = _scores(query, keys)
    batch, length, heads, slots = scores.shape
    values = scores.asnumpy().reshape(batch * length, heads, slots)
    biases = np.broadcast_to(bias.asnumpy(), (batch, length, slots)).reshape(batch * length, 1, slots)
    sink = sinks.asnumpy()[:, None]

    def block(rows: slice) -> None:
        part = values[rows]
        part *= np.float32(scale)
        part += biases[rows]
        top = np.maximum(part.max(-1, keepdims=True), sink)
        part -= top
        np.exp(part, out=part)
        part /= part.sum(-1, keepdims=True) + np.exp(sink - top)

    host.by_blocks(block, batch * length, heads * slots)
    return _mix(Tensor.from_numpy(values.reshape(scores.shape)), keys)

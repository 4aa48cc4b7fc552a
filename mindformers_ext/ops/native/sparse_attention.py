"""The kernels of `sparse_attention.cpp`."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from mindformers_ext.ops.native import _dense, _kernels, _pointer


def partial_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, weight: Tensor | None, eps: float | None, inverse: bool
) -> Tensor:
    """See `mindformers_ext.ops.partial_rotary`."""
    x, cos, sin = _dense(x), _dense(cos), _dense(sin)
    out = np.empty(x.shape, np.float32)
    _kernels().mfx_partial_rotary(
        _pointer(x), None if weight is None else _pointer(weight), _pointer(cos), _pointer(sin), out.ctypes.data,
        x.shape[0], heads, x.shape[1] // heads, cos.shape[-1], eps is not None, eps or 0.0, -1.0 if inverse else 1.0,
    )  # fmt: skip
    return Tensor.from_numpy(out)


def grouped_linear(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """See `mindformers_ext.ops.grouped_linear`; for few rows."""
    rows, size = x.shape[0], weight.shape[1]
    by_group = np.ascontiguousarray(_dense(x).asnumpy().reshape(rows, groups, size).swapaxes(0, 1))
    out = np.empty((groups, rows, weight.shape[0] // groups), np.float32)
    library, start = _kernels(), _pointer(weight)
    for group in range(groups):
        matrix = start + group * out.shape[2] * size * weight.itemsize
        library.mfx_linear(by_group[group].ctypes.data, matrix, None, out[group].ctypes.data, rows, out.shape[2], size)
    return Tensor.from_numpy(np.ascontiguousarray(out.swapaxes(0, 1)).reshape(rows, -1))


def sink_attention(
    query: Tensor,
    keys: Tensor,
    bias: Tensor,
    sinks: Tensor,
    scale: float,
    blocks: Tensor | None,
    block_bias: Tensor | None,
) -> Tensor:
    """See `mindformers_ext.ops.sink_attention`; for few tokens."""
    batch, length, heads, dim = query.shape
    query, keys, bias = _dense(query), _dense(keys), _dense(bias)
    slots, capacity, count, block_rows = keys.shape[1], 0, 0, 1
    pointers: tuple[int | None, int | None] = (None, None)
    if blocks is not None and block_bias is not None:
        blocks, block_bias = _dense(blocks), _dense(block_bias)
        capacity, count, block_rows = blocks.shape[1], block_bias.shape[-1], block_bias.shape[0]
        pointers = (_pointer(blocks), _pointer(block_bias)) if count else pointers
    width = slots + count
    out = np.empty((batch * length, heads * dim), np.float32)
    index = np.empty((batch * length, width), np.int32)
    biases, scores = np.empty(index.shape, np.float32), np.empty((batch * length, heads, width), np.float32)
    _kernels().mfx_sink_attention(
        _pointer(query), _pointer(keys), _pointer(bias), _pointer(sinks), *pointers, out.ctypes.data,
        index.ctypes.data, biases.ctypes.data, scores.ctypes.data, batch, length, heads, dim, slots, capacity, count,
        bias.shape[0], block_rows, scale,
    )  # fmt: skip
    return Tensor.from_numpy(out)


def index_scores(query: Tensor, keys: Tensor, weights: Tensor, count: int) -> Tensor:
    """See `mindformers_ext.ops.index_scores`."""
    batch, length, heads, dim = query.shape
    query, keys, weights = _dense(query), _dense(keys), _dense(weights)
    out = np.empty((batch, length, count), np.float32)
    _kernels().mfx_index_scores(
        _pointer(query), _pointer(keys), _pointer(weights), out.ctypes.data, batch, length, heads, dim, keys.shape[1],
        count,
    )  # fmt: skip
    return Tensor.from_numpy(out)

"""The kernels of `delta_rule.cpp`."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from mindformers_ext.ops.native import _dense, _kernels, _pointer


def _rows(x: Tensor) -> tuple[int, int]:
    """Address and distance of the rows of ``x``: some columns of a wider matrix are read where they are."""
    strides = x.stride()
    outer = [size * stride for size, stride in zip(x.shape[1:-1], strides[1:-1], strict=True)]
    if strides[-1] != 1 or outer != list(strides[:-2]):
        x = x.contiguous()
        strides = x.stride()
    return int(x.data_ptr()), strides[-2]


def causal_conv(x: Tensor, weight: Tensor, past: Tensor | None = None) -> Tensor:
    """See `mindformers_ext.ops.causal_conv`."""
    out = np.empty(x.shape, np.float32)
    address, stride = _rows(x)
    past_pointer = None if past is None else _pointer(past)
    _kernels().mfx_causal_conv(
        address, stride, _pointer(weight), past_pointer, out.ctypes.data, *x.shape, weight.shape[2]
    )
    return Tensor.from_numpy(out)


def gated_delta_rule(
    qkv: Tensor, beta: Tensor, g: Tensor, key_heads: int, key_dim: int, state: Tensor | None = None
) -> Tensor:
    """See `mindformers_ext.ops.gated_delta_rule`."""
    batch, length, width = qkv.shape
    heads = beta.shape[1]
    dim = (width - 2 * key_heads * key_dim) // heads
    if state is None:
        state = Tensor.from_numpy(np.zeros((batch, heads, key_dim, dim), np.float32))
    qkv, beta, g = (_dense(x) for x in (qkv, beta, g))
    out = np.empty((batch, length, heads * dim), np.float32)
    _kernels().mfx_gated_delta_rule(
        _pointer(qkv), _pointer(beta), _pointer(g), _pointer(state), out.ctypes.data,
        batch, length, key_heads, key_dim, heads, dim,
    )  # fmt: skip
    return Tensor.from_numpy(out)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mindformers_ext.ops.gated_rms_norm`."""
    x = _dense(x)
    out = np.empty(x.shape, np.float32)
    address, stride = _rows(gate)
    dim = weight.shape[0]
    _kernels().mfx_gated_rms_norm(
        _pointer(x), address, stride, _pointer(weight), out.ctypes.data,
        x.shape[0], x.shape[1] // dim, dim, eps,
    )  # fmt: skip
    return Tensor.from_numpy(out)

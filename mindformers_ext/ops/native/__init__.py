"""C++ kernels for float32 tensors on a CPU, compiled on first use for the machine at hand."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_ext.ops import host, reference
from mindformers_ext.ops.native import build
from mindformers_ext.ops.native.build import load_library

if TYPE_CHECKING:
    from mindformers_ext.ops.moe import Pairs

# With more rows a product is bound by arithmetic, at which MindSpore is better.
MAX_ROWS = 32

_library: ctypes.CDLL | None = None
_searched = False


def available() -> bool:
    """Tells whether the kernels can be used; the first call compiles them if need be."""
    global _library, _searched
    if not _searched:
        _library, _searched = load_library(), True
    return _library is not None


def instruction_set() -> str:
    """Returns the vectors that the kernels were compiled for."""
    return build.instruction_set(_kernels())


def _kernels() -> ctypes.CDLL:
    if not available() or _library is None:
        raise RuntimeError("the C++ kernels are not available; ask native.available() first")
    return _library


def _pointer(tensor: Tensor) -> int:
    """Returns the address of a dense float32 tensor; anything else would be read as if it were one."""
    if tensor.dtype != ms.float32 or not tensor.is_contiguous():
        raise TypeError(f"a kernel needs a dense float32 tensor, not {tensor.dtype} of shape {tensor.shape}")
    return int(tensor.data_ptr())


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `mindformers_ext.ops.linear`."""
    rows, size = x.shape
    if rows > MAX_ROWS:
        return reference.linear(x, weight, bias)
    x = _dense(x)
    out = np.empty((rows, weight.shape[0]), np.float32)
    bias_pointer = None if bias is None else _pointer(bias)
    _kernels().mfx_linear(_pointer(x), _pointer(weight), bias_pointer, out.ctypes.data, rows, out.shape[1], size)
    return Tensor.from_numpy(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mindformers_ext.ops.rms_norm`."""
    x = _dense(x)
    out = np.empty(x.shape, np.float32)
    _kernels().mfx_rms_norm(_pointer(x), _pointer(weight), out.ctypes.data, *x.shape, eps)
    return Tensor.from_numpy(out)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `mindformers_ext.ops.add_rms_norm`."""
    x, update = _dense(x), _dense(update)
    total, out = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    _kernels().mfx_add_rms_norm(
        _pointer(x), _pointer(update), _pointer(weight), total.ctypes.data, out.ctypes.data, *x.shape, eps
    )
    return Tensor.from_numpy(total), Tensor.from_numpy(out)


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
    dim = dim or rotary_dim
    qkv, cos, sin = _dense(qkv), _dense(cos), _dense(sin)
    stored = qkv.shape[1] // (groups * dim)
    heads = (stored - 2) // (2 if gated else 1)
    query = np.empty((batch, groups, heads, length, dim), np.float32)
    key, value = (np.empty((batch, groups, length, dim), np.float32) for _ in range(2))
    norm_pointers = (None, None) if norms is None else (_pointer(norms[0]), _pointer(norms[1]))
    _kernels().mfx_qkv_heads(
        _pointer(qkv), _pointer(cos), _pointer(sin), *norm_pointers, query.ctypes.data, key.ctypes.data,
        value.ctypes.data, batch, length, groups, stored, heads, dim, rotary_dim, eps,
    )  # fmt: skip
    return Tensor.from_numpy(query), Tensor.from_numpy(key), Tensor.from_numpy(value)


def swiglu(x: Tensor, limit: float = 0.0) -> Tensor:
    """See `mindformers_ext.ops.swiglu`."""
    x = _dense(x)
    out = np.empty((x.shape[0], x.shape[1] // 2), np.float32)
    _kernels().mfx_swiglu(_pointer(x), out.ctypes.data, *out.shape, limit)
    return Tensor.from_numpy(out)


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """See `mindformers_ext.ops.attention`."""
    batch, groups, heads, length, dim = query.shape
    slots = key.shape[2]
    bias = _dense(bias)
    if length == 1 and value.shape[3] == dim:
        query, key, value = _dense(query), _dense(key), _dense(value)
        out = np.empty((batch, groups * heads * dim), np.float32)
        scratch = np.empty((batch, groups, slots), np.float32)
        _kernels().mfx_attend(
            _pointer(query), _pointer(key), _pointer(value), _pointer(bias), out.ctypes.data, scratch.ctypes.data,
            batch, groups, heads, dim, slots, bias.shape[0], scale,
        )  # fmt: skip
        return Tensor.from_numpy(out)
    scores = _dense(reference.attention_scores(query, key))
    _kernels().mfx_attention_weights(
        _pointer(scores), _pointer(bias), batch, groups * heads, length, slots, bias.shape[0], scale
    )
    return host.merge_heads(reference.attention_mix(scores, value))


def experts(x: Tensor, pairs: Pairs, factors: Tensor, weight1: Tensor, weight2: Tensor, limit: float) -> Tensor:
    """See `mindformers_ext.ops.experts`; ``pairs`` is the choice sorted by expert."""
    x = _dense(x)
    num_experts, hidden, width = weight1.shape
    count, ffn = len(pairs.rows), width // 2
    by_pair = np.ascontiguousarray(factors.asnumpy().reshape(-1)[pairs.slots])
    scratch = np.empty(count * (width + hidden), np.float32)
    out = np.zeros(x.shape, np.float32)
    arrays = (pairs.rows, by_pair, pairs.starts, scratch, out)
    pointers = (_pointer(x), _pointer(weight1), _pointer(weight2), *(array.ctypes.data for array in arrays))
    _kernels().mfx_experts(*pointers, hidden, ffn, num_experts, count, limit)
    return Tensor.from_numpy(out)

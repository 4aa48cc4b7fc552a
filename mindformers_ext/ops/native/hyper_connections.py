"""The kernels of `hyper_connections.cpp`."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from mindformers_ext.ops.native import _dense, _kernels, _pointer


def collapse(
    streams: Tensor,
    mixes: Tensor,
    alpha: Tensor,
    bias: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `mindformers_ext.ops.hyper_collapse`; ``mixes`` is ``streams mapping^T`` without the norm."""
    streams, mixes = _dense(streams), _dense(mixes)
    rows, size = streams.shape
    count = round((mixes.shape[1] + 1) ** 0.5) - 1
    collapsed = np.empty((rows, size // count), np.float32)
    pre, post, comb = (np.empty((rows, width), np.float32) for width in (count, count, count * count))
    _kernels().mfx_hyper_collapse(
        _pointer(streams), _pointer(mixes), _pointer(alpha), _pointer(bias), collapsed.ctypes.data,
        pre.ctypes.data, post.ctypes.data, comb.ctypes.data, rows, count, size // count, iterations, eps, norm_eps,
    )  # fmt: skip
    return Tensor.from_numpy(collapsed), Tensor.from_numpy(post), Tensor.from_numpy(comb)


def expand(update: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `mindformers_ext.ops.hyper_expand`."""
    update, streams = _dense(update), _dense(streams)
    out = np.empty(streams.shape, np.float32)
    rows, count = post.shape
    _kernels().mfx_hyper_expand(
        _pointer(update), _pointer(streams), _pointer(post), _pointer(comb), out.ctypes.data, rows, count,
        update.shape[1],
    )  # fmt: skip
    return Tensor.from_numpy(out)


def head(streams: Tensor, mixes: Tensor, alpha: Tensor, bias: Tensor, eps: float, norm_eps: float) -> Tensor:
    """See `mindformers_ext.ops.hyper_head`; ``mixes`` as in `collapse`."""
    streams, mixes = _dense(streams), _dense(mixes)
    rows, count = mixes.shape
    dim = streams.shape[1] // count
    collapsed, pre = np.empty((rows, dim), np.float32), np.empty((rows, count), np.float32)
    _kernels().mfx_hyper_collapse(
        _pointer(streams), _pointer(mixes), _pointer(alpha), _pointer(bias), collapsed.ctypes.data,
        pre.ctypes.data, None, None, rows, count, dim, 1, eps, norm_eps,
    )  # fmt: skip
    return Tensor.from_numpy(collapsed)

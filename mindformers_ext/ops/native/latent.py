"""Wrappers of ``latent.cpp``; see `mindformers_ext.ops.latent_attention`."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from mindformers_ext.ops.native import _dense, _kernels, _pointer


def split_latent(
    fused: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    latent_norm: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """See `mindformers_ext.ops.split_latent`."""
    batch, length, rope = cos.shape
    fused, cos, sin = _dense(fused), _dense(cos), _dense(sin)
    rows, size = batch * length, latent_norm.shape[0]
    query = np.empty((rows, fused.shape[1] - size - rope), np.float32)
    latent = np.empty((batch, 1, length, size + rope), np.float32)
    norm_pointer = None if query_norm is None else _pointer(query_norm)
    _kernels().mfx_split_latent(
        _pointer(fused), _pointer(cos), _pointer(sin), norm_pointer, _pointer(latent_norm), query.ctypes.data,
        latent.ctypes.data, rows, query.shape[1], size, rope, interleaved, eps,
    )  # fmt: skip
    return Tensor.from_numpy(query), Tensor.from_numpy(latent)


def absorb_query(query: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool) -> Tensor:
    """Rotates the queries of a few tokens and folds the keys' weight into them: float32 ``[B, 1, N, S, L + R]``."""
    batch, length, rope = cos.shape
    query, cos, sin = _dense(query), _dense(cos), _dense(sin)
    size, plain = weight.shape[1], query.shape[1] // heads - rope
    out = np.empty((batch, 1, heads, length, size + rope), np.float32)
    _kernels().mfx_absorb_query(
        _pointer(query), _pointer(weight), _pointer(cos), _pointer(sin), out.ctypes.data, batch, length, heads, plain,
        weight.shape[0] // heads - plain, size, rope, interleaved,
    )  # fmt: skip
    return Tensor.from_numpy(out)


def attend_latent(query: Tensor, latent: Tensor, bias: Tensor, scale: float, size: int) -> Tensor:
    """Attends with one new token a row, ``[B, 1, N, 1, L + R]``, over latents; mixes are float32 ``[N, B, L]``."""
    batch, _, heads, _, width = query.shape
    slots = latent.shape[2]
    query, latent, bias = _dense(query), _dense(latent), _dense(bias)
    out = np.empty((heads, batch, size), np.float32)
    scratch = np.empty((batch, heads, slots), np.float32)
    _kernels().mfx_attend_latent(
        _pointer(query), _pointer(latent), _pointer(bias), out.ctypes.data, scratch.ctypes.data, batch, heads, slots,
        width, size, bias.shape[0], scale,
    )  # fmt: skip
    return Tensor.from_numpy(out)


def latent_values(mixed: Tensor, weight: Tensor, plain: int) -> Tensor:
    """Takes the values of a few tokens out of mixed latents ``[N, B * S, L]``: float32 ``[B * S, N * Dv]``."""
    heads, rows, size = mixed.shape
    values = weight.shape[0] // heads - plain
    out = np.empty((rows, heads * values), np.float32)
    _kernels().mfx_latent_values(
        _pointer(_dense(mixed)), _pointer(weight), out.ctypes.data, rows, heads, plain, values, size
    )
    return Tensor.from_numpy(out)

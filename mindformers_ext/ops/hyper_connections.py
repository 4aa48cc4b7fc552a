"""Manifold-constrained hyper-connections: a residual stream of several parallel streams.

Sources: DeepSeek-V4 report, section 2.2; hyper-connections (arXiv 2409.19606); mHC (arXiv 2512.24880). A block sees one
mix of the n streams, and its result is added to all of them, which are mixed at the same time by a matrix whose rows
and columns sum to 1 (Sinkhorn and Knopp's iteration).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function

from mindformers_ext.ops import host, native, reference
from mindformers_ext.ops.backend import device_target, recording_gradient
from mindformers_ext.ops.native import hyper_connections as kernels

_batch_matmul = ops.BatchMatMul()
_batch_matmul_first_transposed = ops.BatchMatMul(transpose_a=True)


def hyper_collapse(
    streams: Tensor,
    mapping: Tensor,
    alpha: Tensor,
    bias: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes the streams into the input of a block, and computes how its output will be mixed into them.

    With ``m = streams / rms(streams) mapping^T``: ``pre = sigmoid(alpha_0 m_pre + bias_pre) + eps``, ``post = 2
    sigmoid(alpha_1 m_post + bias_post)``, and ``comb`` is ``softmax(alpha_2 m_comb + bias_comb) + eps`` over rows,
    whose columns and rows are divided by their sums in turn, ``iterations`` times, ending with the columns.

    Args:
        streams: float32 ``[N, n * H]``, the n streams of each of N tokens.
        mapping: float32 ``[2 n + n^2, n * H]``; rows of pre, post and comb.
        alpha: float32 ``[3]``, factors of the three parts of m.
        bias: float32 ``[2 n + n^2]``.
        iterations: of Sinkhorn and Knopp, at least 1.
        eps: keeps sums and ``pre`` from zero.
        norm_eps: epsilon of the root mean square.

    Returns:
        ``sum_j pre_j stream_j`` ``[N, H]``, post ``[N, n]`` and comb ``[N, n * n]``.
    """
    arguments = (streams, mapping, alpha, bias, iterations, eps, norm_eps)
    if device_target() != "CPU" or recording_gradient():
        return _reference_collapse(*arguments)
    if native.available():
        return kernels.collapse(streams, _products(streams, mapping), alpha, bias, iterations, eps, norm_eps)
    return _host_collapse(*arguments)


def hyper_expand(update: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Adds a block's output to every stream and mixes the streams: ``post_k update + sum_j comb_jk stream_j``.

    Args:
        update: float32 ``[N, H]``.
        streams: float32 ``[N, n * H]``, as they were before the block.
        post: float32 ``[N, n]``.
        comb: float32 ``[N, n * n]``.

    Returns:
        float32 ``[N, n * H]``.
    """
    if device_target() != "CPU" or recording_gradient():
        return _reference_expand(update, streams, post, comb)
    if native.available():
        return kernels.expand(update, streams, post, comb)
    return _host_expand(update, streams, post, comb)


def hyper_head(streams: Tensor, mapping: Tensor, alpha: Tensor, bias: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Mixes the streams into the input of the final norm: `hyper_collapse` with ``pre`` alone.

    Args:
        streams: float32 ``[N, n * H]``.
        mapping: float32 ``[n, n * H]``.
        alpha: float32 ``[1]``.
        bias: float32 ``[n]``.
        eps: see `hyper_collapse`.
        norm_eps: see `hyper_collapse`.

    Returns:
        float32 ``[N, H]``.
    """
    arguments = (streams, mapping, alpha, bias, eps, norm_eps)
    if device_target() != "CPU" or recording_gradient():
        return _reference_head(*arguments)
    if native.available():
        return kernels.head(streams, _products(streams, mapping), alpha, bias, eps, norm_eps)
    return _host_head(*arguments)


def _products(streams: Tensor, mapping: Tensor) -> Tensor:
    # The norm is one factor a row, so it can wait until after the product.
    return native.linear(streams, mapping)


def _inverse_rms(streams: Tensor, norm_eps: float) -> Tensor:
    return ops.rsqrt(mint.mean(ops.square(streams), -1, True) + norm_eps)


def _sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    for step in range(2 * iterations - 1):
        comb = comb / (mint.sum(comb, -1 if step % 2 else -2, True) + eps)
    return comb


def _host_sinkhorn(comb: np.ndarray, iterations: int, eps: float) -> tuple[np.ndarray, list[tuple[np.ndarray, Any]]]:
    """Returns the last matrix, and every matrix with the sums that it was divided by."""
    steps = []
    for step in range(2 * iterations - 1):
        totals = comb.sum(-1 if step % 2 else -2, keepdims=True) + np.float32(eps)
        comb = comb / totals
        steps.append((comb, totals))
    return comb, steps


class _Sinkhorn(_Function):
    """The iteration with its gradient in numpy: as MindSpore operations it is over a hundred small ones."""

    @staticmethod
    def forward(ctx: Any, comb: Tensor, iterations: int, eps: float) -> Tensor:
        result, ctx.steps = _host_sinkhorn(comb.asnumpy(), iterations, eps)
        return Tensor.from_numpy(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # For y = x / s, s = sum(x) + eps along one axis: (g - sum(g y)) / s.
        by_comb = gradient.asnumpy()
        for step in reversed(range(len(ctx.steps))):
            comb, totals = ctx.steps[step]
            by_comb = (by_comb - (by_comb * comb).sum(-1 if step % 2 else -2, keepdims=True)) / totals
        return Tensor.from_numpy(by_comb), None, None


def _reference_collapse(
    streams: Tensor, mapping: Tensor, alpha: Tensor, bias: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, count = streams.shape[0], _num_streams(mapping)
    mixes = reference.linear(streams, mapping) * _inverse_rms(streams, norm_eps)
    pre = ops.sigmoid(mixes[:, :count] * alpha[0] + bias[:count]) + eps
    post = ops.sigmoid(mixes[:, count : 2 * count] * alpha[1] + bias[count : 2 * count]) * 2
    logits = (mixes[:, 2 * count :] * alpha[2] + bias[2 * count :]).reshape(rows, count, count)
    comb = ops.softmax(logits, -1) + eps
    on_host = device_target() == "CPU" and recording_gradient()
    comb = _Sinkhorn.apply(comb, iterations, eps) if on_host else _sinkhorn(comb, iterations, eps)
    return _weighted_sum(streams, pre), post, comb.reshape(rows, -1)


def _num_streams(mapping: Tensor) -> int:
    """The n of ``2 n + n^2`` rows."""
    return round((mapping.shape[0] + 1) ** 0.5) - 1


def _weighted_sum(streams: Tensor, pre: Tensor) -> Tensor:
    rows, count = pre.shape
    return _batch_matmul(pre.reshape(rows, 1, count), streams.reshape(rows, count, -1)).reshape(rows, -1)


def _reference_expand(update: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    rows, count = post.shape
    mixed = _batch_matmul_first_transposed(comb.reshape(rows, count, count), streams.reshape(rows, count, -1))
    return (mixed + post.expand_dims(-1) * update.expand_dims(1)).reshape(rows, -1)


def _reference_head(
    streams: Tensor, mapping: Tensor, alpha: Tensor, bias: Tensor, eps: float, norm_eps: float
) -> Tensor:
    mixes = reference.linear(streams, mapping) * _inverse_rms(streams, norm_eps)
    return _weighted_sum(streams, ops.sigmoid(mixes * alpha + bias) + eps)


def _host_mixes(streams: Tensor, mapping: Tensor, norm_eps: float) -> np.ndarray:
    return reference.linear(streams, mapping).asnumpy() * host.inverse_rms(streams.asnumpy(), norm_eps)


def _host_weighted_sum(streams: Tensor, pre: np.ndarray) -> Tensor:
    values = streams.asnumpy().reshape(*pre.shape, -1)
    return Tensor.from_numpy(np.einsum("njh,nj->nh", values, pre))


def _host_collapse(
    streams: Tensor, mapping: Tensor, alpha: Tensor, bias: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, count = streams.shape[0], _num_streams(mapping)
    sizes = [count, 2 * count]
    mixes, biases = _host_mixes(streams, mapping, norm_eps), bias.asnumpy()
    pre, post, logits = (
        part * factor + one
        for part, factor, one in zip(np.split(mixes, sizes, -1), alpha.asnumpy(), np.split(biases, sizes), strict=True)
    )
    comb = logits.reshape(rows, count, count)
    comb = np.exp(comb - comb.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + np.float32(eps)
    comb, _ = _host_sinkhorn(comb, iterations, eps)
    collapsed = _host_weighted_sum(streams, host.sigmoid(pre) + np.float32(eps))
    post = np.float32(2) * host.sigmoid(post)
    return collapsed, Tensor.from_numpy(post), Tensor.from_numpy(comb.reshape(rows, -1))


def _host_expand(update: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    rows, count = post.shape
    values = streams.asnumpy().reshape(rows, count, -1)
    mixed = np.matmul(comb.asnumpy().reshape(rows, count, count).swapaxes(1, 2), values)
    mixed += post.asnumpy()[:, :, None] * update.asnumpy()[:, None]
    return Tensor.from_numpy(mixed.reshape(rows, -1))


def _host_head(streams: Tensor, mapping: Tensor, alpha: Tensor, bias: Tensor, eps: float, norm_eps: float) -> Tensor:
    mixes = _host_mixes(streams, mapping, norm_eps) * alpha.asnumpy() + bias.asnumpy()
    return _host_weighted_sum(streams, host.sigmoid(mixes) + np.float32(eps))

"""Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1.

Keys and values of all heads are products of one small latent a token with a weight, `linear_kvb`. Beside the latent
there is one rotated key that all heads share. Either the latent is expanded to keys and values (`latent_heads`), or
the weight is folded into queries and outputs, and attention sees the latent alone (`absorbed_attention`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mindspore import Tensor, ops

from mindformers_ext.ops import host, native, reference
from mindformers_ext.ops.backend import device_target, recording_gradient
from mindformers_ext.ops.native import latent as kernels

_batch_matmul = ops.BatchMatMul()
_batch_matmul_transposed = ops.BatchMatMul(transpose_b=True)
_pairs = ops.Split(-1, 2)


def split_latent(
    fused: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    latent_norm: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Takes the fused projection of a token apart, normalises both latents and rotates the shared key.

    Args:
        fused: float32 ``[B * S, Q + L + R]``: queries or their latent, latent of keys and values, shared key.
        cos: float32 ``[B, S, R]``, both halves of the last axis equal.
        sin: as ``cos``.
        query_norm: weight ``[Q]`` of the RMS norm of the query part; None leaves that as it is.
        latent_norm: weight ``[L]`` of the RMS norm of the latent.
        eps: of both norms.
        interleaved: pairs of the rotation are ``(x[2i], x[2i+1])``, else ``(x[i], x[i+R/2])``. The result has them as
            ``(y[i], y[i+R/2])`` in both cases; products of queries and keys are the same.

    Returns:
        The query part ``[B * S, Q]``, and latent and rotated key side by side, ``[B, 1, S, L + R]``.
    """
    arguments = (fused, cos, sin, query_norm, latent_norm, eps, interleaved)
    if _differentiable():
        return _reference_split_latent(*arguments)
    return kernels.split_latent(*arguments) if native.available() else _host_split_latent(*arguments)


def latent_heads(
    query: Tensor, latent: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries, and expands latents to keys and values.

    Args:
        query: float32 ``[B * S, N * (P + R)]``: of each head the part without positions, then the one to rotate.
        latent: float32 ``[B, 1, S, L + R]``, see `split_latent`.
        weight: float32 ``[N * (P + Dv), L]``: of each head the rows of its key, then those of its value.
        cos: see `split_latent`; so ``sin`` and ``interleaved``.
        sin: see there.
        heads: N.
        interleaved: see there.

    Returns:
        Queries ``[B, N, 1, S, P + R]``, keys ``[B, N, S, P + R]`` and values ``[B, N, S, Dv]``: what `attention` takes.
    """
    implementation = _reference_latent_heads if _differentiable() else _host_latent_heads
    return implementation(query, latent, weight, cos, sin, heads, interleaved)


def absorbed_attention(
    query: Tensor,
    latent: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    bias: Tensor,
    heads: int,
    scale: float,
    interleaved: bool,
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None,
) -> Tensor:
    """Attention over latents without expanding them: ``W_UK`` is folded into the query, ``W_UV`` follows the mix.

    Args:
        query: see `latent_heads`.
        latent: float32 ``[B, 1, T, L + R]`` of all tokens so far.
        weight: see `latent_heads`.
        cos: of the new tokens, float32 ``[B, S, R]``; so ``sin``.
        sin: see there.
        bias: float32 ``[B or 1, 1, S, T]``, added to the scores.
        heads: N.
        scale: factor of the scores.
        interleaved: see `split_latent`.
        attend: ``(queries, latents, bias, scale)`` in place of `attention`, where the latents are a part of all.

    Returns:
        float32 ``[B * S, N * Dv]``.
    """
    size, plain = weight.shape[1], query.shape[1] // heads - cos.shape[-1]
    if device_target() != "CPU":
        absorbed = _reference_absorb_query(query, weight, cos, sin, heads, interleaved)
        run = attend or _attend_to_latents
        mixed = _by_head(run(absorbed, latent, bias, scale), heads, size)
        return _reference_values(mixed, weight, plain)
    compiled = native.available()
    few = compiled and query.shape[0] <= native.MAX_ROWS
    absorb, values = (kernels.absorb_query, kernels.latent_values) if few else (_host_absorb_query, _host_values)
    absorbed = absorb(query, weight, cos, sin, heads, interleaved)
    if attend is not None:
        mixed = _by_head(attend(absorbed, latent, bias, scale), heads, size)
    elif compiled and cos.shape[1] == 1:
        mixed = kernels.attend_latent(absorbed, latent, bias, scale, size)
    else:
        implementation = native if compiled else host
        mixed = _by_head(implementation.attention(absorbed, latent, latent, bias, scale), heads, size)
    return values(mixed, weight, plain)


def _attend_to_latents(query: Tensor, latent: Tensor, bias: Tensor, scale: float) -> Tensor:
    return reference.attention(query, latent, latent, bias, scale)


def _differentiable() -> bool:
    return device_target() != "CPU" or recording_gradient()


def _reference_rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        first, second = _pairs(x.reshape(*x.shape[:-1], -1, 2))
        x = ops.cat((first.reshape(*x.shape[:-1], -1), second.reshape(*x.shape[:-1], -1)), -1)
    return reference.rotary(x, cos, sin)


def _reference_split_latent(
    fused: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    latent_norm: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    batch, length, rope = cos.shape
    size = latent_norm.shape[0]
    query_size = fused.shape[1] - size - rope
    query, latent, key = ops.split(fused, [query_size, size, rope], -1)
    if query_norm is not None:
        query = reference.rms_norm(query, query_norm, eps)
    latent = reference.rms_norm(latent, latent_norm, eps).reshape(batch, 1, length, size)
    key = key.reshape(batch, 1, length, rope)
    return query, ops.cat((latent, _reference_rotate(key, cos.expand_dims(1), sin.expand_dims(1), interleaved)), -1)


def _reference_queries(query: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Parts of the queries without and with positions, ``[B, N, S, P]`` and, rotated, ``[B, N, S, R]``."""
    batch, length, rope = cos.shape
    parts = query.reshape(batch, length, heads, -1).permute(0, 2, 1, 3)
    plain, turned = ops.split(parts, [parts.shape[-1] - rope, rope], -1)
    return plain, _reference_rotate(turned, cos.expand_dims(1), sin.expand_dims(1), interleaved)


def _reference_latent_heads(
    query: Tensor, latent: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, rope = cos.shape
    plain, turned = _reference_queries(query, cos, sin, heads, interleaved)
    latents, shared = ops.split(latent, [weight.shape[1], rope], -1)
    expanded = reference.linear(latents.reshape(batch * length, -1), weight)
    expanded = expanded.reshape(batch, length, heads, -1).permute(0, 2, 1, 3)
    size = plain.shape[-1]
    key, value = ops.split(expanded, [size, expanded.shape[-1] - size], -1)
    shared = shared.broadcast_to((batch, heads, length, rope))
    return ops.cat((plain, turned), -1).expand_dims(2), ops.cat((key, shared), -1), value


def _reference_absorb_query(
    query: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> Tensor:
    batch, length, _ = cos.shape
    plain, turned = _reference_queries(query, cos, sin, heads, interleaved)
    size = plain.shape[-1]
    rows = plain.permute(1, 0, 2, 3).reshape(heads, batch * length, size)
    absorbed = _batch_matmul(rows, weight.reshape(heads, -1, weight.shape[1])[:, :size])
    absorbed = absorbed.reshape(heads, batch, length, -1).permute(1, 0, 2, 3)
    return ops.cat((absorbed, turned), -1).expand_dims(1)


def _by_head(mixed: Tensor, heads: int, size: int) -> Tensor:
    """Takes the first ``size`` of every head's columns out of ``[B * S, N * (L + R)]``: ``[N, B * S, L]``.

    What follows is the mix of the shared key. Leaving it out before would copy the latents of all tokens.
    """
    return mixed.reshape(mixed.shape[0], heads, -1)[:, :, :size].permute(1, 0, 2).contiguous()


def _reference_values(mixed: Tensor, weight: Tensor, plain: int) -> Tensor:
    heads, rows, size = mixed.shape
    of_values = weight.reshape(heads, -1, size)[:, plain:]
    return _batch_matmul_transposed(mixed, of_values).permute(1, 0, 2).reshape(rows, -1)


def _host_rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool, out: np.ndarray) -> None:
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[..., :half], sin[..., :half]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin


def _host_split_latent(
    fused: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    latent_norm: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    batch, length, rope = cos.shape
    values, size = fused.asnumpy(), latent_norm.shape[0]
    query_size = values.shape[1] - size - rope
    query = np.array(values[:, :query_size])
    if query_norm is not None:
        query *= host.inverse_rms(query, eps)
        query *= query_norm.asnumpy()
    latent = np.empty((batch * length, size + rope), np.float32)
    raw = values[:, query_size : query_size + size]
    np.multiply(raw, host.inverse_rms(raw, eps), out=latent[:, :size])
    latent[:, :size] *= latent_norm.asnumpy()
    cosines, sines = (table.asnumpy().reshape(-1, rope) for table in (cos, sin))
    _host_rotate(values[:, query_size + size :], cosines, sines, interleaved, latent[:, size:])
    return Tensor.from_numpy(query), Tensor.from_numpy(latent.reshape(batch, 1, length, size + rope))


def _host_latent_heads(
    query: Tensor, latent: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, rope = cos.shape
    size, rows = weight.shape[1], batch * length
    queries, latents = query.asnumpy().reshape(batch, length, heads, -1), latent.asnumpy()
    plain = queries.shape[-1] - rope
    packed = Tensor.from_numpy(np.ascontiguousarray(latents.reshape(rows, -1)[:, :size]))
    linear = native.linear if native.available() else reference.linear
    expanded = linear(packed, weight).asnumpy().reshape(batch, length, heads, -1)
    turned = np.empty((batch, heads, 1, length, plain + rope), np.float32)
    key = np.empty((batch, heads, length, plain + rope), np.float32)
    by_token = turned[:, :, 0].transpose(0, 2, 1, 3)
    by_token[..., :plain] = queries[..., :plain]
    cosines, sines = cos.asnumpy()[:, :, None], sin.asnumpy()[:, :, None]
    _host_rotate(queries[..., plain:], cosines, sines, interleaved, by_token[..., plain:])
    key[..., :plain] = expanded[..., :plain].transpose(0, 2, 1, 3)
    key[..., plain:] = latents[..., size:]
    value = np.ascontiguousarray(expanded[..., plain:].transpose(0, 2, 1, 3))
    return Tensor.from_numpy(turned), Tensor.from_numpy(key), Tensor.from_numpy(value)


def _host_absorb_query(
    query: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> Tensor:
    batch, length, rope = cos.shape
    size = weight.shape[1]
    queries = query.asnumpy().reshape(batch, length, heads, -1)
    plain = queries.shape[-1] - rope
    of_keys = weight.asnumpy().reshape(heads, -1, size)[:, :plain]
    rows = np.ascontiguousarray(queries[..., :plain].transpose(2, 0, 1, 3)).reshape(heads, batch * length, plain)
    out = np.empty((batch, 1, heads, length, size + rope), np.float32)
    out[:, 0, ..., :size] = (rows @ of_keys).reshape(heads, batch, length, size).transpose(1, 0, 2, 3)
    cosines, sines = cos.asnumpy()[:, :, None], sin.asnumpy()[:, :, None]
    _host_rotate(queries[..., plain:], cosines, sines, interleaved, out[:, 0, ..., size:].transpose(0, 2, 1, 3))
    return Tensor.from_numpy(out)


def _host_values(mixed: Tensor, weight: Tensor, plain: int) -> Tensor:
    heads, rows, size = mixed.shape
    of_values = weight.asnumpy().reshape(heads, -1, size)[:, plain:]
    values = mixed.asnumpy() @ of_values.transpose(0, 2, 1)
    return Tensor.from_numpy(np.ascontiguousarray(values.transpose(1, 0, 2)).reshape(rows, -1))

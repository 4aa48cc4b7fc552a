"""The gated delta rule and what stands around it in a gated delta net.

Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv 2412.06464. A head keeps a matrix ``S`` ``[Dk, Dv]`` instead of
keys and values. A token with key k, value v, log decay g and writing strength beta replaces what S says about k:
``S <- exp(g) S + k (beta (v - exp(g) S^T k))^T``, and a query reads ``S^T q`` (equation 10).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from mindspore import Tensor, mint, ops

from mindformers_ext.ops import host, native, reference
from mindformers_ext.ops.backend import device_target, recording_gradient
from mindformers_ext.ops.native import delta_rule as kernels

_CHUNK = 64
_L2_EPS = 1e-6

_batch_matmul = ops.BatchMatMul()
_batch_matmul_transposed = ops.BatchMatMul(transpose_b=True)


_Operation = TypeVar("_Operation", bound=Callable[..., object])


def _chosen(plain: _Operation, kernel: _Operation, on_host: _Operation) -> _Operation:
    if device_target() != "CPU" or recording_gradient():
        return plain
    return kernel if native.available() else on_host


def causal_conv(x: Tensor, weight: Tensor, past: Tensor | None = None) -> Tensor:
    """``silu`` of a causal convolution over the tokens, of every channel by itself.

    Args:
        x: float32 ``[B, S, C]``.
        weight: float32 ``[C, 1, K]``; the last tap belongs to the token itself.
        past: float32 ``[B, K - 1, C]``, the inputs before ``x``, oldest first; becomes the last inputs, in place. None:
            zeros.

    Returns:
        float32 ``[B, S, C]``.
    """
    return _chosen(_reference_causal_conv, kernels.causal_conv, _host_causal_conv)(x, weight, past)


def delta_gates(x: Tensor, a_log: Tensor, dt_bias: Tensor, real: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
    """Writing strength and log decay of every token and head: ``sigmoid(b)``, ``-exp(a_log) softplus(a + dt_bias)``.

    Args:
        x: float32 ``[N, 2 H]``: b of all heads, then a.
        a_log: float32 ``[H]``.
        dt_bias: float32 ``[H]``.
        real: bool ``[N]``; rows that are False neither write nor decay. None: all are real.

    Returns:
        beta and g, float32 ``[N, H]``.
    """
    return _chosen(_reference_delta_gates, _host_delta_gates, _host_delta_gates)(x, a_log, dt_bias, real)


def gated_delta_rule(
    qkv: Tensor, beta: Tensor, g: Tensor, key_heads: int, key_dim: int, state: Tensor | None = None
) -> Tensor:
    """Runs the gated delta rule over the tokens, with keys and queries of length 1 and queries scaled by ``Dk^-0.5``.

    Args:
        qkv: float32 ``[B, S, 2 Hk Dk + Hv Dv]``: queries, keys, values of all heads. A query and a key serve
            ``Hv / Hk`` neighbouring values.
        beta: float32 ``[B * S, Hv]``, writing strengths in [0, 1].
        g: float32 ``[B * S, Hv]``, log decays, at most 0. A token with beta 0 and g 0 leaves the state as it is.
        key_heads: Hk.
        key_dim: Dk.
        state: float32 ``[B, Hv, Dk, Dv]``, updated in place. None: zeros.

    Returns:
        float32 ``[B, S, Hv Dv]``.
    """
    return _chosen(_reference_gated_delta_rule, kernels.gated_delta_rule, _host_gated_delta_rule)(
        qkv, beta, g, key_heads, key_dim, state
    )


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of every head, then ``silu(gate)`` as a factor.

    Args:
        x: float32 ``[N, H D]``.
        gate: float32 ``[N, H D]``.
        weight: float32 ``[D]``.
        eps: see `rms_norm`.

    Returns:
        float32 ``[N, H D]``.
    """
    return _chosen(_reference_gated_rms_norm, kernels.gated_rms_norm, _host_gated_rms_norm)(x, gate, weight, eps)


def zero_rows(x: Tensor, real: np.ndarray) -> Tensor:
    """Returns ``x`` ``[N, H]`` with zeros in the rows where ``real`` (bool ``[N]``) is False."""
    return x * Tensor(real[:, None].astype(np.float32))


def _reference_causal_conv(x: Tensor, weight: Tensor, past: Tensor | None = None) -> Tensor:
    batch, length, channels = x.shape
    taps = weight.shape[2]
    before = mint.zeros((batch, taps - 1, channels)) if past is None else past
    inputs = ops.cat((before, x), 1)
    factors = weight.reshape(channels, taps)
    total = inputs[:, :length] * factors[:, 0]
    for tap in range(1, taps):
        total = total + inputs[:, tap : tap + length] * factors[:, tap]
    if past is not None:
        past[:] = inputs[:, length:]
    return mint.nn.functional.silu(total)


def _reference_delta_gates(
    x: Tensor, a_log: Tensor, dt_bias: Tensor, real: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    heads = a_log.shape[0]
    beta, shifted = ops.sigmoid(x[:, :heads]), x[:, heads:] + dt_bias
    softplus = ops.relu(shifted) + ops.log1p(ops.exp(-ops.abs(shifted)))
    g = -ops.exp(a_log) * softplus
    return (beta, g) if real is None else (zero_rows(beta, real), zero_rows(g, real))


def _reference_gated_delta_rule(
    qkv: Tensor, beta: Tensor, g: Tensor, key_heads: int, key_dim: int, state: Tensor | None = None
) -> Tensor:
    """The chunked form (section 3.3): the tokens of a chunk by matrix products, the chunks one after another.

    With G the decays from token j to token i of a chunk, the values U that are written solve (the WY form)
    ``(I + tril(beta K K^T G, -1)) U = beta (V - exp(cumsum(g)) K S)``. A chunk of one token is the recurrent form.
    """
    batch, length, _ = qkv.shape
    chunk = min(_CHUNK, 1 << (length - 1).bit_length())
    query, key, value = _reference_heads(qkv, beta.shape[1], key_heads, key_dim, chunk)
    beta, g = (_reference_chunked(part.reshape(batch, length, -1, 1), chunk) for part in (beta, g))
    lower = Tensor(np.tril(np.ones((chunk, chunk), np.float32)))
    strictly_lower = Tensor(np.tril(np.ones((chunk, chunk), np.float32), -1))

    rows, chunks = g.shape[:2]
    cumulative = _batch_matmul(mint.broadcast_to(lower, (rows, chunks, chunk, chunk)), g)
    # Above the diagonal the difference is positive and may overflow, so it is masked before exp too.
    between = ops.exp((cumulative - cumulative.swapaxes(-1, -2)) * lower) * lower
    decay, rest = ops.exp(cumulative), ops.exp(cumulative[:, :, -1:] - cumulative)
    system = _batch_matmul_transposed(key * beta, key) * between * strictly_lower
    inverse = _reference_unit_inverse(system)
    written, read = _batch_matmul(inverse, value * beta), _batch_matmul(inverse, key * (beta * decay))
    mixed = _batch_matmul_transposed(query, key) * between
    query, key = query * decay, (key * rest).swapaxes(-1, -2)

    current = mint.zeros((rows, key_dim, value.shape[-1])) if state is None else state.reshape(rows, key_dim, -1)
    outputs = []
    for i in range(chunks):
        update = written[:, i] - _batch_matmul(read[:, i], current)
        outputs.append(_batch_matmul(query[:, i], current) + _batch_matmul(mixed[:, i], update))
        current = current * decay[:, i, -1:] + _batch_matmul(key[:, i], update)
    if state is not None:
        state[:] = current.reshape(state.shape)
    result = ops.cat(outputs, 1).reshape(batch, -1, chunks * chunk, value.shape[-1])[:, :, :length]
    return result.permute(0, 2, 1, 3).reshape(batch, length, -1)


def _reference_heads(
    qkv: Tensor, value_heads: int, key_heads: int, key_dim: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B * Hv, chunks, chunk, D]``."""
    batch, length, _ = qkv.shape
    size, repeats = key_heads * key_dim, value_heads // key_heads

    def unit(x: Tensor) -> Tensor:
        x = x.reshape(batch, length, key_heads, 1, key_dim)
        x = x * ops.rsqrt((x * x).sum(-1, keepdims=True) + _L2_EPS)
        x = mint.broadcast_to(x, (batch, length, key_heads, repeats, key_dim))
        return _reference_chunked(x.reshape(batch, length, value_heads, key_dim), chunk)

    value = qkv[:, :, 2 * size :].reshape(batch, length, value_heads, -1)
    query = unit(qkv[:, :, :size]) * key_dim**-0.5
    return query, unit(qkv[:, :, size : 2 * size]), _reference_chunked(value, chunk)


def _reference_chunked(x: Tensor, chunk: int) -> Tensor:
    """Rearranges ``[B, S, H, D]`` to ``[B * H, chunks, chunk, D]`` with zeros behind the last token."""
    batch, length, heads, dim = x.shape
    missing = -length % chunk
    if missing:
        x = ops.cat((x, mint.zeros((batch, missing, heads, dim))), 1)
    return x.permute(0, 2, 1, 3).reshape(batch * heads, -1, chunk, dim)


def _reference_unit_inverse(lower: Tensor) -> Tensor:
    """Inverse of ``I + lower`` for strictly lower triangular ``[R, chunks, n, n]``, n a power of two.

    Blocks on the diagonal are inverted two by two: ``[[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']]``. The powers of
    ``lower`` would be shorter to write, but they overflow float32 where keys repeat.
    """
    rows, chunks, size, _ = lower.shape
    blocks, width = mint.ones((rows * chunks, size, 1, 1)), 1
    lower = lower.reshape(rows * chunks, size, size)
    while width < size:
        count = size // (2 * width)
        pairs = blocks.reshape(-1, count, 2, width, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        corner = ops.stack(
            [lower[:, at + width : at + 2 * width, at : at + width] for at in range(0, size, 2 * width)],
            1,
        )
        below = -_batch_matmul(_batch_matmul(second, corner), first)
        top = ops.cat((first, mint.zeros(first.shape)), -1)
        blocks, width = ops.cat((top, ops.cat((below, second), -1)), -2), 2 * width
    return blocks.reshape(rows, chunks, size, size)


def _reference_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = reference.rms_norm(x.reshape(x.shape[0], -1, weight.shape[0]), weight, eps)
    return normed.reshape(x.shape) * mint.nn.functional.silu(gate)


def _host_causal_conv(x: Tensor, weight: Tensor, past: Tensor | None = None) -> Tensor:
    batch, length, channels = x.shape
    factors = np.ascontiguousarray(weight.asnumpy()[:, 0].T)
    before = len(factors) - 1
    inputs = np.zeros((batch, before + length, channels), np.float32)
    if past is not None:
        inputs[:, :before] = past.asnumpy()
    inputs[:, before:] = x.asnumpy()
    result = np.empty((batch, length, channels), np.float32)

    for row in range(batch):

        def block(tokens: slice, values: np.ndarray = inputs[row], out: np.ndarray = result[row]) -> None:
            part = out[tokens]
            stop = tokens.start + len(part)
            np.multiply(values[tokens.start : stop], factors[0], out=part)
            for tap in range(1, before + 1):
                part += values[tokens.start + tap : stop + tap] * factors[tap]
            part *= host.sigmoid(part)

        host.by_blocks(block, length, channels)
    if past is not None:
        past.asnumpy()[:] = inputs[:, length:]
    return Tensor.from_numpy(result)


def _host_delta_gates(
    x: Tensor, a_log: Tensor, dt_bias: Tensor, real: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    heads = a_log.shape[0]
    values = x.asnumpy()
    beta = host.sigmoid(values[:, :heads])
    g = np.logaddexp(np.float32(0), values[:, heads:] + dt_bias.asnumpy())
    g *= -np.exp(a_log.asnumpy())
    if real is not None:
        beta[~real] = g[~real] = 0
    return Tensor.from_numpy(beta), Tensor.from_numpy(g)


def _host_gated_delta_rule(
    qkv: Tensor, beta: Tensor, g: Tensor, key_heads: int, key_dim: int, state: Tensor | None = None
) -> Tensor:
    batch, length, _ = qkv.shape
    heads, size = beta.shape[1], key_heads * key_dim
    chunk = min(_CHUNK, 1 << (length - 1).bit_length())
    values = qkv.asnumpy()
    # [B, Hk, 1 or Hv / Hk, chunks, chunk, D]: value heads share the products of their key head.
    query, key = (
        _host_chunked(_unit(part.reshape(batch, length, key_heads, 1, key_dim)), chunk)
        for part in (values[:, :, :size], values[:, :, size : 2 * size])
    )
    value, strength, decays = (
        _host_chunked(part.reshape(batch, length, key_heads, heads // key_heads, -1), chunk)
        for part in (values[:, :, 2 * size :], beta.asnumpy(), g.asnumpy())
    )
    query *= np.float32(key_dim**-0.5)

    cumulative = np.cumsum(decays, -2)
    with np.errstate(over="ignore"):  # above the diagonal, where it does not count
        between = np.tril(np.exp(cumulative - cumulative.swapaxes(-1, -2)))
    system = np.tril(key @ key.swapaxes(-1, -2) * between * strength, -1)
    mixed = query @ key.swapaxes(-1, -2) * between
    inverse = _host_unit_inverse(system)
    decay = np.exp(cumulative)
    written, read = inverse @ (value * strength), inverse @ (key * (strength * decay))
    query, key = query * decay, (key * np.exp(cumulative[..., -1:, :] - cumulative)).swapaxes(-1, -2)

    shape = (batch, key_heads, heads // key_heads, key_dim, value.shape[-1])
    current = np.zeros(shape, np.float32) if state is None else state.asnumpy().reshape(shape)
    result = np.empty_like(value)
    for i in range(value.shape[3]):
        update = written[:, :, :, i] - read[:, :, :, i] @ current
        np.matmul(query[:, :, :, i], current, out=result[:, :, :, i])
        result[:, :, :, i] += mixed[:, :, :, i] @ update
        current *= decay[:, :, :, i, -1:]
        current += key[:, :, :, i] @ update
    tokens = result.reshape(batch, heads, -1, value.shape[-1])[:, :, :length]
    return Tensor.from_numpy(np.ascontiguousarray(tokens.swapaxes(1, 2)).reshape(batch, length, -1))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.einsum("...i,...i->...", x, x)[..., None] + np.float32(_L2_EPS))


def _host_chunked(x: np.ndarray, chunk: int) -> np.ndarray:
    """Rearranges ``[B, S, N, R, D]`` to ``[B, N, R, chunks, chunk, D]`` with zeros behind the last token."""
    batch, length, groups, repeats, dim = x.shape
    result = np.zeros((batch, groups, repeats, -(-length // chunk) * chunk, dim), np.float32)
    result[:, :, :, :length] = x.transpose(0, 2, 3, 1, 4)
    return result.reshape(batch, groups, repeats, -1, chunk, dim)


def _host_unit_inverse(lower: np.ndarray) -> np.ndarray:
    """See `_reference_unit_inverse`; works in the memory of its result."""
    size, width = lower.shape[-1], 1
    inverse = np.broadcast_to(np.eye(size, dtype=np.float32), lower.shape).copy()
    while width < size:
        for start in range(0, size, 2 * width):
            first, second = slice(start, start + width), slice(start + width, start + 2 * width)
            corner = inverse[..., second, second] @ lower[..., second, first]
            inverse[..., second, first] = -(corner @ inverse[..., first, first])
        width *= 2
    return inverse


def _host_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    values, gates, factors = x.asnumpy(), gate.asnumpy(), weight.asnumpy()
    result = np.empty(values.shape, np.float32)

    def block(rows: slice) -> None:
        heads, part = values[rows].reshape(-1, len(factors)), result[rows]
        np.multiply(heads, host.inverse_rms(heads, eps), out=part.reshape(heads.shape))
        part.reshape(heads.shape)[:] *= factors
        part *= gates[rows] * host.sigmoid(gates[rows])

    host.by_blocks(block, *values.shape)
    return Tensor.from_numpy(result)

"""numpy implementations for float32 tensors on a CPU, where tensors and arrays share memory.

Large operands are worked off in blocks of rows that fit into a core's cache. One thread does it: MindSpore's own
threads spin after every matrix product, and a second pool beside them slows both down.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from mindspore import Tensor

from mindformers_ext.ops import reference

_BLOCK_ELEMENTS = 1 << 16


def by_blocks(function: Callable[[slice], None], rows: int, row_elements: int) -> None:
    """Calls ``function`` on slices that cover ``rows``; it writes into arrays of its own."""
    step = max(1, _BLOCK_ELEMENTS // row_elements)
    for start in range(0, rows, step):
        function(slice(start, start + step))


def inverse_rms(x: np.ndarray, eps: float) -> np.ndarray:
    """Returns ``1 / sqrt(mean(x^2) + eps)`` over the last axis, which stays with size 1."""
    mean_square = np.einsum("...i,...i->...", x, x)[..., None]
    mean_square *= np.float32(1 / x.shape[-1])
    mean_square += np.float32(eps)
    return np.float32(1) / np.sqrt(mean_square)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-x))`` of float32 of any shape."""
    with np.errstate(over="ignore"):  # inf for a very negative x, and 0 as it should be
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mindformers_ext.ops.rms_norm`."""
    values, factors = x.asnumpy(), weight.asnumpy()
    result = np.empty_like(values)

    def block(rows: slice) -> None:
        np.multiply(values[rows], inverse_rms(values[rows], eps), out=result[rows])
        result[rows] *= factors

    by_blocks(block, *values.shape)
    return Tensor.from_numpy(result)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `mindformers_ext.ops.add_rms_norm`."""
    values, updates, factors = x.asnumpy(), update.asnumpy(), weight.asnumpy()
    total, normed = np.empty_like(values), np.empty_like(values)

    def block(rows: slice) -> None:
        np.add(values[rows], updates[rows], out=total[rows])
        np.multiply(total[rows], inverse_rms(total[rows], eps), out=normed[rows])
        normed[rows] *= factors

    by_blocks(block, *values.shape)
    return Tensor.from_numpy(total), Tensor.from_numpy(normed)


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
    dim, half = dim or rotary_dim, rotary_dim // 2
    values = qkv.asnumpy().reshape(batch, length, groups, -1, dim)
    heads = (values.shape[3] - 2) // (2 if gated else 1)
    cosines, sines = (table.asnumpy()[:, :, None, None] for table in (cos, sin))
    weights = (None, None) if norms is None else (norms[0].asnumpy(), norms[1].asnumpy())
    query = np.empty((batch, groups, heads, length, dim), np.float32)
    key = np.empty((batch, groups, length, dim), np.float32)
    value = np.empty((batch, groups, length, dim), np.float32)
    value_by_token = value.transpose(0, 2, 1, 3)
    turned = (
        (values[:, :, :, :heads], query.transpose(0, 3, 1, 2, 4), weights[0]),
        (values[:, :, :, -2:-1], key.transpose(0, 2, 1, 3)[:, :, :, None], weights[1]),
    )

    def block(rows: slice, tokens: slice) -> None:
        cosine, sine = cosines[rows, tokens], sines[rows, tokens]
        for source, target, weight in turned:
            part, out = source[rows, tokens], target[rows, tokens]
            if weight is not None:
                part = part * inverse_rms(part, eps)
                part *= weight
            np.multiply(part[..., :rotary_dim], cosine, out=out[..., :rotary_dim])
            out[..., :half] -= part[..., half:rotary_dim] * sine[..., :half]
            out[..., half:rotary_dim] += part[..., :half] * sine[..., half:]
            out[..., rotary_dim:] = part[..., rotary_dim:]
        value_by_token[rows, tokens] = values[rows, tokens, :, -1]

    elements = groups * (heads + 1) * dim
    if length == 1:
        by_blocks(lambda rows: block(rows, slice(None)), batch, elements)
    else:
        for row in range(batch):
            by_blocks(partial(block, slice(row, row + 1)), length, elements)
    return Tensor.from_numpy(query), Tensor.from_numpy(key), Tensor.from_numpy(value)


def gate_heads(x: Tensor, qkv: Tensor, groups: int, dim: int) -> Tensor:
    """See `mindformers_ext.ops.gate_heads`."""
    projected = qkv.asnumpy().reshape(len(qkv), groups, -1, dim)
    heads = projected.shape[2] // 2 - 1
    result = np.empty(x.shape, np.float32)

    def block(rows: slice) -> None:
        part = result[rows]
        np.negative(projected[rows, :, heads : 2 * heads], out=part.reshape(-1, groups, heads, dim))
        with np.errstate(over="ignore"):  # inf for a very negative gate, and 0 as it should be
            np.exp(part, out=part)
        part += np.float32(1)
        np.divide(x.asnumpy()[rows], part, out=part)

    by_blocks(block, *x.shape)
    return Tensor.from_numpy(result)


def swiglu(x: Tensor, limit: float = 0.0) -> Tensor:
    """See `mindformers_ext.ops.swiglu`."""
    values = x.asnumpy()
    result = np.empty((len(values), values.shape[1] // 2), np.float32)

    def block(rows: slice) -> None:
        gated_product(values[rows, ::2], values[rows, 1::2], limit, result[rows])

    by_blocks(block, *values.shape)
    return Tensor.from_numpy(result)


def gated_product(gate: np.ndarray, up: np.ndarray, limit: float, out: np.ndarray) -> None:
    """Writes ``silu(gate) * up`` to ``out``, all ``[N, F]``; see `mindformers_ext.ops.swiglu` for the limit."""
    gate = np.ascontiguousarray(gate)
    if limit:
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    np.negative(gate, out=out)
    with np.errstate(over="ignore"):  # inf for a very negative gate, and silu 0 as it should be
        np.exp(out, out=out)
    out += np.float32(1)
    np.divide(gate, out, out=out)
    out *= up


def attention_weights(scores: Tensor, bias: Tensor, scale: float) -> Tensor:
    """``softmax(scale * scores + bias)`` of scores ``[B, N, G, S, T]``, which it may overwrite."""
    batch, groups, heads, length, slots = scores.shape
    values = scores.asnumpy().reshape(batch * groups, heads, length, slots)
    biases = np.broadcast_to(bias.asnumpy(), (batch, groups, length, slots)).reshape(batch * groups, 1, length, slots)

    def block(rows: slice) -> None:
        part = values[rows]
        part *= np.float32(scale)
        part += biases[rows]
        part -= part.max(-1, keepdims=True)
        np.exp(part, out=part)
        part /= part.sum(-1, keepdims=True)

    by_blocks(block, batch * groups, heads * length * slots)
    return Tensor.from_numpy(values.reshape(scores.shape))


def merge_heads(mixed: Tensor) -> Tensor:
    """Rearranges ``[B, N, G, S, D]`` to ``[B * S, N * G * D]``."""
    values = mixed.asnumpy().transpose(0, 3, 1, 2, 4)
    return Tensor.from_numpy(values.reshape(values.shape[0] * values.shape[1], -1))


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """See `mindformers_ext.ops.attention`."""
    weights = attention_weights(reference.attention_scores(query, key), bias, scale)
    return merge_heads(reference.attention_mix(weights, value))


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """See `mindformers_ext.ops.cross_entropy`."""
    _, loss = softmax_and_loss(logits.asnumpy(), labels.asnumpy(), ignore_index)
    return Tensor.from_numpy(loss)


def softmax_and_loss(logits: np.ndarray, labels: np.ndarray, ignore_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probabilities ``[counted, V]`` of the rows that count, and their mean negative log likelihood."""
    rows = np.flatnonzero(labels != ignore_index)
    probabilities = logits[rows]
    probabilities -= probabilities.max(-1, keepdims=True, initial=-np.inf)
    picked = probabilities[np.arange(len(rows)), labels[rows]]
    np.exp(probabilities, out=probabilities)
    totals = probabilities.sum(-1, keepdims=True)
    probabilities /= totals
    nll = np.log(totals[:, 0], dtype=np.float64) - picked
    return probabilities, np.array(nll.sum() / max(len(rows), 1), np.float32)


def write_slots(buffer: Tensor, start: int, values: Tensor) -> None:
    """See `mindformers_ext.ops.write_slots`."""
    buffer.asnumpy()[:, :, start : start + values.shape[2]] = values.asnumpy()


def move_rows(buffer: Tensor, rows: np.ndarray, start: int, stop: int) -> None:
    """See `mindformers_ext.ops.move_rows`."""
    moved = np.flatnonzero(rows != np.arange(len(rows)))
    if moved.size and start < stop:
        slots = buffer.asnumpy()[:, :, start:stop]
        slots[moved] = slots[rows[moved]]


def put_rows(buffer: Tensor, rows: np.ndarray, end: int, source: Tensor, start: int, stop: int) -> None:
    """See `mindformers_ext.ops.put_rows`."""
    slots, first = buffer.asnumpy(), end - (stop - start)
    slots[rows, :, :first] = 0
    slots[rows, :, first:end] = source.asnumpy()[:, :, start:stop]


def shift_slots(buffer: Tensor, by: int, length: int) -> None:
    """See `mindformers_ext.ops.shift_slots`."""
    slots = buffer.asnumpy()
    if by < 0:
        slots[:, :, : length + by] = slots[:, :, -by:length]
    else:
        slots[:, :, by : by + length] = slots[:, :, :length]
        slots[:, :, :by] = 0

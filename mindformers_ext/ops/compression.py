"""Compressing windows of tokens into blocks, and choosing the blocks that a token attends to.

Source: DeepSeek-V4 report, sections 2.3.1 (windows that overlap, lightning indexer) and 2.3.2. A sequence that is
compressed piece by piece keeps its last tokens in a ring: slot s of the sequence is slot ``s % R`` of the ring.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, ops

from mindformers_ext.ops import native
from mindformers_ext.ops.backend import device_target, recording_gradient
from mindformers_ext.ops.native import sparse_attention as kernels
from mindformers_ext.ops.sparse_attention import MASKED
from mindformers_ext.ops.torch_topk import top_indices

# Scores of so many query heads and blocks are held at once.
_SCORE_ELEMENTS = 1 << 22

_batch_matmul_transposed = ops.BatchMatMul(transpose_b=True)


def _on_host() -> bool:
    return device_target() == "CPU" and not recording_gradient()


def compressor_gates(gates: Tensor, position_bias: Tensor, offsets: np.ndarray, real: np.ndarray | None) -> Tensor:
    """Adds the bias of each token's place in its window to its gates; the gates of pads count for nothing.

    Args:
        gates: float32 ``[N, D]``; may be overwritten.
        position_bias: float32 ``[rate, D]``.
        offsets: int ``[N]``, places in the window.
        real: bool ``[N]``, False for pads; None: all are real.

    Returns:
        float32 ``[N, D]``.
    """
    if _on_host():
        values = gates.asnumpy()
        values += position_bias.asnumpy()[offsets]
        if real is not None:
            values[~real] = MASKED
        return Tensor.from_numpy(values)
    gates = gates + ops.gather(position_bias, Tensor(offsets.astype(np.int32)), 0)
    if real is None:
        return gates
    return ops.select(Tensor(np.broadcast_to(real[:, None], gates.shape).copy()), gates, ops.full_like(gates, MASKED))


def pool_windows(values: Tensor, gates: Tensor, index: np.ndarray) -> Tensor:
    """Mixes the tokens of each window, channel by channel, by the softmax of their gates.

    Args:
        values: float32 ``[X, D]``.
        gates: float32 ``[X, D]``.
        index: int32 ``[B, M, W]``, the rows of which each of B times M windows consists.

    Returns:
        float32 ``[B * M, D]``.
    """
    shape = (-1, index.shape[-1], values.shape[-1])
    if not _on_host():
        rows = Tensor(index)
        weights = ops.softmax(ops.gather(gates, rows, 0).reshape(shape), 1)
        return ops.ReduceSum()(ops.gather(values, rows, 0).reshape(shape) * weights, 1)
    weights = gates.asnumpy()[index].reshape(shape)
    weights -= weights.max(1, keepdims=True)
    np.exp(weights, out=weights)
    totals = weights.sum(1)
    weights *= values.asnumpy()[index].reshape(shape)
    return Tensor.from_numpy(weights.sum(1) / totals)


def index_scores(query: Tensor, keys: Tensor, weights: Tensor, count: int) -> Tensor:
    """Scores of the lightning indexer: ``sum_h weights_h relu(query_h keys^T)``.

    Args:
        query: float32 ``[B, S, N, D]``.
        keys: float32 ``[B, C, D]``, one a block.
        weights: float32 ``[B * S, N]``, with every factor of the scores.
        count: blocks T that are scored, the first of ``keys``.

    Returns:
        float32 ``[B, S, T]``.
    """
    batch, length, heads, dim = query.shape
    if _on_host() and native.available():
        return kernels.index_scores(query, keys, weights, count)
    used = keys if keys.shape[1] == count else keys[:, :count]
    factors = weights.reshape(batch, length, heads, 1)
    step = max(1, _SCORE_ELEMENTS // (batch * heads * max(count, 1)))
    parts = []
    for start in range(0, length, step):
        rows = query[:, start : start + step].reshape(batch, -1, dim)
        products = ops.relu(_batch_matmul_transposed(rows, used)).reshape(batch, -1, heads, count)
        parts.append(ops.ReduceSum()(products * factors[:, start : start + step], 2))
    return parts[0] if len(parts) == 1 else ops.cat(parts, 1)


def select_blocks(scores: Tensor, visible: np.ndarray, topk: int) -> Tensor:
    """Bias under which a token sees its ``topk`` best blocks; among equals those that torch would choose.

    Args:
        scores: float32 ``[B, S, T]``.
        visible: int ``[B or 1, S]``, blocks that a token may see at most: the first so many.
        topk: blocks to choose.

    Returns:
        float32 ``[B, S, T]``: 0 or a number so low that it masks.
    """
    count = scores.shape[-1]
    visible = np.broadcast_to(visible, scores.shape[:2])
    allowed = np.arange(count) < visible[..., None]
    if count <= topk:
        return Tensor.from_numpy(np.where(allowed, np.float32(0), MASKED))
    values = np.where(allowed, scores.asnumpy(), np.float32(-np.inf))
    lowest = np.partition(values, count - topk, axis=-1)[..., count - topk, None]
    chosen = values >= lowest
    # Where more than topk are chosen, some of them are equal.
    for row, token in zip(*np.nonzero((chosen & allowed).sum(-1) > topk), strict=True):
        # Alone, a row has as many blocks as its last token sees.
        width = int(visible[row].max())
        chosen[row, token] = False
        chosen[row, token, top_indices(values[row, token, :width], topk)] = True
    return Tensor.from_numpy(np.where(chosen & allowed, np.float32(0), MASKED))


def read_ring(ring: Tensor, start: int, stop: int) -> Tensor:
    """Slots ``start`` to ``stop`` of the sequence, at most R of them, in order.

    Args:
        ring: float32 ``[B, 1, R, D]``.
        start: first slot of the sequence.
        stop: slot after the last.

    Returns:
        float32 ``[B, stop - start, D]``.
    """
    slots = np.arange(start, stop) % ring.shape[2]
    if device_target() == "CPU":
        return Tensor.from_numpy(np.ascontiguousarray(ring.asnumpy()[:, 0, slots]))
    return ops.gather(ring.squeeze(1), Tensor(slots.astype(np.int32)), 1)


def write_ring(ring: Tensor, start: int, values: Tensor) -> None:
    """Writes ``values`` ``[B, S, D]`` as slots ``start`` to ``start + S`` into ``ring`` ``[B, 1, R, D]``, in place."""
    size, length = ring.shape[2], values.shape[1]
    kept = min(size, length)
    slots = np.arange(start + length - kept, start + length) % size
    if device_target() == "CPU":
        ring.asnumpy()[:, 0, slots] = values.asnumpy()[:, length - kept :]
    else:
        ring[:, :, Tensor(slots.astype(np.int32))] = values[:, length - kept :].expand_dims(1)


def put_ring_rows(ring: Tensor, rows: np.ndarray, end: int, source: Tensor, source_end: int) -> None:
    """Makes rows of a ring those of another ring of the same size, in place.

    Args:
        ring: float32 ``[B, 1, R, D]``, which holds the slots before ``end`` of its sequences.
        rows: int ``[n]``, rows of it.
        end: see above.
        source: float32 ``[n, 1, R, D]``, which holds the slots before ``source_end``: those that are written.
        source_end: see above.
    """
    size = ring.shape[2]
    places = np.arange(size)
    origins = (places - end + source_end) % size
    if device_target() == "CPU":
        ring.asnumpy()[rows] = source.asnumpy()[:, :, origins]
        return
    turned = ops.gather(source, Tensor(origins.astype(np.int32)), 2)
    for index, row in enumerate(rows.tolist()):
        ring[row : row + 1] = turned[index : index + 1]


def shift_ring(ring: Tensor, by: int) -> None:
    """Makes what was slot s of the sequences in ``ring`` ``[B, 1, R, D]`` slot ``s + by``, in place."""
    if by % ring.shape[2]:
        put_ring_rows(ring, np.arange(ring.shape[0]), by, ring.copy(), 0)


def write_blocks(buffer: Tensor, rows: np.ndarray, slots: np.ndarray, values: Tensor, chosen: np.ndarray) -> None:
    """Writes rows of ``values`` into ``buffer``, in place.

    Args:
        buffer: float32 ``[B, 1, C, D]``.
        rows: int ``[n]``, where to write: rows of ``buffer``.
        slots: int ``[n]``, and their slots.
        values: float32 ``[X, D]``.
        chosen: int ``[n]``, the rows of ``values``.
    """
    if device_target() == "CPU":
        buffer.asnumpy()[rows, 0, slots] = values.asnumpy()[chosen]
        return
    where = [Tensor(part.astype(np.int32)) for part in (rows, np.zeros_like(rows), slots)]
    buffer[tuple(where)] = ops.gather(values, Tensor(chosen.astype(np.int32)), 0)

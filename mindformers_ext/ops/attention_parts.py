"""Attention over a part of the keys, and what it takes to join the parts.

With ``l_p`` the log of the sum of exponentials of part p, the whole is ``sum_p exp(l_p - l) out_p`` where
``l = log sum_p exp(l_p)`` (FlashAttention-2, arXiv 2307.08691, section 2.3.1).
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, ops

from mindformers_ext.ops import host, reference
from mindformers_ext.ops.backend import device_target, recording_gradient

# Below every log of a sum that is not empty; finite, so that differences are.
EMPTY = np.float32(-1e30)


def partial_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention as `mindformers_ext.ops.attention`, over keys that may be none, or all masked, for some rows.

    Args:
        query: float32 ``[B, N, G, S, D]``.
        key: float32 ``[B, N, T, D]``; T may be 0.
        value: float32 ``[B, N, T, Dv]``.
        bias: float32 ``[B or 1, 1, S, T]``.
        scale: factor of the scores.

    Returns:
        float32 ``[B * S, N * G * Dv]``, 0 where no key is visible, and the log of the sum of exponentials of the
        scores, float32 ``[B * S, N * G]``, `EMPTY` there.
    """
    batch, groups, heads, length, _ = query.shape
    if not key.shape[2]:
        size = groups * heads
        nothing = np.zeros((batch * length, size * value.shape[-1]), np.float32)
        return Tensor.from_numpy(nothing), Tensor.from_numpy(np.full((batch * length, size), EMPTY))
    if device_target() != "CPU" or recording_gradient():
        return _reference(query, key, value, bias, scale)
    scores = reference.attention_scores(query, key).asnumpy()
    scores *= np.float32(scale)
    scores += bias.asnumpy()[:, :, None]
    largest = np.maximum(scores.max(-1, keepdims=True), EMPTY)
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    seen = largest > EMPTY
    scores *= np.where(seen, np.float32(1) / np.where(seen, total, np.float32(1)), np.float32(0))
    logs = np.where(seen, np.log(np.where(seen, total, np.float32(1))) + largest, EMPTY)[..., 0]
    mixed = reference.attention_mix(Tensor.from_numpy(scores), value)
    logs = np.ascontiguousarray(logs.transpose(0, 3, 1, 2)).reshape(batch * length, -1)
    return host.merge_heads(mixed), Tensor.from_numpy(logs)


def join_weights(logs: Tensor) -> Tensor:
    """Returns the weight of each part in the whole, float32 ``[parts, N, heads]``, from their logs of that shape."""
    if device_target() != "CPU" or recording_gradient():
        return ops.softmax(logs, 0)
    values = logs.asnumpy()
    weights = np.exp(values - values.max(0))
    weights /= weights.sum(0)
    return Tensor.from_numpy(weights)


def _reference(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, _, _, length, _ = query.shape
    scores = reference.attention_scores(query, key) * scale + bias.expand_dims(1)
    largest = ops.stop_gradient(ops.maximum(scores.max(-1, keepdims=True), Tensor(EMPTY)))
    exponentials = ops.exp(scores - largest)
    total = exponentials.sum(-1, keepdims=True)
    seen = (largest > EMPTY).astype(scores.dtype)
    weights = exponentials / (total + (1 - seen)) * seen
    logs = (ops.log(total * seen + (1 - seen)) + largest) * seen + (1 - seen) * float(EMPTY)
    mixed = reference.attention_mix(weights, value).permute(0, 3, 1, 2, 4).reshape(batch * length, -1)
    return mixed, logs.squeeze(-1).permute(0, 3, 1, 2).reshape(batch * length, -1)

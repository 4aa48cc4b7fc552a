"""numpy implementations for small float32 tensors on a CPU, where tensors and arrays share memory."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mindformers_ext.ops.rms_norm`."""
    values = x.asnumpy()
    mean_square = np.square(values).mean(-1, keepdims=True)
    result = values / np.sqrt(mean_square + np.float32(eps))
    result *= weight.asnumpy()
    return Tensor.from_numpy(result)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `mindformers_ext.ops.rotary`."""
    values, sines, half = x.asnumpy(), sin.asnumpy(), x.shape[-1] // 2
    result = values * cos.asnumpy()
    result[..., :half] -= values[..., half:] * sines[..., :half]
    result[..., half:] += values[..., :half] * sines[..., half:]
    return Tensor.from_numpy(result)


def swiglu(x: Tensor) -> Tensor:
    """See `mindformers_ext.ops.swiglu`."""
    values = x.asnumpy()
    gate, up = values[:, ::2], values[:, 1::2]
    with np.errstate(over="ignore"):  # exp(-gate) is inf for a very negative gate, and silu 0 as it should be
        result = gate / (1 + np.exp(-gate))
    result *= up
    return Tensor.from_numpy(result)


def attention_weights(scores: Tensor, bias: Tensor, scale: float) -> Tensor:
    """See `mindformers_ext.ops.reference.attention_weights`."""
    weights = scores.asnumpy() * np.float32(scale)
    weights += bias.asnumpy()[:, :, None]
    weights -= weights.max(-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(-1, keepdims=True)
    return Tensor.from_numpy(weights)

"""The device of this process and what follows for the choice of implementations."""

from __future__ import annotations

from functools import cache

import mindspore as ms
from mindspore import Tensor
from mindspore.common.api import _pynative_executor

# Up to this many elements numpy beats the dispatch of the equivalent MindSpore operations.
HOST_ELEMENTS = 1 << 17


@cache
def device_target() -> str:
    """Returns ``CPU`` or ``Ascend``."""
    return str(ms.get_context("device_target"))


def recording_gradient() -> bool:
    """Tells whether operations are being recorded for differentiation right now."""
    return bool(_pynative_executor.grad_flag() and _pynative_executor.enable_grad())


def host_pays(x: Tensor) -> bool:
    """Tells whether numpy on the host is the faster implementation for an operand like ``x``."""
    return x.size <= HOST_ELEMENTS and device_target() == "CPU" and not recording_gradient()


def describe() -> dict[str, str]:
    """Returns which implementation is in use, by kind of tensor."""
    small = "numpy on the host" if device_target() == "CPU" else "mindspore"
    return {
        "device": device_target(),
        "matrix products": "mindspore MatMul",
        f"element-wise, up to {HOST_ELEMENTS} elements": small,
        "element-wise, larger or with gradient": "mindspore",
    }

"""The device of this process and what follows for the choice of implementations."""

from __future__ import annotations

from functools import cache

import mindspore as ms
from mindspore.graph.api import _pynative_executor


@cache
def device_target() -> str:
    """Returns ``CPU`` or ``Ascend``."""
    return str(ms.get_context("device_target"))


def recording_gradient() -> bool:
    """Tells whether operations are being recorded for differentiation right now."""
    return bool(_pynative_executor.grad_flag() and _pynative_executor.enable_grad())

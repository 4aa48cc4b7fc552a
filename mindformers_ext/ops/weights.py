"""In which type the weights of a prediction are kept, and in which order."""

from __future__ import annotations

import numpy as np

from mindformers_ext.ops import native
from mindformers_ext.ops.backend import device_target
from mindformers_ext.ops.native.packed import PackedStack, PackedWeight

__all__ = ["PackedStack", "PackedWeight", "can_pack", "rounded"]


def can_pack() -> bool:
    """Tells whether this process has products with packed weights: on a CPU with C++ kernels."""
    return device_target() == "CPU" and native.available()


def rounded(values: np.ndarray, dtype: str, axis: int = -1) -> np.ndarray:
    """Returns the float32 values that a matrix has once it is kept as ``dtype``: what packed weights compute with.

    Args:
        values: float32, or uint16, the bits of bfloat16 values; any shape.
        dtype: ``float32``, ``bfloat16`` or ``int8``.
        axis: the axis of the inputs, along which int8 has one scale.

    Raises:
        ValueError: a value is not finite and int8 could not hold it.
    """
    if values.dtype == np.uint16:
        values = np.left_shift(values, np.uint32(16), dtype=np.uint32).view(np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        even = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(values), values, even.view(np.float32))
    if dtype == "int8":
        scale = np.abs(values).max(axis, keepdims=True, initial=0) / np.float32(127)
        if not np.isfinite(scale).all():
            raise ValueError("it holds values that are not finite, which int8 cannot keep; give float32 or bfloat16")
        whole = np.rint(values / np.where(scale > 0, scale, np.float32(1)))
        return np.clip(whole, -127, 127) * scale  # a subnormal scale does not keep them within
    return values

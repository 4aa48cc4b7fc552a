"""Write a safetensors file one tensor at a time and piece by piece, so that saving needs no copy of a tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindformers_ext.checkpoint.convert import pieces

# numpy's name of a type -> safetensors' name and bytes of a value. numpy knows bfloat16 only when a library such as
# MindSpore registered it.
_TYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
# Values that are converted at a time; rounding to bfloat16 takes several times their memory.
_PIECE = 1 << 18


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy type name and shape of a tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * _TYPES[self.dtype][1]


def write_tensors(
    path: Path, specs: Sequence[TensorSpec], read: Callable[[str], np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file and waits until it is on the disk.

    Args:
        path: the file, which must not exist.
        specs: the tensors.
        read: returns the values of a tensor in C order, of any shape and strides: in the type of its spec, as float32
            that is rounded to it, or as int32 for int64.
        metadata: texts for the header.

    Raises:
        ValueError: if a type cannot be stored, a name is used twice, or ``read`` returns something else than announced.
    """
    for spec in specs:
        if spec.dtype not in _TYPES:
            raise ValueError(f"{spec.name} has type {spec.dtype}, which safetensors cannot hold")
    # Wide types first keeps every tensor aligned to its own size.
    ordered = sorted(specs, key=lambda spec: -_TYPES[spec.dtype][1])
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for spec in ordered:
        if spec.name in header:
            raise ValueError(f"two tensors are called {spec.name}")
        end = position + spec.nbytes
        header[spec.name] = {
            "dtype": _TYPES[spec.dtype][0],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in ordered:
            array = read(spec.name)
            _check_announced(spec, array)
            for index, _, _ in pieces(array.shape, _PIECE):
                file.write(_raw_bytes(spec, array[index]))
        file.flush()
        os.fsync(file.fileno())


def _check_announced(spec: TensorSpec, array: np.ndarray) -> None:
    """Refuses another number of values, or a type that would not become the announced one as it should."""
    given = array.dtype.name
    converted = (given, spec.dtype) in (("float32", "float16"), ("float32", "bfloat16"), ("int32", "int64"))
    if array.size != math.prod(spec.shape) or not (converted or given == spec.dtype):
        raise ValueError(f"{spec.name} was announced as {spec.dtype} {spec.shape} and comes as {given} {array.shape}")


def _raw_bytes(spec: TensorSpec, values: np.ndarray) -> memoryview:
    if values.dtype.name == "float32":
        values = narrow(values, spec.dtype, spec.name)
    elif values.dtype.name != spec.dtype:
        values = values.astype(spec.dtype)
    if values.dtype.byteorder == ">":
        values = values.astype(values.dtype.newbyteorder("<"))
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def narrow(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Rounds float32 values to nearest even in another type.

    Args:
        values: float32, any shape.
        dtype: ``float32``, ``float16`` or ``bfloat16``; bfloat16 comes back as its bits (uint16).
        name: of the tensor, for the error.

    Raises:
        ValueError: if a finite value is too large for float16.
    """
    if dtype == "float32":
        return values
    values = np.ascontiguousarray(values, np.float32)
    return _to_float16(values, name) if dtype == "float16" else _to_bfloat16(values)


def _to_float16(values: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        result = values.astype(np.float16)
    if np.any(np.isinf(result) & np.isfinite(values)):
        raise ValueError(f"{name} holds values above 65504, the largest float16; use bfloat16 or float32")
    return result


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)  # rounding could turn a NaN into infinity or overflow
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)

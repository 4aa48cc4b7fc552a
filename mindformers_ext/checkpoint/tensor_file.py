"""One safetensors file: a checked header, and tensors read one at a time through the memory map.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from safetensors import SafetensorError, safe_open

from mindformers_ext.checkpoint.convert import part_of, scatter, stretches, widen_into
from mindformers_ext.checkpoint.errors import CheckpointError, listed
from mindformers_ext.checkpoint.files import parse_json_object

# BF16 has no numpy type of its own: its bits are read as uint16, types of 8 and 4 bits as bytes.
_STORED_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "U64": "<u8",
    "I32": "<i4",
    "U32": "<u4",
    "I16": "<i2",
    "U16": "<u2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "F4": "u1",
}
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")
# Stored types that a parameter of a type is read from.
READABLE = {"float32": ("F32", "F16", "BF16"), "int32": ("I64", "I32")}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

_FOREIGN_STARTS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the weights: fetch them with `git lfs pull`"),
    (b"\x80", "is a pickle file under a safetensors name; only safetensors is read"),
    (b"PK\x03\x04", "is a zip archive (a PyTorch pickle file?); only safetensors is read"),
    (b"<", "is a web page, not weights: the download failed"),
)


def stored_width(dtype: str) -> int:
    """Returns the bytes of a value of a type in safetensors' name; of F4, which packs two, those of a pair."""
    return np.dtype(_STORED_TYPES[dtype]).itemsize


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor inside a safetensors file.

    Attributes:
        name: its name in the file.
        dtype: safetensors' name of its type, e.g. ``BF16``.
        shape: its shape.
        start: position of its first byte in the file.
        nbytes: length in bytes.
        file: the file that holds it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    file: TensorFile = field(repr=False)

    @property
    def where(self) -> str:
        """Name of the tensor and of its file, for messages."""
        return f"{self.name} in {self.file.label}"

    @property
    def label(self) -> str:
        """Name of its file, for messages."""
        return self.file.label

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def window(self, first: int, count: int, ahead: bool = True) -> np.ndarray:
        """Returns ``count`` values from position ``first`` on (C order) as a read-only flat array over the file.

        BF16 comes as its bits (uint16), FP8 and E8M0 as their codes (uint8); of F4, ``first`` and ``count`` are bytes.
        The mapping covers these values only and ends with the array. ``ahead``: all of them are about to be read.

        Raises:
            CheckpointError: if numpy has no such type, or the file became shorter since it was opened.
        """
        stored = _STORED_TYPES.get(self.dtype)
        if stored is None:
            raise CheckpointError(f"{self.where} has type {self.dtype}, which is not supported")
        width = np.dtype(stored).itemsize
        if not count:
            return np.empty(0, stored)
        self.file.was_read = True
        start = self.start + first * width
        offset = start % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(
                self.file.descriptor, offset + count * width, access=mmap.ACCESS_READ, offset=start - offset
            )
        except ValueError as error:
            raise CheckpointError(f"{self.file.path} became shorter while {self.name} was read") from error
        if ahead and hasattr(mmap, "MADV_WILLNEED"):
            mapped.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(mapped, stored, count=count, offset=offset)

    def read_into(
        self, target: np.ndarray, shape: tuple[int, ...] | None = None, box: tuple[slice, ...] | None = None
    ) -> None:
        """Writes values into an array of any shape and strides, in C order.

        BF16 comes as the numbers it stands for, or into an array of uint16 as its bits.

        Args:
            target: the array, of the shape of the box.
            shape: shape in which the tensor is seen; None for the target's.
            box: begin and end along every axis of ``shape`` of the values that are wanted; None for all.

        Raises:
            CheckpointError: if an integer does not fit the target's type, or the file became shorter.
        """
        shape = shape or target.shape
        box = box or tuple(slice(0, size) for size in shape)
        for index, first, count in stretches(shape, box):
            part = target[index]
            values = part_of(self.window(first, count, ahead=count == part.size), part.shape, shape, box)
            if target.dtype.kind == "i" and target.itemsize < values.itemsize:
                self._check_range(values, target.dtype)
            scatter(values, part, widen_into if self.dtype == "BF16" and target.dtype != np.uint16 else _copy)

    def _check_range(self, values: np.ndarray, dtype: np.dtype) -> None:
        low, high = int(values.min()), int(values.max())
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            worst = low if low < limits.min else high
            raise CheckpointError(f"{self.where} holds {worst}, which is no {dtype.name}")

    def read(self) -> np.ndarray:
        """Returns a new array of the stored type; BF16 becomes float32.

        Raises:
            CheckpointError: if numpy has no such type, or the file became shorter.
        """
        stored = self.window(0, 0).dtype
        if self.dtype in _CODES:
            raise CheckpointError(f"{self.where} has type {self.dtype}, which is not supported here")
        array = np.empty(self.shape, np.float32 if self.dtype == "BF16" else stored)
        self.read_into(array)
        return array


def _copy(values: np.ndarray, target: np.ndarray) -> None:
    np.copyto(target, values, casting="same_kind")


class TensorFile:
    """An open safetensors file whose header was checked; `tensors` lists what it holds.

    Attributes:
        was_read: whether values of it were read.

    Raises:
        CheckpointError: on opening, if the file is missing, empty, truncated or not safetensors.
    """

    def __init__(self, path: Path, label: str | None = None) -> None:
        self.path = path
        self.label = label or path.name
        self.was_read = False
        if not path.is_file():
            kind = "a link to nothing" if path.is_symlink() else "not a regular file" if path.exists() else "missing"
            raise CheckpointError(f"{path} is {kind}")
        self.descriptor = os.open(path, os.O_RDONLY)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, StoredTensor]:
        size = os.fstat(self.descriptor).st_size
        start = os.pread(self.descriptor, 32, 0)
        self._check_start(size, start)
        header_size = int.from_bytes(start[:8], "little")
        try:
            with safe_open(str(self.path), framework="np"):  # checks types, offsets, overlaps and the total length
                pass
        except SafetensorError as error:
            raise CheckpointError(self._diagnose(size, header_size, error)) from error
        header = parse_json_object(os.pread(self.descriptor, header_size, 8), f"the header of {self.path}")
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            start_byte = 8 + header_size + first
            tensors[name] = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), start_byte, last - first, self)
        return tensors

    def _check_start(self, size: int, start: bytes) -> None:
        if size == 0:
            raise CheckpointError(f"{self.path} is empty (0 bytes)")
        for mark, meaning in _FOREIGN_STARTS:
            # The header of a safetensors file opens with "{" at byte 8; its length may look like any of the marks.
            if start.startswith(mark) and start[8:9] != b"{":
                raise CheckpointError(f"{self.path} {meaning}")
        if size < 10 or start[8:9] != b"{":
            raise CheckpointError(f"{self.path} is not a safetensors file ({size} bytes without a safetensors header)")

    def _diagnose(self, size: int, header_size: int, error: Exception) -> str:
        if size < 8 + header_size:
            return f"{self.path} is truncated or not safetensors: its header ends at byte {8 + header_size} of {size}"
        if header_size > MAX_HEADER_BYTES:
            return f"{self.path} is not a safetensors file: {error}"
        try:
            header = parse_json_object(os.pread(self.descriptor, header_size, 8), str(self.path))
            header.pop("__metadata__", None)
            wanted = 8 + header_size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            lost = [name for name, entry in header.items() if 8 + header_size + entry["data_offsets"][1] > size]
        except (CheckpointError, LookupError, TypeError, AttributeError):
            return f"{self.path} is damaged: {error}"
        if lost:
            return f"{self.path} is truncated: it has {size} of {wanted} bytes, which cuts {listed(lost)}"
        return f"{self.path} is damaged: {error}"

    def close(self) -> None:
        """Closes the file; arrays that were mapped from it stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

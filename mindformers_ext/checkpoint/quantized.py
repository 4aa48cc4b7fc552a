"""Tensors of 8 and 4 bits with a scale for each block of values, read as float32: value = code * scale.

Codes: FP8 in E4M3 (without infinities) and E5M2 (Micikevicius et al., "FP8 Formats for Deep Learning"); FP4 in E2M1,
two values a byte, the earlier one in the low four bits. Scales: floats, or E8M0, a power of two. FP4 and E8M0 are those
of "OCP Microscaling Formats" 1.0. DeepSeek-V3 (``x.weight_scale_inv``) and V4 (``x.scale``) are published so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindformers_ext.checkpoint.convert import part_of, scatter, stretches, widen_bfloat16
from mindformers_ext.checkpoint.tensor_file import StoredTensor

FP8 = ("F8_E4M3", "F8_E5M2")
FP4 = ("F4", "I8", "U8")  # publishers name the pairs of FP4 values by the type of a byte
SCALES = ("F32", "F16", "BF16", "F8_E8M0", "U8")
FP4_BLOCK = (1, 32)

_PIECE = 1 << 19  # values of a mapping and of the decoded scratch
_CHUNK = 1 << 15  # values that are decoded and scaled while they are in the cache


def _floats(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """The float32 value of every code of sign, exponent and mantissa, all of them finite."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    exponents = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissas = codes & ((1 << mantissa_bits) - 1)
    hidden = np.where(exponents == 0, 0, 1 << mantissa_bits)
    magnitudes = np.ldexp((mantissas + hidden).astype(np.float64), np.maximum(exponents, 1) - bias - mantissa_bits)
    return np.where(codes >> (exponent_bits + mantissa_bits), -magnitudes, magnitudes).astype(np.float32)


def _e4m3() -> np.ndarray:
    table = _floats(4, 3, bias=7)
    table[[0x7F, 0xFF]] = np.nan
    return table


def _e5m2() -> np.ndarray:
    table = _floats(5, 2, bias=15)
    for sign, infinity in ((0x00, np.inf), (0x80, -np.inf)):
        table[sign + 0x7C] = infinity
        table[sign + 0x7D : sign + 0x80] = np.nan
    return table


def _e8m0() -> np.ndarray:
    return np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


TABLES = {"F8_E4M3": _e4m3(), "F8_E5M2": _e5m2(), "F8_E8M0": _e8m0()}
E2M1 = _floats(2, 1, bias=1)
# Both values of a byte as the eight bytes that they have in memory.
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1).view(np.uint64).reshape(-1)


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of one tensor.

    Attributes:
        codes: the stored values.
        scales: one factor a block, ``[..., rows of blocks, blocks a row]``.
        shape: shape of the tensor, ``[..., rows, columns]``; packed codes have half the columns.
        block: rows and columns of a block; the last ones may be cut.
    """

    codes: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    block: tuple[int, int]

    def read_into(
        self, target: np.ndarray, shape: tuple[int, ...] | None = None, box: tuple[slice, ...] | None = None
    ) -> None:
        """Writes values into a float32 array of any shape and strides, in C order; whole rows are decoded.

        Args:
            target: the array, of the shape of the box.
            shape: shape in which the tensor is seen; None for the target's.
            box: begin and end along every axis of ``shape`` of the values that are wanted; None for all.

        Raises:
            CheckpointError: if the file became shorter since it was opened.
        """
        columns = self.shape[-1]
        shape = shape or target.shape
        box = box or tuple(slice(0, size) for size in shape)
        for index, first, count in stretches(shape, box, _PIECE):
            part = target[index]
            row, stop = first // columns, -(-(first + count) // columns)
            if part.flags.c_contiguous and part.size == count == (stop - row) * columns:
                self._decode(row, part.reshape(-1, columns))
                continue
            rows = np.empty((stop - row, columns), np.float32)
            self._decode(row, rows)
            values = rows.reshape(-1)[first - row * columns :][:count]
            scatter(part_of(values, part.shape, shape, box), part, _copy)

    def _decode(self, start: int, values: np.ndarray) -> None:
        """Fills a contiguous matrix with the rows from ``start`` on, whatever the axes before the last are."""
        stop, columns = start + len(values), self.shape[-1]
        width = columns if self.codes.dtype in FP8 else columns // 2
        codes = self.codes.window(start * width, (stop - start) * width).reshape(-1, width).view(np.uint8)
        table, out = (TABLES[self.codes.dtype], values) if width == columns else (_PAIRS, values.view(np.uint64))
        first, scale_row = self._scale_rows(start, stop)
        factors = self._factors(first, first + int(scale_row[-1]) + 1)
        step = max(1, _CHUNK // columns)
        for row in range(0, len(values), step):
            rows = slice(row, row + step)
            np.take(table, codes[rows], out=out[rows], mode="wrap")  # mode raise would buffer; no code is out of range
            self._scale(values[rows], factors[scale_row[rows]])

    def _scale_rows(self, start: int, stop: int) -> tuple[int, np.ndarray]:
        """First row of scales of some rows, and each row's distance from it."""
        matrix, row = np.divmod(np.arange(start, stop), self.shape[-2])
        scale_row = matrix * self.scales.shape[-2] + row // self.block[0]
        return int(scale_row[0]), scale_row - scale_row[0]

    def _factors(self, start: int, stop: int) -> np.ndarray:
        columns = self.scales.shape[-1]
        stored = self.scales.window(start * columns, (stop - start) * columns).reshape(-1, columns)
        if self.scales.dtype == "BF16":
            return widen_bfloat16(stored)
        if stored.dtype == np.uint8:
            return TABLES["F8_E8M0"][stored]
        return stored.astype(np.float32)

    def _scale(self, values: np.ndarray, factors: np.ndarray) -> None:
        size = self.block[1]
        whole = values.shape[1] // size
        blocks = values[:, : whole * size].reshape(len(values), whole, size)
        blocks *= factors[:, :whole, None]
        values[:, whole * size :] *= factors[:, whole:]


def _copy(values: np.ndarray, target: np.ndarray) -> None:
    target[...] = values


def scale_names(name: str) -> tuple[str, str]:
    """Names under which the scales of a tensor are published."""
    return f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale"


def quantized(tensor: StoredTensor, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> QuantizedTensor:
    """Pairs a tensor of codes with its scales.

    Args:
        tensor: the codes.
        shape: shape that the values must have.
        stored: tensors of the checkpoint by their stored names.

    Raises:
        ValueError: the scales are missing, or types or shapes do not fit; one sentence.
    """
    scales = next((stored[name] for name in scale_names(tensor.name) if name in stored), None)
    if scales is None:
        raise ValueError(
            f"{tensor.where} is {tensor.dtype} and needs its scales, {' or '.join(scale_names(tensor.name))}"
        )
    packed = tensor.dtype not in FP8
    held = (*tensor.shape[:-1], tensor.shape[-1] * 2) if tensor.dtype in ("I8", "U8") and tensor.shape else tensor.shape
    if held != shape:
        raise ValueError(f"{tensor.where} holds {list(held)} values, expected {list(shape)}")
    if scales.dtype not in SCALES:
        raise ValueError(f"{scales.where} has type {scales.dtype}; scales are one of {', '.join(SCALES)}")
    block = _fp4_block(shape, scales.shape) if packed else _fp8_block(shape, scales.shape)
    if block is None:
        kind = f"pairs of values and blocks of {list(FP4_BLOCK)}" if packed else "blocks of one size"
        raise ValueError(f"{scales.where} is {list(scales.shape)}, which does not divide {list(shape)} into {kind}")
    return QuantizedTensor(tensor, scales, shape, block)


def _fp4_block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    fits = len(shape) > 1 and shape[-1] % 2 == 0 and scales == (*shape[:-1], -(-shape[-1] // FP4_BLOCK[1]))
    return FP4_BLOCK if fits else None


def _fp8_block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    if len(shape) < 2 or len(scales) != len(shape) or scales[:-2] != shape[:-2]:
        return None
    rows, columns = (_block_size(size, count) for size, count in zip(shape[-2:], scales[-2:], strict=True))
    return (rows, columns) if rows and columns else None


def _block_size(size: int, count: int) -> int | None:
    """The block of which ``count`` cover ``size`` values: a power of two (the last may be cut), or a whole part."""
    if not 0 < count <= size:
        return None
    if count == 1:
        return size
    power = 1 << (-(-size // count) - 1).bit_length()
    if -(-size // power) == count:
        return power
    return size // count if size % count == 0 else None

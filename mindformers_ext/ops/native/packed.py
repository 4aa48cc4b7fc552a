"""Products with packed weights on a CPU: see products.h and blocks.cpp."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor

from mindformers_ext.ops.memory import aligned_zeros
from mindformers_ext.ops.native import _dense, _kernels, _pointer

if TYPE_CHECKING:
    from mindformers_ext.ops.moe import Pairs

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}
ORDERS = {"plain": 0, "alternate": 1, "beside": 2}
_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
_local = threading.local()


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "depth")),
        *((name, ctypes.c_int32) for name in ("kind", "order")),
    )


class _AttentionBlock(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "proj", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("groups", "heads", "stored", "dim", "rotary_dim")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _DenseLayer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "attention", "fc1", "fc2"))


class PackedWeight:
    """A matrix in the order in which the products read it, in memory of its own.

    Args:
        values: float32 ``[rows, depth]``, or uint16, the bits of bfloat16 values; any strides.
        dtype: what it is kept as: ``float32``, ``bfloat16`` (to the nearest) or ``int8`` (with a scale for each row).
        order: ``plain``; or how rows of a gated product lie: ``alternate`` (gate, up, gate, ...) or ``beside`` (all
            gates, then all ups).

    Attributes:
        shape: rows and depth.
        dtype: as given.
        order: as given.
        nbytes: bytes of values and scales.

    Raises:
        TypeError: values of another type.
        ValueError: a value is not finite and int8 could not hold it.
    """

    def __init__(self, values: np.ndarray, dtype: str, order: str = "plain") -> None:
        if values.dtype not in (np.float32, np.uint16):
            raise TypeError(f"weights are float32, or uint16 for the bits of bfloat16, not {values.dtype}")
        rows, depth = values.shape
        self.shape, self.dtype, self.order = (rows, depth), dtype, order
        self._lanes = int(_kernels().mfx_panel_rows())
        units = rows if order == "plain" else rows // 2
        per_panel = self._lanes if order == "plain" else self._lanes // 2
        self._padded = -(-units // per_panel) * self._lanes
        self._panels = aligned_zeros((self._padded * depth,), _TYPES[dtype])
        self._scale = np.zeros(self._padded, np.float32) if dtype == "int8" else None
        self._bias: np.ndarray | None = None
        self._matrix = _Matrix(
            self._panels.ctypes.data, _address(self._scale), None, rows, depth, KINDS[dtype], ORDERS[order]
        )
        self.pointer = ctypes.addressof(self._matrix)
        self.nbytes = self._panels.nbytes + (0 if self._scale is None else self._scale.nbytes)
        steps = [stride // values.itemsize for stride in values.strides]
        _kernels().mfx_pack(
            self.pointer, values.ctypes.data, values.dtype == np.uint16, *steps, self._panels.ctypes.data,
            _address(self._scale),
        )  # fmt: skip
        if self._scale is not None and not np.isfinite(self._scale).all():
            raise ValueError("it holds values that are not finite, which int8 cannot keep; give float32 or bfloat16")

    def set_bias(self, values: np.ndarray) -> None:
        """Adds float32 ``[rows]`` to every product from now on."""
        self._bias = np.zeros(self._padded, np.float32)
        half, (rows, _) = self._lanes // 2, self.shape
        if self.order == "plain":
            self._bias[:rows] = values
        else:
            pairs = values.reshape(-1, 2) if self.order == "alternate" else values.reshape(2, -1).T
            units = np.zeros((self._padded // 2, 2), np.float32)
            units[: len(pairs)] = pairs
            self._bias[:] = units.reshape(-1, half, 2).transpose(0, 2, 1).reshape(-1)
        self._matrix.bias = self._bias.ctypes.data

    def read_rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns rows ``ids`` (int32, any shape) as float32 ``[..., depth]``, without the bias.

        Raises:
            IndexError: there is no such row.
        """
        ids = np.ascontiguousarray(ids, np.int32)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.shape[0]):
            raise IndexError(f"rows are 0 to {self.shape[0] - 1}, not {ids.min()} to {ids.max()}")
        out = np.empty((*ids.shape, self.shape[1]), np.float32)
        _kernels().mfx_packed_rows(self.pointer, ids.ctypes.data, ids.size, out.ctypes.data)
        return out


class PackedStack:
    """Matrices that lie one behind another, such as those of experts, each packed by itself.

    Args:
        values: ``[E, depth, rows]``: transposed, as experts are stored; float32 or uint16 as in `PackedWeight`.
        dtype: see there.
        order: see there.
    """

    def __init__(self, values: np.ndarray, dtype: str, order: str = "plain") -> None:
        self.matrices = [PackedWeight(matrix.T, dtype, order) for matrix in values]
        self.depth = values.shape[1]
        structures = (_Matrix.from_address(matrix.pointer) for matrix in self.matrices)
        self._array = (_Matrix * len(values))(*structures)
        self.pointer = ctypes.addressof(self._array)

    def read(self) -> np.ndarray:
        """Returns float32 ``[E, depth, rows]``."""
        rows = (matrix.read_rows(np.arange(matrix.shape[0])).T for matrix in self.matrices)
        return np.stack([np.ascontiguousarray(matrix) for matrix in rows])


def product(x: Tensor, weight: PackedWeight, limit: float = 0.0) -> Tensor:
    """``x weight^T`` (plus its bias), or ``silu(gate) * up`` of that where the weight holds pairs of them.

    Args:
        x: float32 ``[N, depth]``.
        weight: the matrix.
        limit: see `mindformers_ext.ops.swiglu`.

    Raises:
        ValueError: x has another depth.
    """
    x = _dense(x)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"rows of {x.shape[1]} values do not fit a weight of {weight.shape}")
    count, rows = x.shape[0], weight.shape[0]
    out = np.empty((count, rows if weight.order == "plain" else rows // 2), np.float32)
    scratch = _scratch(count * weight.shape[1])
    _kernels().mfx_product(weight.pointer, _pointer(x), out.ctypes.data, count, scratch, limit)
    return Tensor.from_numpy(out)


def mlp(x: Tensor, fc1: PackedWeight, fc2: PackedWeight, limit: float) -> Tensor:
    """The gated MLP: ``(silu(gate) * up) fc2^T`` for x ``[N, H]`` and pairs of gate and up in ``fc1``."""
    x = _dense(x)
    count = x.shape[0]
    out = np.empty((count, fc2.shape[0]), np.float32)
    scratch = _scratch(_mlp_scratch(count, fc1, fc2))
    _kernels().mfx_mlp(fc1.pointer, fc2.pointer, _pointer(x), out.ctypes.data, scratch, count, limit)
    return Tensor.from_numpy(out)


def _mlp_scratch(count: int, fc1: PackedWeight, fc2: PackedWeight) -> int:
    """Returns the floats that the MLP needs for ``count`` rows."""
    hidden, ffn = fc1.shape[1], fc2.shape[1]
    return int(_kernels().mfx_sequences_at_once(count, 1)) * (ffn + max(ffn, hidden))


class AttentionBlock:
    """What stays the same between the calls of `attention_block`.

    Args:
        qkv: the fused projection, see `mindformers_ext.ops.qkv_heads`.
        proj: the projection back.
        norms: of queries and keys, float32 ``[D]``.
        groups: key-value heads.
        dim: D.
        rotary_dim: the first so many elements of a head are rotated.
        eps: of the norms.
        scale: factor of the scores.
        gated: the projection has gates, see `mindformers_ext.ops.gate_heads`.
    """

    def __init__(
        self, qkv: PackedWeight, proj: PackedWeight, norms: tuple[Tensor, Tensor] | None, groups: int, dim: int,
        rotary_dim: int, eps: float, scale: float, gated: bool = False,
    ) -> None:  # fmt: skip
        stored = qkv.shape[0] // (groups * dim)
        heads = (stored - 2) // (2 if gated else 1)
        self.groups, self.dim, self.width = groups, dim, groups * heads * dim
        self.qkv, self.proj = qkv, proj
        self._norms = [None, None] if norms is None else [norm.asnumpy().copy() for norm in norms]
        pointers = [_address(norm) for norm in self._norms]
        self._block = _AttentionBlock(
            qkv.pointer, proj.pointer, *pointers, groups, heads, stored, dim, rotary_dim, eps, scale
        )
        self.pointer = ctypes.addressof(self._block)

    def scratch(self, batch: int, length: int) -> int:
        """Floats that a call for ``batch`` rows of ``length`` tokens needs."""
        rows = length * int(_kernels().mfx_sequences_at_once(batch, length))
        return rows * (self.qkv.shape[0] + 2 * self.width + max(self.qkv.shape[1], self.width))


def attention_block(
    block: AttentionBlock,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    visible: np.ndarray | Tensor,
    buffers: tuple[Tensor, Tensor],
    past: int,
) -> Tensor:
    """Attention over new tokens and those in the cache, from normalised rows to the projection back.

    Args:
        block: the weights.
        x: float32 ``[B * S, H]``.
        rotary: cos and sin ``[B, S, R]``.
        visible: int64 ``[B]``, the first slot that a row sees, of those up to its own; or a bias
            ``[B or 1, 1, S, T]``.
        buffers: keys and values ``[B, N, T, D]``; those of the new tokens are written to the slots from ``past`` on.
        past: slots that are filled.

    Returns:
        float32 ``[B * S, H]``.
    """
    x, tokens = _dense(x), _Tokens(rotary, visible, buffers[0].shape[2], past)
    out = np.empty((x.shape[0], block.proj.shape[0]), np.float32)
    scratch = _scratch(block.scratch(tokens.batch, tokens.length))
    _kernels().mfx_attention_block(
        block.pointer, _pointer(x), *tokens.pointers, _pointer(buffers[0]), _pointer(buffers[1]), out.ctypes.data,
        scratch, *tokens.sizes,
    )  # fmt: skip
    return Tensor.from_numpy(out)


class _Tokens:
    """The tokens of a call of `attention_block` or `dense_layers`, as the kernels take them."""

    def __init__(self, rotary: tuple[Tensor, Tensor], visible: np.ndarray | Tensor, slots: int, past: int) -> None:
        cos, sin = _dense(rotary[0]), _dense(rotary[1])
        self._kept = (cos, sin, visible)
        self.batch, self.length, _ = cos.shape
        first, bias, bias_batch = None, None, 1
        if isinstance(visible, Tensor):
            dense = _dense(visible)
            self._kept = (cos, sin, dense)
            bias, bias_batch = _pointer(dense), dense.shape[0]
        else:
            first = visible.ctypes.data
        self.pointers = (_pointer(cos), _pointer(sin), first, bias)
        self.sizes = (self.batch, self.length, past, slots, bias_batch)


@dataclass(frozen=True)
class DenseLayer:
    """The weights of a dense layer: norms float32 ``[H]``, attention, and the MLP, pairs of gate and up in ``fc1``."""

    input_norm: np.ndarray
    attention: AttentionBlock
    mlp_norm: np.ndarray
    fc1: PackedWeight
    fc2: PackedWeight

    @property
    def packed(self) -> tuple[AttentionBlock, PackedWeight, PackedWeight]:
        """The weights of attention and MLP."""
        return self.attention, self.fc1, self.fc2


class DenseLayers:
    """Layers that `dense_layers` runs in one call.

    Args:
        layers: their weights.
        eps: of the norms.
        limit: see `mindformers_ext.ops.swiglu`.
    """

    def __init__(self, layers: Sequence[DenseLayer], eps: float, limit: float) -> None:
        self.layers = tuple(layers)
        self.eps, self.limit = eps, limit
        structures = [
            _DenseLayer(
                _address(layer.input_norm), _address(layer.mlp_norm), layer.attention.pointer, layer.fc1.pointer,
                layer.fc2.pointer,
            )
            for layer in self.layers
        ]  # fmt: skip
        self._array = (_DenseLayer * len(self.layers))(*structures)
        self.pointer = ctypes.addressof(self._array)

    def scratch(self, batch: int, length: int) -> int:
        """Floats that a call for ``batch`` rows of ``length`` tokens needs."""
        rows, (attention, fc1, fc2) = batch * length, self.layers[0].packed
        return 2 * rows * fc1.shape[1] + max(_mlp_scratch(rows, fc1, fc2), attention.scratch(batch, length))


def dense_layers(
    stack: DenseLayers,
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    visible: np.ndarray | Tensor,
    buffers: Sequence[tuple[Tensor, Tensor]],
    past: int,
) -> Tensor:
    """Runs all layers of a dense model on the residual stream float32 ``[B * S, H]``.

    Args:
        stack: the layers.
        hidden: the residual stream.
        rotary: see `attention_block`.
        visible: see there.
        buffers: keys and values of each layer, see there.
        past: see there.

    Returns:
        The residual stream behind them.
    """
    tokens = _Tokens(rotary, visible, buffers[0][0].shape[2], past)
    out = hidden.asnumpy().copy()
    keys, values = ((ctypes.c_void_p * len(buffers))(*(_pointer(pair[i]) for pair in buffers)) for i in (0, 1))
    scratch = _scratch(stack.scratch(tokens.batch, tokens.length))
    _kernels().mfx_dense_layers(
        stack.pointer, len(stack.layers), out.ctypes.data, *tokens.pointers, ctypes.addressof(keys),
        ctypes.addressof(values), scratch, *tokens.sizes, stack.eps, stack.limit,
    )  # fmt: skip
    return Tensor.from_numpy(out)


def packed_experts(
    x: Tensor, pairs: Pairs, factors: Tensor, first: PackedStack, second: PackedStack, limit: float
) -> Tensor:
    """See `mindformers_ext.ops.experts`; ``pairs`` is the choice sorted by expert."""
    x = _dense(x)
    by_pair = np.ascontiguousarray(factors.asnumpy().reshape(-1)[pairs.slots])
    out = np.zeros(x.shape, np.float32)
    most, hidden, ffn = int(np.diff(pairs.starts).max(initial=0)), first.depth, second.depth
    scratch = _scratch(most * (2 * hidden + ffn + max(hidden, ffn)))
    _kernels().mfx_packed_experts(
        first.pointer, second.pointer, _pointer(x), *(a.ctypes.data for a in (pairs.rows, by_pair, pairs.starts)),
        scratch, out.ctypes.data, len(first.matrices), limit,
    )  # fmt: skip
    return Tensor.from_numpy(out)


def read_bytes(weight: PackedWeight) -> int:
    """Reads the values of a weight, in all threads, and returns how many bytes that were: to measure memory with."""
    panels = weight._panels
    return int(_kernels().mfx_read(panels.ctypes.data, panels.nbytes))


def multiply_adds(rounds: int) -> int:
    """Does independent multiply-adds of registers, in all threads, and returns how many floating-point operations that
    were: to measure the processor with."""
    return int(_kernels().mfx_multiply_adds(rounds, 0.5))


def _scratch(count: int) -> int:
    """Returns the address of ``count`` floats, which this thread keeps for the next call."""
    kept: np.ndarray | None = getattr(_local, "scratch", None)
    if kept is None or kept.size < count:
        kept = _local.scratch = None  # not both at a time
        kept = _local.scratch = aligned_zeros((count,))
    return int(kept.ctypes.data)


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else int(array.ctypes.data)

"""Small blocks that the families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import Zero

from mindformers_ext import ops
from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.shard import ModelShard

# From a generator and a shape to the first values of a parameter.
Initial = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def empty_parameter(*shape: int, initial: float | str | Initial = "normal", dtype: ms.Type = ms.float32) -> Parameter:
    """A parameter whose memory is not allocated before it is given a value.

    Args:
        shape: its shape.
        initial: what training from scratch starts with: a constant, ``normal``, ``residual`` (normal, for projections
            back into the residual stream), or a function of a generator and the shape.
        dtype: float32, or int32 for tables, which are not trained.
    """
    parameter = Parameter(Tensor(shape=shape, dtype=dtype, init=Zero()), requires_grad=dtype == ms.float32)
    parameter.initial = initial
    return parameter


class Packable(Protocol):
    """A block that can keep weights of a prediction in the order and type of the products that read them.

    Attributes:
        packable: its parameters that `pack` takes, by their names within the block.
        narrow: whether their type may be another one than float32.
    """

    packable: tuple[str, ...]
    narrow: bool

    def pack(self, name: str, values: np.ndarray, dtype: str) -> bool:
        """Takes the values of a parameter, float32 or, of a matrix, uint16 (bits of bfloat16).

        Returns:
            False if the parameter has to take them as well.

        Raises:
            ValueError: a value that the type cannot hold.
        """
        ...

    def unpack(self, name: str) -> np.ndarray | None:
        """Returns what `pack` took as float32 values of the parameter's shape; None if that has them itself."""
        ...

    def packed_weights(self) -> Sequence[ops.PackedWeight]:
        """Returns the matrices that are packed."""
        ...


class PackableMatrix:
    """A block of which one matrix can be packed; see `Packable`.

    Attributes:
        packed: the matrix as `pack` left it; None while it is in the parameter.
    """

    packed: ops.PackedWeight | None = None

    def pack(self, name: str, values: np.ndarray, dtype: str) -> bool:
        """See `Packable.pack`."""
        self.packed = ops.PackedWeight(values, dtype)
        return True

    def unpack(self, name: str) -> np.ndarray | None:
        """See `Packable.unpack`."""
        return None if self.packed is None else self.packed.read_rows(np.arange(self.packed.shape[0]))

    def packed_weights(self) -> Sequence[ops.PackedWeight]:
        """See `Packable.packed_weights`."""
        return () if self.packed is None else (self.packed,)


class Linear(PackableMatrix, nn.Cell):
    """``x weight^T + bias`` for x float32 ``[N, in_channels]``.

    Args:
        in_channels: inputs.
        out_channels: outputs.
        has_bias: adds a bias.
        initial: see `empty_parameter`.
        packing: in a prediction ``narrow`` weights are packed in the type that was asked for, ``float32`` ones (which
            choose or gate) in that type; None keeps the parameter, which other operations read as it is.
        order: how rows lie in a packed weight, see `ops.PackedWeight`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        has_bias: bool = False,
        initial: float | str | Initial = "normal",
        packing: Literal["narrow", "float32"] | None = "narrow",
        order: str = "plain",
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_channels, in_channels, initial=initial)
        self.bias = empty_parameter(out_channels, initial=0.0) if has_bias else None
        self.packable = () if packing is None else ("weight", "bias") if has_bias else ("weight",)
        self.narrow = packing == "narrow"
        self._order = order
        self._bias_values: np.ndarray | None = None

    def construct(self, x: Tensor) -> Tensor:
        """Returns float32 ``[N, out_channels]``."""
        return ops.linear(x, self.weight, self.bias) if self.packed is None else ops.linear(x, self.packed)

    def pack(self, name: str, values: np.ndarray, dtype: str) -> bool:
        """See `Packable.pack`."""
        if name == "weight":
            self.packed = ops.PackedWeight(values, dtype, self._order)
        else:
            self._bias_values = values
        if self.packed is not None and self._bias_values is not None:
            self.packed.set_bias(self._bias_values)
        return name == "weight"

    def unpack(self, name: str) -> np.ndarray | None:
        """See `Packable.unpack`."""
        return None if name == "bias" else super().unpack(name)


class RMSNorm(nn.Cell):
    """Root mean square normalisation of float32 ``[N, dim]``.

    Args:
        dim: size of the last axis.
        eps: added to the mean square.
        zero_centered: multiply by 1 + weight; the parameter keeps the weight as checkpoints store it.
    """

    def __init__(self, dim: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(dim, initial=0.0 if zero_centered else 1.0)
        self.eps = eps
        self.zero_centered = zero_centered

    @property
    def scale(self) -> Tensor:
        """What the normalised values are multiplied by, float32 ``[dim]``."""
        return ops.unit_offset(self.weight) if self.zero_centered else self.weight

    def construct(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``."""
        return ops.rms_norm(x, self.scale, self.eps)

    def add(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``x + update`` and its norm, both float32 ``[N, dim]``."""
        return ops.add_rms_norm(x, update, self.scale, self.eps)


class MLP(nn.Cell):
    """Gated feed-forward block; the rows of ``linear_fc1`` alternate between gate and up.

    Args:
        config: sizes and options.
        ffn_hidden_size: width; None takes that of the dense layers.
    """

    def __init__(self, config: TransformerConfig, ffn_hidden_size: int | None = None) -> None:
        super().__init__()
        bias, width = config.add_mlp_bias, ffn_hidden_size or config.ffn_hidden_size
        self.clamp_value = config.activation_func_clamp_value
        self.linear_fc1 = Linear(config.hidden_size, 2 * width, bias, order="alternate")
        self.linear_fc2 = Linear(width, config.hidden_size, bias, initial="residual")

    @property
    def packed(self) -> tuple[ops.PackedWeight | None, ops.PackedWeight | None]:
        """Both weights if they are packed."""
        return self.linear_fc1.packed, self.linear_fc2.packed

    def construct(self, x: Tensor) -> Tensor:
        """Maps float32 ``[N, H]`` to ``[N, H]``."""
        fc1, fc2 = self.packed
        if fc1 is not None and fc2 is not None:
            return ops.mlp(x, fc1, fc2, self.clamp_value)
        return self.linear_fc2(ops.swiglu(self.linear_fc1(x), self.clamp_value))


class LanguageModelEmbedding(PackableMatrix, nn.Cell):
    """Token embedding; under tensor parallelism each process holds the rows of some ids, and the sum has all."""

    packable = ("word_embeddings.weight",)
    narrow = True

    def __init__(self, shard: ModelShard) -> None:
        super().__init__()
        self._tp, self._first, self._end = shard.context.tp, *shard.vocab
        self.word_embeddings = nn.Cell()
        self.word_embeddings.weight = empty_parameter(self._end - self._first, shard.config.hidden_size)

    @property
    def table(self) -> Tensor | ops.PackedWeight:
        """A row for each id that this process holds, ``[., H]``."""
        return self.word_embeddings.weight if self.packed is None else self.packed

    def construct(self, ids: Tensor) -> Tensor:
        """Maps int32 ids of any shape to float32 ``[..., H]``."""
        if self._tp.size == 1:
            return ops.embedding(ids, self.table)
        return self._tp.all_reduce(ops.embedding_part(ids, self.table, self._first))


def initial_values(parameter: Parameter, std: float, residual_std: float, generator: np.random.Generator) -> np.ndarray:
    """Returns the first values of a parameter of `empty_parameter`, of its type."""
    initial, shape = parameter.initial, parameter.shape
    if callable(initial):
        values = initial(generator, shape)
    elif isinstance(initial, str):
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(residual_std if initial == "residual" else std)
    else:
        values = np.full(shape, initial)
    dtype = np.int32 if parameter.dtype == ms.int32 else np.float32
    return np.ascontiguousarray(values, dtype)

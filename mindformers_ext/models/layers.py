"""Small blocks that the families share."""

from __future__ import annotations

from collections.abc import Callable

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


class Linear(nn.Cell):
    """``x weight^T + bias`` for x float32 ``[N, in_channels]``."""

    def __init__(
        self, in_channels: int, out_channels: int, has_bias: bool = False, initial: float | str | Initial = "normal"
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_channels, in_channels, initial=initial)
        self.bias = empty_parameter(out_channels, initial=0.0) if has_bias else None

    def construct(self, x: Tensor) -> Tensor:
        """Returns float32 ``[N, out_channels]``."""
        return ops.linear(x, self.weight, self.bias)


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
        self.linear_fc1 = Linear(config.hidden_size, 2 * width, bias)
        self.linear_fc2 = Linear(width, config.hidden_size, bias, initial="residual")

    def construct(self, x: Tensor) -> Tensor:
        """Maps float32 ``[N, H]`` to ``[N, H]``."""
        return self.linear_fc2(ops.swiglu(self.linear_fc1(x), self.clamp_value))


class LanguageModelEmbedding(nn.Cell):
    """Token embedding; under tensor parallelism each process holds the rows of some ids, and the sum has all."""

    def __init__(self, shard: ModelShard) -> None:
        super().__init__()
        self._tp, self._first, self._end = shard.context.tp, *shard.vocab
        self.word_embeddings = nn.Cell()
        self.word_embeddings.weight = empty_parameter(self._end - self._first, shard.config.hidden_size)

    def construct(self, ids: Tensor) -> Tensor:
        """Maps int32 ids of any shape to float32 ``[..., H]``."""
        if self._tp.size == 1:
            return ops.embedding(ids, self.word_embeddings.weight)
        return self._tp.all_reduce(ops.embedding_part(ids, self.word_embeddings.weight, self._first))


def initialise(parameter: Parameter, std: float, residual_std: float, generator: np.random.Generator) -> None:
    """Gives a parameter of `empty_parameter` its first values."""
    initial, shape = parameter.initial, parameter.shape
    if callable(initial):
        values = initial(generator, shape)
    elif isinstance(initial, str):
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(residual_std if initial == "residual" else std)
    else:
        values = np.full(shape, initial)
    dtype = np.int32 if parameter.dtype == ms.int32 else np.float32
    parameter.set_data(Tensor.from_numpy(np.ascontiguousarray(values, dtype)))

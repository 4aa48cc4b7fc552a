"""Blocks that the families share."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import Zero

from mindformers_ext import ops
from mindformers_ext.models.cache import KeyValueState
from mindformers_ext.models.config import TransformerConfig


def empty_parameter(*shape: int) -> Parameter:
    """A float32 parameter whose memory is not allocated before it is given a value."""
    return Parameter(Tensor(shape=shape, dtype=ms.float32, init=Zero()))


class Linear(nn.Cell):
    """``x weight^T + bias`` for x float32 ``[N, in_channels]``."""

    def __init__(self, in_channels: int, out_channels: int, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_channels, in_channels)
        self.bias = empty_parameter(out_channels) if has_bias else None

    def construct(self, x: Tensor) -> Tensor:
        """Returns float32 ``[N, out_channels]``."""
        return ops.linear(x, self.weight, self.bias)


class RMSNorm(nn.Cell):
    """Root mean square normalisation of float32 ``[N, dim]``."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(dim)
        self.eps = eps

    def construct(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``."""
        return ops.rms_norm(x, self.weight, self.eps)


class MLP(nn.Cell):
    """Gated feed-forward block; the rows of ``linear_fc1`` alternate between gate and up."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        bias = config.add_mlp_bias
        self.linear_fc1 = Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias)
        self.linear_fc2 = Linear(config.ffn_hidden_size, config.hidden_size, bias)

    def construct(self, x: Tensor) -> Tensor:
        """Maps float32 ``[N, H]`` to ``[N, H]``."""
        return self.linear_fc2(ops.swiglu(self.linear_fc1(x)))


class SelfAttention(nn.Cell):
    """Grouped-query attention with rotary positions and optional norms on queries and keys.

    The rows of ``linear_qkv`` are ordered by group: the query heads of the group, its key, its value.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim = config.kv_channels
        self.groups, self.scale, self.eps = config.num_query_groups, dim**-0.5, config.layernorm_epsilon
        self.linear_qkv = Linear(config.hidden_size, config.qkv_size, config.add_qkv_bias)
        self.linear_proj = Linear(config.num_attention_heads * dim, config.hidden_size, config.add_proj_bias)
        if config.qk_layernorm:
            self.q_layernorm = RMSNorm(dim, self.eps)
            self.k_layernorm = RMSNorm(dim, self.eps)
        self.qk_layernorm = config.qk_layernorm

    def construct(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], bias: Tensor, state: KeyValueState | None = None
    ) -> Tensor:
        """Attends over the tokens of ``x`` and those in ``state``.

        Args:
            x: float32 ``[B * S, H]``.
            rotary: cos and sin, float32 ``[B, S, D]``.
            bias: float32 ``[B or 1, 1, S, T]``, added to the scores.
            state: keys and values of earlier tokens; those of ``x`` are appended.

        Returns:
            float32 ``[B * S, H]``.
        """
        norms = (self.q_layernorm.weight, self.k_layernorm.weight) if self.qk_layernorm else None
        query, key, value = ops.qkv_heads(self.linear_qkv(x), *rotary, self.groups, norms, self.eps)
        if state is not None:
            key, value = state.update(key, value)
        return self.linear_proj(ops.attention(query, key, value, bias, self.scale))


class TransformerLayer(nn.Cell):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.input_layernorm = RMSNorm(config.hidden_size, self.eps)
        self.self_attention = SelfAttention(config)
        self.pre_mlp_layernorm = RMSNorm(config.hidden_size, self.eps)
        self.mlp = MLP(config)

    def construct(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        bias: Tensor,
        state: KeyValueState | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on ``hidden + update``.

        Args:
            hidden: residual stream, float32 ``[B * S, H]``.
            update: what the previous layer adds to it; None in the first layer.
            rotary: see `SelfAttention.construct`.
            bias: see `SelfAttention.construct`.
            state: see `SelfAttention.construct`.

        Returns:
            The residual stream, and what this layer's MLP adds to it.
        """
        if update is None:
            normed = self.input_layernorm(hidden)
        else:
            hidden, normed = ops.add_rms_norm(hidden, update, self.input_layernorm.weight, self.eps)
        attended = self.self_attention(normed, rotary, bias, state)
        hidden, normed = ops.add_rms_norm(hidden, attended, self.pre_mlp_layernorm.weight, self.eps)
        return hidden, self.mlp(normed)


class TransformerBlock(nn.Cell):
    """The stack of decoder layers and the final norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.CellList([TransformerLayer(config) for _ in range(config.num_layers)])
        self.final_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)


class LanguageModelEmbedding(nn.Cell):
    """Token embedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Cell()
        self.word_embeddings.weight = empty_parameter(config.vocab_size, config.hidden_size)

    def construct(self, ids: Tensor) -> Tensor:
        """Maps int32 ids of any shape to float32 ``[..., H]``."""
        return ops.embedding(ids, self.word_embeddings.weight)


def normal_(parameter: Parameter, std: float, generator: np.random.Generator) -> None:
    """Fills a parameter with normal noise."""
    values = generator.standard_normal(parameter.shape, dtype=np.float32)
    values *= np.float32(std)
    parameter.set_data(Tensor.from_numpy(values))

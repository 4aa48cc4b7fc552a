"""Grouped-query attention."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.cache import KeyValueState, zeros
from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.context_parallel import shared_attention
from mindformers_ext.models.layers import Linear, RMSNorm


class SelfAttention(nn.Cell):
    """Grouped-query attention with rotary positions and optional norms on queries and keys.

    The rows of ``linear_qkv`` are ordered by group: the query heads of the group, their gates if the family has them,
    its key, its value.
    """

    def __init__(self, config: TransformerConfig, layer_number: int = 0) -> None:
        super().__init__()
        dim = config.kv_channels
        self.dim, self.groups, self.scale, self.eps = dim, config.num_query_groups, dim**-0.5, config.layernorm_epsilon
        self.linear_qkv = Linear(config.hidden_size, config.qkv_size, config.add_qkv_bias)
        self.linear_proj = Linear(
            config.num_attention_heads * dim, config.hidden_size, config.add_proj_bias, initial="residual"
        )
        if config.qk_layernorm:
            self.q_layernorm = RMSNorm(dim, self.eps, config.layernorm_zero_centered_gamma)
            self.k_layernorm = RMSNorm(dim, self.eps, config.layernorm_zero_centered_gamma)
        self.qk_layernorm, self.gated = config.qk_layernorm, config.attention_output_gate
        self._block: ops.AttentionBlock | None = None

    def construct(self, x: Tensor, context: ForwardContext, state: Any = None) -> Tensor:
        """Attends over the tokens of ``x`` and those in ``state``.

        Args:
            x: float32 ``[B * S, H]``.
            context: the tokens of this forward.
            state: keys and values of earlier tokens, a `KeyValueState`, or a `SharedState` where processes share a
                sequence; those of ``x`` are appended.

        Returns:
            float32 ``[B * S, H]``.
        """
        block = self.packed_block(context)
        if block is not None:
            past, buffers = self.slots_for(context, state)
            return ops.attention_block(block, x, context.rotary(), context.visible(buffers[0].shape[2]), buffers, past)
        qkv = self.linear_qkv(x)
        norms = self._norms()
        query, key, value = ops.qkv_heads(qkv, *context.rotary(), self.groups, norms, self.eps, self.dim, self.gated)
        if context.share is not None:
            attended = shared_attention(query, key, value, context, context.share, state, self.scale)
        else:
            if state is not None:
                key, value = state.update(key, value)
            attended = ops.attention(query, key, value, context.bias(key.shape[2]), self.scale)
        return self.linear_proj(ops.gate_heads(attended, qkv, self.groups, self.dim) if self.gated else attended)

    def _norms(self) -> tuple[Tensor, Tensor] | None:
        return (self.q_layernorm.scale, self.k_layernorm.scale) if self.qk_layernorm else None

    def packed_block(self, context: ForwardContext) -> ops.AttentionBlock | None:
        """Returns all weights for `ops.attention_block`; None unless they are packed, or where a sequence is shared."""
        qkv, proj = self.linear_qkv.packed, self.linear_proj.packed
        if qkv is None or proj is None or context.share is not None:
            return None
        if self._block is None:
            rotary_dim = context.rotary()[0].shape[-1]
            self._block = ops.AttentionBlock(
                qkv, proj, self._norms(), self.groups, self.dim, rotary_dim, self.eps, self.scale, self.gated
            )
        return self._block

    def forget_packed(self) -> None:
        """Drops what `packed_block` has made: the weights have changed."""
        self._block = None

    def slots_for(self, context: ForwardContext, state: KeyValueState | None) -> tuple[int, tuple[Tensor, Tensor]]:
        """Makes room for the new tokens; returns the slot of the first, and the buffers of keys and values."""
        if state is None:
            shape = (context.batch, self.groups, context.length, self.dim)
            return 0, (zeros(*shape), zeros(*shape))
        past = state.extend(context.length)
        return past, (state.key, state.value)

    def new_state(self, batch_size: int, max_length: int) -> KeyValueState:
        """Returns empty keys and values for ``batch_size`` rows of up to ``max_length`` tokens."""
        return KeyValueState(batch_size, self.groups, self.dim, max_length)

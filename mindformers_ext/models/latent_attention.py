"""Multi-head latent attention."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.cache import SlotState
from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.context_parallel import SharedState, joined_attend
from mindformers_ext.models.layers import Linear, RMSNorm
from mindformers_ext.models.rope import attention_mscale
from mindformers_ext.models.sequence_share import SequenceShare

# DeepSeek's and transformers' latent norms do not follow rms_norm_eps.
_NORM_EPS = 1e-6


class LatentState(SlotState):
    """Latents of one attention layer, each beside the rotated key that all heads share.

    Args:
        batch_size: rows B.
        width: size of both.
        max_length: most tokens a row will ever hold.
    """

    def __init__(self, batch_size: int, width: int, max_length: int) -> None:
        super().__init__(batch_size, ((1, width),), max_length)

    @property
    def latent(self) -> Tensor:
        """Latents ``[B, 1, capacity, width]``; slots from `length` on hold zeros or stale values."""
        return self.buffers[0]


class MLASelfAttention(nn.Cell):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    The rows of ``linear_qkv`` are those of the queries' latent (of the queries themselves where they have none), of
    the latent of keys and values, and of the key with positions that all heads share.

    Args:
        config: sizes and options.
        layer_number: index of the layer in the model.

    Raises:
        ValueError: the configuration has no latent attention.
    """

    def __init__(self, config: TransformerConfig, layer_number: int = 0) -> None:
        super().__init__()
        mla = config.mla
        if mla is None:
            raise ValueError(f"model: {config.model_type} has no latent attention")
        hidden, rope = config.hidden_size, mla.qk_pos_emb_head_dim
        self.heads, self.interleaved = config.num_attention_heads, mla.rope_interleave
        head_dim = mla.qk_head_dim + rope
        self.width = mla.kv_lora_rank + rope
        self.scale = head_dim**-0.5 * attention_mscale(config.rope) ** 2
        query_size = mla.q_lora_rank or self.heads * head_dim
        self.linear_qkv = Linear(hidden, query_size + self.width, config.add_qkv_bias)
        self.has_query_latent = mla.q_lora_rank > 0
        if self.has_query_latent:
            self.q_layernorm = RMSNorm(mla.q_lora_rank, _NORM_EPS)
            self.linear_qb = Linear(mla.q_lora_rank, self.heads * head_dim)
        self.k_layernorm = RMSNorm(mla.kv_lora_rank, _NORM_EPS)
        self.linear_kvb = Linear(mla.kv_lora_rank, self.heads * (mla.qk_head_dim + mla.v_head_dim), packing=None)
        self.linear_proj = Linear(self.heads * mla.v_head_dim, hidden, config.add_proj_bias, initial="residual")

    def construct(self, x: Tensor, context: ForwardContext, state: Any = None) -> Tensor:
        """Attends over the tokens of ``x`` and those in ``state``.

        First tokens are expanded to keys and values; later ones attend to the latents themselves.

        Args:
            x: float32 ``[B * S, H]``.
            context: the tokens of this forward.
            state: latents of earlier tokens; those of ``x`` are appended.

        Returns:
            float32 ``[B * S, H]``.
        """
        rotary = context.rotary()
        query_norm = self.q_layernorm.weight if self.has_query_latent else None
        query, latent = ops.split_latent(
            self.linear_qkv(x), *rotary, query_norm, self.k_layernorm.weight, _NORM_EPS, self.interleaved
        )
        if self.has_query_latent:
            query = self.linear_qb(query)
        weight, past = self.linear_kvb.weight, 0 if state is None else state.length
        if context.share is not None:
            return self.linear_proj(self._attend_shared(query, latent, context, context.share, state))
        if state is not None:
            state.append(latent)
        if state is None or past == 0:
            heads = ops.latent_heads(query, latent, weight, *rotary, self.heads, self.interleaved)
            attended = ops.attention(*heads, context.bias(context.length), self.scale)
        else:
            bias = context.bias(state.capacity)
            attended = ops.absorbed_attention(
                query, state.latent, weight, *rotary, bias, self.heads, self.scale, self.interleaved
            )
        return self.linear_proj(attended)

    def _attend_shared(
        self, query: Tensor, latent: Tensor, context: ForwardContext, share: SequenceShare, state: SharedState | None
    ) -> Tensor:
        """Attends to the latents of a sequence that several processes share."""
        attend = None
        if state is not None:
            state.keep(share, latent)
        if share.is_split:
            latents, bias = share.gather(latent, 2), context.bias(share.total)
        elif state is None:
            latents, bias = latent, context.bias(share.total)
        else:
            latents, bias, attend = state.state.buffers[0], state.bias(context), joined_attend(share)
        rotary, weight = context.rotary(), self.linear_kvb.weight
        return ops.absorbed_attention(
            query, latents, weight, *rotary, bias, self.heads, self.scale, self.interleaved, attend
        )

    def new_state(self, batch_size: int, max_length: int) -> LatentState:
        """Returns no latents yet, for ``batch_size`` rows of up to ``max_length`` tokens."""
        return LatentState(batch_size, self.width, max_length)

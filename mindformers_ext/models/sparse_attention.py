"""Attention over a window of tokens and compressed blocks of older ones (DeepSeek-V4 report, section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as ms_ops

from mindformers_ext import ops
from mindformers_ext.models.compressed_state import CompressorState, SparseAttentionState
from mindformers_ext.models.compression import CompressionPlan, block_bias, compression_plan, pads_of, visible_blocks
from mindformers_ext.models.config import SparseAttentionConfig, TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.layers import Linear, RMSNorm, empty_parameter
from mindformers_ext.models.mask import MASKED

LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


class SparseAttention(nn.Cell):
    """Sliding, compressed-sparse or heavily-compressed attention; all heads share one key that is its own value.

    Args:
        config: sizes and options.
        layer_number: index of the layer; its type is one of `LAYER_TYPES`.

    Raises:
        ValueError: the configuration has no sparse attention, or its heads do not divide into groups.
    """

    def __init__(self, config: TransformerConfig, layer_number: int = 0) -> None:
        super().__init__()
        sparse, kind = config.sparse_attention, config.layer_types[layer_number]
        if sparse is None:
            raise ValueError(f"model: layer_types: {kind} is not known for {config.model_type}")
        heads, dim, hidden, eps = (
            config.num_attention_heads,
            config.kv_channels,
            config.hidden_size,
            config.layernorm_epsilon,
        )
        if heads % sparse.o_groups:
            raise ValueError(f"model: num_attention_heads ({heads}) must be a multiple of o_groups ({sparse.o_groups})")
        self.heads, self.dim, self.eps, self.groups = heads, dim, eps, sparse.o_groups
        self.rotary_kind = "main" if kind == "sliding_attention" else "compress"
        self.linear_q_down_proj = Linear(hidden, sparse.q_lora_rank)
        self.q_layernorm = RMSNorm(sparse.q_lora_rank, eps)
        self.linear_q_up_proj = Linear(sparse.q_lora_rank, heads * dim)
        self.linear_kv_proj = Linear(hidden, dim)
        self.kv_layernorm = RMSNorm(dim, eps)
        self.core_attention = CoreAttention(config, sparse, kind)
        self.linear_o_group_proj = empty_parameter(sparse.o_groups * sparse.o_lora_rank, heads * dim // sparse.o_groups)
        self.linear_proj = Linear(sparse.o_groups * sparse.o_lora_rank, hidden, initial="residual")

    def construct(self, x: Tensor, context: ForwardContext, state: SparseAttentionState | None = None) -> Tensor:
        """Attends over the tokens of ``x`` and those in ``state``.

        Args:
            x: float32 ``[B * S, H]``.
            context: the tokens of this forward.
            state: what is left of earlier tokens; those of ``x`` are added.

        Returns:
            float32 ``[B * S, H]``.
        """
        cos, sin = context.rotary(self.rotary_kind)
        latent = self.q_layernorm(self.linear_q_down_proj(x))
        query = ops.partial_rotary(self.linear_q_up_proj(latent), cos, sin, self.heads, eps=self.eps)
        key = ops.partial_rotary(self.linear_kv_proj(x), cos, sin, 1, self.kv_layernorm.weight, self.eps)
        mixed = self.core_attention(x, latent, query, key, context, state)
        # The key is the value too: its rotation has to be taken out of the result.
        mixed = ops.partial_rotary(mixed, cos, sin, self.heads, inverse=True)
        return self.linear_proj(ops.grouped_linear(mixed, self.linear_o_group_proj, self.groups))

    def new_state(self, batch_size: int, max_length: int) -> SparseAttentionState:
        """Returns empty state for ``batch_size`` rows of up to ``max_length`` tokens."""
        return self.core_attention.new_state(batch_size, max_length)


class CoreAttention(nn.Cell):
    """The scores over window and blocks, and what makes and chooses the blocks."""

    def __init__(self, config: TransformerConfig, sparse: SparseAttentionConfig, kind: str) -> None:
        super().__init__()
        self.heads, self.dim, self.window = config.num_attention_heads, config.kv_channels, sparse.csa_window_size
        self.scale = self.dim**-0.5
        self.attn_sink = empty_parameter(self.heads, initial=0.0)
        self.compressor = self.indexer = None
        if kind == "compressed_sparse_attention":
            self.compressor = Compressor(config, self.dim, sparse.csa_compress_rate, series=2)
            self.indexer = Indexer(config, sparse)
        elif kind == "heavily_compressed_attention":
            self.compressor = Compressor(config, self.dim, sparse.hca_compress_rate, series=1)

    def construct(
        self,
        x: Tensor,
        latent: Tensor,
        query: Tensor,
        key: Tensor,
        context: ForwardContext,
        state: SparseAttentionState | None = None,
    ) -> Tensor:
        """Attends with queries ``[B * S, N * D]`` and new keys ``[B * S, D]``.

        Args:
            x: input of the layer, float32 ``[B * S, H]``.
            latent: latent of the queries, float32 ``[B * S, q_lora_rank]``.
            query: rotated queries.
            key: rotated keys.
            context: the tokens of this forward.
            state: see `SparseAttention.construct`.

        Returns:
            float32 ``[B * S, N * D]``.
        """
        batch, length = context.batch, context.length
        query, key = query.reshape(batch, length, self.heads, self.dim), key.reshape(batch, length, self.dim)
        blocks = bias = None
        if self.compressor is not None:
            blocks, plan = self.compressor(x, context, None if state is None else state.compressor)
            if self.indexer is not None:
                bias = self.indexer(x, latent, context, None if state is None else state.indexer)
            elif plan.count:
                bias = block_bias(context, plan)
        if state is None:
            hidden = pads_of(context) if context.real is not None else None
            return ops.window_attention(query, key, self.attn_sink, self.scale, self.window, hidden, blocks, bias)
        return self._attend_with_state(query, key, context, state, blocks, bias)

    def _attend_with_state(
        self,
        query: Tensor,
        key: Tensor,
        context: ForwardContext,
        state: SparseAttentionState,
        blocks: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        past, slots = context.past, state.window.shape[2]
        pads = pads_of(context)
        state.pads = max(state.pads, int(pads.max()))
        state.length += context.length
        if context.length == 1:
            ops.write_ring(state.window, past, key)
            ring_bias = context.cached(("ring", slots, self.window), lambda: _ring_bias(past, slots, pads))
            keys = state.window.reshape(context.batch, slots, self.dim)
            return ops.sink_attention(query, keys, ring_bias, self.attn_sink, self.scale, blocks, bias)
        first = max(0, past - self.window + 1)
        keys = key
        if past:
            keys = ms_ops.cat((ops.read_ring(state.window, first, past), key), 1)
        ops.write_ring(state.window, past, key)
        hidden = np.maximum(pads - first, 0) if context.real is not None else None
        return ops.window_attention(query, keys, self.attn_sink, self.scale, self.window, hidden, blocks, bias)

    def new_state(self, batch_size: int, max_length: int) -> SparseAttentionState:
        """See `SparseAttention.new_state`."""
        parts = [
            None if compressor is None else compressor.new_state(batch_size, max_length)
            for compressor in (self.compressor, None if self.indexer is None else self.indexer.compressor)
        ]
        return SparseAttentionState(batch_size, self.dim, self.window, max_length, *parts)


def _ring_bias(slot: int, size: int, pads: np.ndarray) -> Tensor:
    """Bias ``[B or 1, 1, R]`` of the token at ``slot`` over a ring that holds it and the R - 1 before it."""
    slots = slot - (slot - np.arange(size)) % size
    visible = slots >= pads.max(keepdims=True)[:, None] if (pads == pads[0]).all() else slots >= pads[:, None]
    return Tensor.from_numpy(np.where(visible, np.float32(0), MASKED)[:, None])


class Compressor(nn.Cell):
    """Makes one block of every ``rate`` tokens.

    Args:
        config: sizes and options.
        dim: size of a block D.
        rate: tokens of a block.
        series: 1, or 2 where each token has a part in the block of its own window and one in the next.
    """

    def __init__(self, config: TransformerConfig, dim: int, rate: int, series: int) -> None:
        super().__init__()
        self.dim, self.rate, self.series = dim, rate, series
        self.linear_wkv = Linear(config.hidden_size, series * dim)
        self.linear_wgate = Linear(config.hidden_size, series * dim)
        self.ape = empty_parameter(rate, series * dim, initial=0.0)
        self.norm = RMSNorm(dim, config.layernorm_epsilon)

    def construct(
        self, x: Tensor, context: ForwardContext, state: CompressorState | None = None
    ) -> tuple[Tensor | None, CompressionPlan]:
        """Adds the tokens of ``x`` float32 ``[B * S, H]``.

        Returns:
            Blocks float32 ``[B, C, D]``, of which the first ``plan.count`` are in use, or None if there are none yet;
            and the plan.
        """
        plan = compression_plan(context, self.rate, self.series, state is not None)
        shape = (context.batch, context.length, -1)
        values = self.linear_wkv(x).reshape(shape)
        gates = ops.compressor_gates(self.linear_wgate(x), self.ape, plan.offsets, context.real_rows).reshape(shape)
        blocks = None
        if state is None:
            if plan.closed:
                values, gates = self._with_rows_before(values, gates)
                blocks = self._pooled(values, gates, plan)
            return blocks, plan
        if context.length == 1:
            ops.write_ring(state.values, context.past, values)
            ops.write_ring(state.gates, context.past, gates)
        if plan.closed:
            before = state.values.squeeze(1), state.gates.squeeze(1)
            tables = before if context.length == 1 else _joined(before, (values, gates))
            new = self._pooled(tables[0], tables[1], plan).reshape(-1, self.dim)
            ops.write_blocks(state.blocks, plan.rows, plan.slots, new, plan.chosen)
        if context.length > 1:
            ops.write_ring(state.values, context.past, values)
            ops.write_ring(state.gates, context.past, gates)
        return (state.blocks.squeeze(1) if plan.count else None), plan

    def _with_rows_before(self, values: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the window before the first one in front: it has no tokens."""
        if self.series == 1:
            return values, gates
        shape = (values.shape[0], self.rate, values.shape[2])
        before = [Tensor.from_numpy(np.full(shape, value, np.float32)) for value in (0, MASKED)]
        return _joined(before, (values, gates))

    def _pooled(self, values: Tensor, gates: Tensor, plan: CompressionPlan) -> Tensor:
        """The blocks that close, float32 ``[B, M, D]``."""
        pooled = ops.pool_windows(values.reshape(-1, self.dim), gates.reshape(-1, self.dim), plan.index)
        rotated = ops.partial_rotary(pooled, *plan.rotary, 1, self.norm.weight, self.norm.eps)
        return rotated.reshape(plan.index.shape[0], -1, self.dim)

    def new_state(self, batch_size: int, max_length: int) -> CompressorState:
        """Returns empty state for ``batch_size`` rows of up to ``max_length`` tokens."""
        return CompressorState(batch_size, self.dim, self.rate, self.series, max_length)


def _joined(before: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Values and gates of earlier tokens and of new ones, one after the other, float32 ``[B, R + S, D]``."""
    return ms_ops.cat((before[0], new[0]), 1), ms_ops.cat((before[1], new[1]), 1)


class Indexer(nn.Cell):
    """Lightning indexer: chooses the blocks that a token attends to. No gradient of the model's loss reaches it."""

    def __init__(self, config: TransformerConfig, sparse: SparseAttentionConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.topk = (
            sparse.dsa_indexer_n_heads,
            sparse.dsa_indexer_head_dim,
            sparse.dsa_indexer_topk,
        )
        self.scale = (self.dim * self.heads) ** -0.5
        self.linear_wq_b = Linear(sparse.q_lora_rank, self.heads * self.dim)
        self.linear_weights_proj = Linear(config.hidden_size, self.heads, packing="float32")
        self.compressor = Compressor(config, self.dim, sparse.csa_compress_rate, series=2)
        for parameter in self.get_parameters():
            parameter.requires_grad = False

    def construct(
        self, x: Tensor, latent: Tensor, context: ForwardContext, state: CompressorState | None = None
    ) -> Tensor | None:
        """Returns the bias over the blocks, float32 ``[B or 1, S, T]``; None if there are none yet.

        Args:
            x: input of the layer, float32 ``[B * S, H]``.
            latent: latent of the queries, float32 ``[B * S, q_lora_rank]``.
            context: the tokens of this forward.
            state: keys of earlier blocks.
        """
        keys, plan = self.compressor(x, context, state)
        if keys is None:
            return None
        if plan.count <= self.topk:
            return block_bias(context, plan)
        query = ops.partial_rotary(self.linear_wq_b(latent), *context.rotary("compress"), self.heads)
        query = query.reshape(context.batch, context.length, self.heads, self.dim)
        weights = self.linear_weights_proj(x) * self.scale
        scores = ops.index_scores(query, keys, weights, plan.count)
        return ops.select_blocks(scores, visible_blocks(context, self.compressor.rate), self.topk)

"""The stack of decoder layers, and what each of them is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.attention import SelfAttention
from mindformers_ext.models.cache import LayerState
from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.delta_net import GatedDeltaNet
from mindformers_ext.models.hyper_connections import HyperConnection, HyperHead
from mindformers_ext.models.latent_attention import MLASelfAttention
from mindformers_ext.models.layers import MLP, RMSNorm
from mindformers_ext.models.moe import MoELayer
from mindformers_ext.models.shard import ModelShard
from mindformers_ext.models.sparse_attention import LAYER_TYPES as SPARSE_LAYER_TYPES
from mindformers_ext.models.sparse_attention import SparseAttention


def build_attention(config: TransformerConfig, layer_number: int) -> nn.Cell:
    """Returns the attention of a layer, by its type.

    Raises:
        ValueError: no such type.
    """
    kind = config.layer_types[layer_number]
    if kind == "full_attention":
        return (SelfAttention if config.mla is None else MLASelfAttention)(config, layer_number)
    if kind in SPARSE_LAYER_TYPES:
        return SparseAttention(config, layer_number)
    if kind == "linear_attention":
        return GatedDeltaNet(config, layer_number)
    raise ValueError(f"model: layer_types: {kind!r} is not known for {config.model_type}")


def build_mlp(shard: ModelShard, layer_number: int) -> nn.Cell:
    """Returns the MLP of a layer, by its type.

    Raises:
        ValueError: no such type.
    """
    kind = shard.local.mlp_layer_types[layer_number]
    if kind == "dense":
        return MLP(shard.local)
    if kind in ("moe", "hash_moe"):
        return MoELayer(shard, layer_number)
    raise ValueError(f"model: mlp_layer_types: {kind!r} is not known; give dense, moe or hash_moe")


class TransformerLayer(nn.Cell):
    """Pre-norm attention and MLP, each with a residual connection.

    Args:
        shard: sizes, and the place of this process; the kinds of attention and MLP come from its lists of layer types.
        layer_number: index of the layer in the model.
    """

    def __init__(self, shard: ModelShard, layer_number: int) -> None:
        super().__init__()
        config = shard.local
        self._tp = shard.context.tp
        eps, zero_centered = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self.input_layernorm = RMSNorm(config.hidden_size, eps, zero_centered)
        self.self_attention = build_attention(config, layer_number)
        self.pre_mlp_layernorm = RMSNorm(config.hidden_size, eps, zero_centered)
        self.mlp = build_mlp(shard, layer_number)
        self.is_dense = config.mlp_layer_types[layer_number] == "dense"

    def construct(
        self, hidden: Tensor, update: Tensor | None, context: ForwardContext, state: LayerState | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer on ``hidden + update``.

        Args:
            hidden: residual stream, float32 ``[B * S, H]``.
            update: what the previous layer adds to it; None in the first layer.
            context: the tokens of this forward.
            state: what the attention remembers of earlier tokens.

        Returns:
            The residual stream, and what this layer's MLP adds to it.
        """
        if update is None:
            normed = self.input_layernorm(hidden)
        else:
            hidden, normed = self.input_layernorm.add(hidden, update)
        hidden, normed = self.pre_mlp_layernorm.add(hidden, self._attend(normed, context, state))
        return hidden, self._feed_forward(normed, context)

    def packed_weights(
        self, context: ForwardContext
    ) -> tuple[ops.AttentionBlock, ops.PackedWeight, ops.PackedWeight] | None:
        """Returns the weights of attention and MLP of a dense layer with grouped-query attention if they are packed."""
        attention = self.self_attention.packed_block(context)
        fc1, fc2 = self.mlp.packed
        return None if attention is None or fc1 is None or fc2 is None else (attention, fc1, fc2)

    def packed_layer(
        self, attention: ops.AttentionBlock, fc1: ops.PackedWeight, fc2: ops.PackedWeight
    ) -> ops.DenseLayer:
        """Returns the layer for `ops.dense_layers`, from what `packed_weights` gave."""
        norms = [norm.scale.asnumpy().copy() for norm in (self.input_layernorm, self.pre_mlp_layernorm)]
        return ops.DenseLayer(norms[0], attention, norms[1], fc1, fc2)

    def _attend(self, normed: Tensor, context: ForwardContext, state: LayerState | None) -> Tensor:
        return self._tp.all_reduce(self.self_attention(normed, context, state))

    def _feed_forward(self, normed: Tensor, context: ForwardContext) -> Tensor:
        return self._tp.all_reduce(self.mlp(normed)) if self.is_dense else self.mlp(normed, context)


class HyperConnectionLayer(TransformerLayer):
    """A layer whose attention and MLP each read from and write to several residual streams."""

    def __init__(self, shard: ModelShard, layer_number: int) -> None:
        super().__init__(shard, layer_number)
        self.attn_hc = HyperConnection(shard.config)
        self.ffn_hc = HyperConnection(shard.config)

    def construct(
        self, hidden: Tensor, update: Tensor | None, context: ForwardContext, state: LayerState | None = None
    ) -> tuple[Tensor, None]:
        """Maps streams ``hidden`` float32 ``[B * S, n * H]`` to streams; there never is an ``update``."""
        streams = hidden
        collapsed, post, comb = self.attn_hc(streams)
        attended = self._attend(self.input_layernorm(collapsed), context, state)
        streams = self.attn_hc.expand(attended, streams, post, comb)
        collapsed, post, comb = self.ffn_hc(streams)
        output = self._feed_forward(self.pre_mlp_layernorm(collapsed), context)
        return self.ffn_hc.expand(output, streams, post, comb), None


class TransformerBlock(nn.Cell):
    """Decoder layers, and the final norm in the last stage.

    Args:
        shard: sizes, and the layers of this process.
    """

    def __init__(self, shard: ModelShard) -> None:
        super().__init__()
        config = shard.config
        hyper = config.hyper_connections
        layer = TransformerLayer if hyper is None else HyperConnectionLayer
        self.layers = NumberedLayers({number: layer(shard, number) for number in shard.layers})
        self.streams, self.is_first = 1 if hyper is None else hyper.num_residual_streams, shard.is_first
        self._is_dense = self.streams == 1 and shard.context.tp.size == 1 and len(self.layers) > 0
        self._is_dense = self._is_dense and all(
            isinstance(layer.self_attention, SelfAttention) and layer.is_dense for layer in self.layers
        )
        self._stack: ops.DenseLayers | None = None
        self._eps, self._clamp_value = config.layernorm_epsilon, config.activation_func_clamp_value
        self.hc_head = None
        if shard.is_last:
            self.hc_head = None if hyper is None else HyperHead(config)
            self.final_layernorm = RMSNorm(
                config.hidden_size, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
            )

    def construct(
        self,
        hidden: Tensor,
        context: ForwardContext,
        states: Sequence[LayerState | None],
        joined: Callable[[nn.Cell], AbstractContextManager[None]] = lambda layer: nullcontext(),
    ) -> Tensor:
        """Runs the layers.

        Args:
            hidden: embedded tokens, float32 ``[B * S, H]``, or what the stage before gave.
            context: the tokens of this forward.
            states: what each layer remembers of earlier tokens.
            joined: within it the parameters of a layer can be used.

        Returns:
            What `finish` or the next stage takes: the residual stream, float32 ``[B * S, H]``, or n of them,
            ``[B * S, n * H]``.
        """
        stack = self._dense_stack(context)
        if stack is not None:
            return self._run_dense(stack, hidden, context, states)
        update = None
        if self.is_first and self.streams > 1:
            hidden = hidden.tile((1, self.streams))
        for layer, state in zip(self.layers, states, strict=True):
            with joined(layer):
                hidden, update = layer(hidden, update, context, state)
        return hidden if update is None else hidden + update

    def _dense_stack(self, context: ForwardContext) -> ops.DenseLayers | None:
        """Returns the layers for `ops.dense_layers`; None unless all are dense, packed and on this process alone."""
        if not self._is_dense or context.share is not None:
            return None
        if self._stack is None:
            weights = [layer.packed_weights(context) for layer in self.layers]
            layers = [layer.packed_layer(*taken) for layer, taken in zip(self.layers, weights, strict=True) if taken]
            if len(layers) < len(weights):
                return None
            self._stack = ops.DenseLayers(layers, self._eps, self._clamp_value)
        return self._stack

    def forget_packed(self) -> None:
        """Drops what was made of the weights for calls of many at once: they have changed."""
        self._stack = None
        for layer in self.layers:
            if isinstance(layer.self_attention, SelfAttention):
                layer.self_attention.forget_packed()

    def _run_dense(
        self, stack: ops.DenseLayers, hidden: Tensor, context: ForwardContext, states: Sequence[LayerState | None]
    ) -> Tensor:
        if any(state is not None for state in states):
            taken = [
                layer.self_attention.slots_for(context, state) for layer, state in zip(self.layers, states, strict=True)
            ]
        else:  # Nothing is remembered: a layer may write over the keys and values of the one before it.
            taken = [self.layers[0].self_attention.slots_for(context, None)] * len(states)
        buffers = [pair for _, pair in taken]
        visible = context.visible(buffers[0][0].shape[2])
        return ops.dense_layers(stack, hidden, context.rotary(), visible, buffers, taken[0][0])

    def finish(self, hidden: Tensor) -> Tensor:
        """Turns rows of the residual stream into what the head takes, float32 ``[N, H]``; in the last stage."""
        return self.final_layernorm(hidden if self.hc_head is None else self.hc_head(hidden))


class NumberedLayers(nn.Cell):
    """Layers by their number in the whole model, which is part of the names of their parameters."""

    def __init__(self, layers: Mapping[int, nn.Cell]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.insert_child_to_cell(str(number), layer)

    def __iter__(self) -> Iterator[nn.Cell]:
        return iter(self._cells.values())

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, index: int) -> nn.Cell:
        return list(self._cells.values())[index]

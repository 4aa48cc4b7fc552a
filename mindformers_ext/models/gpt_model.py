"""The decoder-only transformer of every family: one forward for training and for prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.cache import KeyValueState
from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import weight_layout
from mindformers_ext.models.layers import LanguageModelEmbedding, Linear, TransformerBlock, normal_
from mindformers_ext.models.mask import attention_bias
from mindformers_ext.models.rope import RotaryTable
from mindformers_ext.models.weights import WeightLayout


class GPTModel(nn.Cell):
    """Decoder-only transformer with MindSpore Transformers' parameter names and layouts.

    Parameters have no memory until `set_weight` or `init_weights` gives them values.

    Args:
        config: shape and options.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = LanguageModelEmbedding(config)
        self.decoder = TransformerBlock(config)
        if not config.tie_word_embeddings:
            self.output_layer = Linear(config.hidden_size, config.vocab_size)
        self._parameters_by_name = self.parameters_dict()
        self._rotary = RotaryTable(config.rope, config.kv_channels, config.max_position_embeddings)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Sequence[KeyValueState] | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> dict[str, object] | Tensor:
        """Runs the model.

        Args:
            input_ids: int32 ``[B, S]``.
            position_ids: int32 ``[B, S]``; None counts on from the cache.
            attention_mask: None (causal), int ``[B, past + S]`` (1 real, 0 pad, causal besides), or additive float32
                ``[B or 1, 1, S, past + S]``.
            past_key_values: state of earlier tokens, from `new_cache`; extended in place.
            labels: int32 ``[B, S]``, the token that follows each input token; -100 does not count.
            logits_to_keep: the last so many positions go through the head; None takes all.

        Returns:
            With labels the mean loss, a float32 scalar. Without, ``{"logits": float32 [B, S or kept, V],
            "past_key_values": past_key_values}``.
        """
        batch, length = input_ids.shape
        past = past_key_values[0].length if past_key_values else 0
        if position_ids is None:
            positions = np.broadcast_to(np.arange(past, past + length), (batch, length))
        else:
            positions = position_ids.asnumpy()
        states: Sequence[KeyValueState | None] = past_key_values or [None] * self.config.num_layers
        slots = length
        if past_key_values:
            for layer_state in past_key_values:
                layer_state.reserve(past + length)
            slots = past_key_values[0].capacity if past else length
        mask = None if attention_mask is None else attention_mask.asnumpy()
        bias = Tensor.from_numpy(attention_bias(mask, batch, length, past, slots))
        cos, sin = self._rotary.lookup(positions)
        rotary = (Tensor.from_numpy(cos), Tensor.from_numpy(sin))

        hidden = self.embedding(input_ids).reshape(batch * length, -1)
        update = None
        for layer, state in zip(self.decoder.layers, states, strict=True):
            hidden, update = layer(hidden, update, rotary, bias, state)
        hidden = hidden + update
        if labels is not None:
            return ops.cross_entropy(self._head(hidden), labels.reshape(-1))
        if logits_to_keep is not None and logits_to_keep < length:
            hidden = hidden.reshape(batch, length, -1)[:, length - logits_to_keep :].reshape(batch * logits_to_keep, -1)
        logits = self._head(hidden).reshape(batch, -1, self.config.vocab_size)
        return {"logits": logits, "past_key_values": past_key_values}

    def new_cache(self, batch_size: int, max_length: int) -> list[KeyValueState]:
        """Returns empty state for ``batch_size`` rows of up to ``max_length`` tokens, one entry a layer."""
        config = self.config
        return [
            KeyValueState(batch_size, config.num_query_groups, config.kv_channels, max_length)
            for _ in range(config.num_layers)
        ]

    def weight_layout(self) -> WeightLayout:
        """Returns how the parameters are stored in HuggingFace checkpoints."""
        return weight_layout(self.config)

    def set_weight(self, name: str, array: np.ndarray) -> None:
        """Makes ``array`` (float32, C-contiguous) the memory of parameter ``name``, without a copy.

        Raises:
            KeyError: no such parameter.
            ValueError: the shape differs.
        """
        parameter = self._parameters_by_name[name]
        if parameter.shape != array.shape:
            raise ValueError(f"{name} has shape {parameter.shape}, not {array.shape}")
        parameter.set_data(Tensor.from_numpy(array))

    def init_weights(self, seed: int) -> None:
        """Gives every parameter its initial value: norms 1, biases 0, matrices normal.

        Projections back into the residual stream get a standard deviation smaller by ``sqrt(2 num_layers)``
        (GPT-2 report, section 2.3).
        """
        generator = np.random.default_rng(seed)
        std, residual_std = (
            self.config.init_method_std,
            self.config.init_method_std / (2 * self.config.num_layers) ** 0.5,
        )
        for name, parameter in self.parameters_and_names():
            if name.endswith("layernorm.weight"):
                parameter.set_data(Tensor.from_numpy(np.ones(parameter.shape, np.float32)))
            elif name.endswith(".bias"):
                parameter.set_data(Tensor.from_numpy(np.zeros(parameter.shape, np.float32)))
            else:
                normal_(
                    parameter, residual_std if ".linear_proj." in name or ".linear_fc2." in name else std, generator
                )

    def _head(self, hidden: Tensor) -> Tensor:
        """Final norm and logits: float32 ``[N, H]`` to ``[N, V]``."""
        hidden = self.decoder.final_layernorm(hidden)
        if self.config.tie_word_embeddings:
            return ops.linear(hidden, self.embedding.word_embeddings.weight)
        return self.output_layer(hidden)

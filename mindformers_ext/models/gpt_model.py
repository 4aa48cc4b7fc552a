"""The decoder-only transformer of every family: one forward for training and for prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.block import TransformerBlock
from mindformers_ext.models.cache import LayerState
from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.families import weight_layout
from mindformers_ext.models.layers import LanguageModelEmbedding, Linear, initialise
from mindformers_ext.models.rope import rotary_tables
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
        self._rotary = rotary_tables(config)
        # Recurrent layers and compressed blocks follow the order of tokens, whatever a mask says.
        self.takes_additive_mask = set(config.layer_types) == {"full_attention"}

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Sequence[LayerState] | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> dict[str, object] | Tensor:
        """Runs the model.

        Args:
            input_ids: int32 ``[B, S]``.
            position_ids: int32 ``[B or 1, S]``; None counts on from the cache.
            attention_mask: None (causal), int ``[B, past + S]`` (1 real, 0 pad, causal besides), or additive float32
                ``[B or 1, 1, S, past + S]`` (families with full attention in every layer only).
            past_key_values: state of earlier tokens, from `new_cache`; extended in place.
            labels: int32 ``[B, S]``, the token that follows each input token; -100 does not count.
            logits_to_keep: the last so many positions go through the head; None takes all.

        Returns:
            With labels the mean loss, a float32 scalar. Without, ``{"logits": float32 [B, S or kept, V],
            "past_key_values": past_key_values}``.
        """
        batch, length = input_ids.shape
        past = past_key_values[0].length if past_key_values else 0
        states: Sequence[LayerState | None] = past_key_values or [None] * self.config.num_layers
        for state in past_key_values or ():
            state.reserve(past + length)
        positions = None if position_ids is None else position_ids.asnumpy()
        mask = None if attention_mask is None else attention_mask.asnumpy()
        context = ForwardContext(input_ids, positions, mask, past, self._rotary)
        if context.has_additive_mask and not self.takes_additive_mask:
            raise ValueError(
                f"{self.config.model_type} has layers that cannot follow an additive attention_mask; give "
                f"[{batch}, {past + length}] with 1 for real tokens and 0 for pads"
            )

        hidden = self.decoder(self.embedding(input_ids).reshape(batch * length, -1), context, states)
        if labels is not None:
            return ops.cross_entropy(self._head(hidden), labels.reshape(-1))
        if logits_to_keep is not None and logits_to_keep < length:
            kept = hidden.reshape(batch, length, -1)[:, length - logits_to_keep :]
            hidden = kept.reshape(batch * logits_to_keep, -1)
        logits = self._head(hidden).reshape(batch, -1, self.config.vocab_size)
        return {"logits": logits, "past_key_values": past_key_values}

    def new_cache(self, batch_size: int, max_length: int) -> list[LayerState]:
        """Returns empty state for ``batch_size`` rows of up to ``max_length`` tokens, one entry a layer."""
        return [layer.self_attention.new_state(batch_size, max_length) for layer in self.decoder.layers]

    def weight_layout(self) -> WeightLayout:
        """Returns how the parameters are stored in HuggingFace checkpoints."""
        return weight_layout(self.config)

    def set_weight(self, name: str, array: np.ndarray) -> None:
        """Makes ``array`` (float32 or int32, C-contiguous) the memory of parameter ``name``, without a copy.

        Raises:
            KeyError: no such parameter.
            ValueError: the shape differs.
        """
        parameter = self._parameters_by_name[name]
        if parameter.shape != array.shape:
            raise ValueError(f"{name} has shape {parameter.shape}, not {array.shape}")
        parameter.set_data(Tensor.from_numpy(array))

    def init_weights(self, seed: int) -> None:
        """Gives every parameter its first value: norms 1, biases 0, matrices normal.

        Projections back into the residual stream get a standard deviation smaller by ``sqrt(2 num_layers)``
        (GPT-2 report, section 2.3).
        """
        generator = np.random.default_rng(seed)
        std = self.config.init_method_std
        for _, parameter in self.parameters_and_names():
            initialise(parameter, std, std / (2 * self.config.num_layers) ** 0.5, generator)

    def _head(self, hidden: Tensor) -> Tensor:
        """Final norm and logits: float32 ``[N, H]`` to ``[N, V]``."""
        hidden = self.decoder.finish(hidden)
        if self.config.tie_word_embeddings:
            return ops.linear(hidden, self.embedding.word_embeddings.weight)
        return self.output_layer(hidden)

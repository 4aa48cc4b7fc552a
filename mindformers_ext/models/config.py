"""The configuration of a model, in MindSpore Transformers' names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class RopeParameters:
    """Rotary position embedding.

    Attributes:
        rope_type: ``default``, ``linear``, ``llama3`` or ``yarn``.
        theta: base of the wavelengths.
        scaling: further parameters of the type, in transformers' names (``factor``,
            ``original_max_position_embeddings``, ``beta_fast``, ...).
    """

    rope_type: str = "default"
    theta: float = 10000.0
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TransformerConfig:
    """Shape and options of a decoder-only transformer.

    Attributes:
        model_type: name of the family, e.g. ``qwen3``.
        architectures: class name in HuggingFace's ``config.json``, e.g. ``Qwen3ForCausalLM``.
        vocab_size: rows of the embedding; may exceed the tokenizer's vocabulary.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_attention_heads: query heads.
        num_query_groups: key-value heads; divides ``num_attention_heads``.
        kv_channels: size of one head.
        ffn_hidden_size: width of the MLP.
        max_position_embeddings: longest sequence that the model was made for.
        layernorm_epsilon: epsilon of every RMS norm.
        rope: rotary position embedding.
        add_qkv_bias: bias on the query, key and value projections.
        add_proj_bias: bias on the attention's output projection.
        add_mlp_bias: bias on the projections of the MLP.
        qk_layernorm: RMS norm on every query and key head.
        tie_word_embeddings: the head shares the embedding's weight.
        init_method_std: standard deviation of initial weights.
        seq_length: longest sequence of this run in training and prediction; at most
            ``max_position_embeddings``.
    """

    model_type: str
    architectures: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    max_position_embeddings: int
    layernorm_epsilon: float = 1e-6
    rope: RopeParameters = field(default_factory=RopeParameters)
    add_qkv_bias: bool = False
    add_proj_bias: bool = False
    add_mlp_bias: bool = False
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False
    init_method_std: float = 0.02
    seq_length: int = 0

    def __post_init__(self) -> None:
        if self.seq_length in (None, 0):
            object.__setattr__(self, "seq_length", self.max_position_embeddings)
        for entry in fields(self):
            value = checked_value(entry.name, getattr(self, entry.name), f"model: {entry.name}")
            object.__setattr__(self, entry.name, value)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"model: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_query_groups})"
            )
        if self.kv_channels % 2:
            raise ValueError(f"model: head_dim must be even for rotary embeddings, not {self.kv_channels}")
        if self.seq_length > self.max_position_embeddings:
            raise ValueError(
                f"model: seq_length ({self.seq_length}) exceeds max_position_embeddings "
                f"({self.max_position_embeddings})"
            )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels


_TYPES = {entry.name: entry.type for entry in fields(TransformerConfig)}  # as text: annotations are not evaluated
_OTHER_TYPES = {
    "bool": (bool, "true or false"),
    "str": (str, "text"),
    "RopeParameters": (RopeParameters, "RopeParameters"),
}


def checked_value(name: str, value: Any, shown: str) -> Any:
    """Checks a value against the type of a field of `TransformerConfig`.

    Args:
        name: the field.
        value: what it was set to; a whole float may stand for an integer and an integer for a float.
        shown: how the message names the field: the source and the key that the user wrote.

    Returns:
        The value in the type of the field.

    Raises:
        ValueError: another type, or a number that is not positive.
    """
    kind = _TYPES[name]
    if kind in ("int", "float"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if name == "seq_length" and is_number and value == 0:
            return 0  # max_position_embeddings
        if not is_number or value <= 0 or kind == "int" and value != int(value):
            raise ValueError(f"{shown} must be a positive {'integer' if kind == 'int' else 'number'}, not {value!r}")
        return int(value) if kind == "int" else float(value)
    expected, text = _OTHER_TYPES[str(kind)]
    if not isinstance(value, expected):
        raise ValueError(f"{shown} must be {text}, not {value!r}")
    return value

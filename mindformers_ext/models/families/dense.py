"""What the dense families (Llama, Qwen2, Qwen3) have in common."""

from __future__ import annotations

from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import blocks
from mindformers_ext.models.weights import WeightLayout, WeightMapping

# HuggingFace's and MindSpore Transformers' YAML names -> fields of TransformerConfig.
ALIASES = {
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
    "attention_bias": "add_qkv_bias",
    "mlp_bias": "add_mlp_bias",
}


def weight_layout(config: TransformerConfig) -> WeightLayout:
    """Returns the layout of a dense family's checkpoint."""
    return blocks.decoder_layout(config, _layer)


def _layer(config: TransformerConfig, index: int, ours: str, theirs: str) -> list[WeightMapping]:
    norms, attention = blocks.layer_norms(config, ours, theirs), blocks.self_attention(config, ours, theirs)
    return norms + attention + blocks.mlp(config, f"{ours}mlp.", f"{theirs}mlp.", config.ffn_hidden_size)


def hf_config(config: TransformerConfig) -> dict[str, Any]:
    """Returns the HuggingFace ``config.json`` of a dense model, as far as the families agree."""
    rope = {"rope_type": config.rope.rope_type, "rope_theta": config.rope.theta, **config.rope.scaling}
    return {
        "architectures": [config.architectures],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.init_method_std,
    }

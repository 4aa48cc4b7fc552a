"""What the dense families (Llama, Qwen2, Qwen3) have in common."""

from __future__ import annotations

from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.transforms import copied, fused_qkv, interleaved_gate_up
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
    hidden = config.hidden_size
    mappings = [
        copied("embedding.word_embeddings.weight", "model.embed_tokens.weight", config.vocab_size, hidden),
    ]
    for index in range(config.num_layers):
        mappings += _layer_mappings(config, f"decoder.layers.{index}.", f"model.layers.{index}.")
    mappings.append(copied("decoder.final_layernorm.weight", "model.norm.weight", hidden))
    skippable = ((r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "computed from the configuration"),)
    copies: tuple[tuple[str, str], ...] = ()
    if config.tie_word_embeddings:
        # A tied checkpoint that was saved under pipeline parallelism may hold the last stage's copy.
        head, embedding = ("lm_head.weight", "output_layer.weight"), mappings[0]
        copies = ((head[0], embedding.sources[0]), (head[1], embedding.name))
    else:
        mappings.append(copied("output_layer.weight", "lm_head.weight", config.vocab_size, hidden))
    return WeightLayout(tuple(mappings), skippable, copies)


def _layer_mappings(config: TransformerConfig, ours: str, theirs: str) -> list[WeightMapping]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    groups, heads, dim = config.num_query_groups, config.heads_per_group, config.kv_channels
    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."

    def qkv(kind: str, *columns: int) -> WeightMapping:
        q, k, v = (f"{attention}{part}_proj.{kind}" for part in "qkv")
        return fused_qkv(f"{ours}self_attention.linear_qkv.{kind}", (q, k, v), groups, heads, dim, columns)

    def gate_up(kind: str, *columns: int) -> WeightMapping:
        sources = (f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}")
        return interleaved_gate_up(f"{ours}mlp.linear_fc1.{kind}", sources, ffn, columns)

    proj, fc2 = f"{ours}self_attention.linear_proj.", f"{ours}mlp.linear_fc2."
    mappings = [
        copied(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", hidden),
        qkv("weight", hidden),
        copied(f"{proj}weight", f"{attention}o_proj.weight", hidden, groups * heads * dim),
        copied(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", hidden),
        gate_up("weight", hidden),
        copied(f"{fc2}weight", f"{mlp}down_proj.weight", hidden, ffn),
    ]
    if config.add_qkv_bias:
        mappings.append(qkv("bias"))
    if config.add_proj_bias:
        mappings.append(copied(f"{proj}bias", f"{attention}o_proj.bias", hidden))
    if config.add_mlp_bias:
        mappings += [gate_up("bias"), copied(f"{fc2}bias", f"{mlp}down_proj.bias", hidden)]
    if config.qk_layernorm:
        for part in "qk":
            name = f"{ours}self_attention.{part}_layernorm.weight"
            mappings.append(copied(name, f"{attention}{part}_norm.weight", dim))
    return mappings


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

"""Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from typing import Any

from mindformers_ext.models.config import MoEConfig, TransformerConfig
from mindformers_ext.models.families import blocks, dense
from mindformers_ext.models.families.family import Family
from mindformers_ext.models.weights import WeightLayout, WeightMapping

_ALIASES = dense.ALIASES | {
    "num_experts": "num_moe_experts",
    "num_local_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    # Qwen3MoeAttention has its optional bias on all four projections.
    bias = values.get("add_qkv_bias", False)
    return {
        "qk_layernorm": True,
        "add_proj_bias": bias,
        "max_position_embeddings": 32768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _derive(values: dict[str, Any]) -> dict[str, Any]:
    step, dense_layers = values.pop("decoder_sparse_step"), values.pop("mlp_only_layers")
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"model: decoder_sparse_step must be a positive integer, not {step!r}")
    if not isinstance(dense_layers, (list, tuple)) or not all(isinstance(index, int) for index in dense_layers):
        raise ValueError(f"model: mlp_only_layers must be a list of layer numbers, not {dense_layers!r}")
    layers = range(values.get("num_layers", 0))
    types = tuple("dense" if index in dense_layers or (index + 1) % step else "moe" for index in layers)
    types = blocks.checked_mlp_layer_types(values.get("mlp_layer_types") or types, "qwen3_moe")
    return values | {"mlp_layer_types": types}


def _layer(config: TransformerConfig, index: int, ours: str, theirs: str) -> list[WeightMapping]:
    mappings = blocks.layer_norms(config, ours, theirs) + blocks.self_attention(config, ours, theirs)
    mlp = (f"{ours}mlp.", f"{theirs}mlp.")
    if config.mlp_layer_types[index] == "dense":
        return mappings + blocks.mlp(config, *mlp, config.ffn_hidden_size)
    return mappings + blocks.moe(config, _moe(config), *mlp, shared="shared_expert")


def _moe(config: TransformerConfig) -> MoEConfig:
    if config.moe is None:
        raise ValueError("model: qwen3_moe needs num_experts, num_experts_per_tok and moe_intermediate_size")
    return config.moe


def _weight_layout(config: TransformerConfig) -> WeightLayout:
    return blocks.decoder_layout(config, _layer)


def _hf_config(config: TransformerConfig) -> dict[str, Any]:
    moe = _moe(config)
    return dense.hf_config(config) | {
        "attention_bias": config.add_qkv_bias,
        "num_experts": moe.num_moe_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        "moe_intermediate_size": moe.moe_ffn_hidden_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, kind in enumerate(config.mlp_layer_types) if kind == "dense"],
    }


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _ALIASES,
    _defaults,
    _weight_layout,
    _hf_config,
    groups=("moe",),
    options=frozenset({"mlp_layer_types"}),
    extra_keys=frozenset({"decoder_sparse_step", "mlp_only_layers"}),
    without_effect=frozenset({"router_aux_loss_coef", "output_router_logits", "router_dense_type", "moe_router_dtype"}),
    derive=_derive,
)

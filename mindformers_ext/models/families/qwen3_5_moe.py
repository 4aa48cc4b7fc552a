"""Qwen3.5 with a mixture of experts in every layer. The text model only."""

from __future__ import annotations

from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import blocks, dense, qwen3_5
from mindformers_ext.models.families.family import Family
from mindformers_ext.models.weights import WeightLayout, WeightMapping

_ALIASES = {
    **{key: target for key, target in dense.ALIASES.items() if key != "intermediate_size"},
    "num_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    return qwen3_5.defaults(values) | {
        "num_moe_experts": 256,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 512,
        "moe_shared_expert_intermediate_size": 512,
        "ffn_hidden_size": 0,
        "use_shared_expert_gating": True,
    }


def _derive(values: dict[str, Any]) -> dict[str, Any]:
    return qwen3_5.derive(values) | {"mlp_layer_types": ("moe",) * values.get("num_layers", 0)}


def _layer(config: TransformerConfig, index: int, ours: str, theirs: str) -> list[WeightMapping]:
    assert config.moe is not None
    experts = blocks.moe(config, config.moe, f"{ours}mlp.", f"{theirs}mlp.", shared="shared_expert")
    return qwen3_5.attention(config, index, ours, theirs) + experts


def _weight_layout(config: TransformerConfig) -> WeightLayout:
    return blocks.decoder_layout(config, _layer, qwen3_5.SKIPPABLE, qwen3_5.RENAMES)


def _hf_config(config: TransformerConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    found = qwen3_5.hf_config(config) | {
        "num_experts": moe.num_moe_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        "moe_intermediate_size": moe.moe_ffn_hidden_size,
        "shared_expert_intermediate_size": moe.moe_shared_expert_intermediate_size,
    }
    del found["intermediate_size"]
    return found


FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _ALIASES,
    _defaults,
    _weight_layout,
    _hf_config,
    groups=(*qwen3_5.GROUPS, "moe"),
    options=qwen3_5.OPTIONS,
    other_names=frozenset({"qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"}),
    extra_keys=qwen3_5.EXTRA_KEYS,
    without_effect=qwen3_5.WITHOUT_EFFECT
    | {"router_aux_loss_coef", "output_router_logits", "moe_router_dtype", "intermediate_size"},
    fixed=qwen3_5.FIXED,
    prepare=qwen3_5.prepare,
    derive=_derive,
)

"""Qwen3 dense: RMS norm on every query and key head."""

from __future__ import annotations

from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import dense
from mindformers_ext.models.families.family import Family


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    # Qwen3Attention has its optional bias on all four projections.
    bias = values.get("add_qkv_bias", False)
    return {"qk_layernorm": True, "kv_channels": 128, "add_proj_bias": bias, "max_position_embeddings": 32768}


def _hf_config(config: TransformerConfig) -> dict[str, Any]:
    return dense.hf_config(config) | {"attention_bias": config.add_qkv_bias}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", dense.ALIASES, _defaults, dense.weight_layout, _hf_config)

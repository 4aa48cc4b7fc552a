"""Llama 2, 3, 3.1 and 3.2: dense, grouped-query attention, optional biases."""

from __future__ import annotations

from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import dense
from mindformers_ext.models.families.family import Family


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    # LlamaAttention has its bias on all four projections.
    return {"add_proj_bias": values.get("add_qkv_bias", False), "max_position_embeddings": 2048}


def _hf_config(config: TransformerConfig) -> dict[str, Any]:
    return dense.hf_config(config) | {"attention_bias": config.add_qkv_bias, "mlp_bias": config.add_mlp_bias}


FAMILY = Family("llama", "LlamaForCausalLM", dense.ALIASES, _defaults, dense.weight_layout, _hf_config)

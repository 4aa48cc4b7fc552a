"""The transformer and its families."""

from __future__ import annotations

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import check_described, hf_config, transformer_config, weight_layout
from mindformers_ext.models.weights import Sources, WeightLayout, WeightMapping

__all__ = [
    "Sources",
    "TransformerConfig",
    "WeightLayout",
    "WeightMapping",
    "check_described",
    "hf_config",
    "transformer_config",
    "weight_layout",
]

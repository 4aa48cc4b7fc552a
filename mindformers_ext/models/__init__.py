"""The transformer and its families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import hf_config, transformer_config, weight_layout
from mindformers_ext.models.weights import WeightLayout, WeightMapping

if TYPE_CHECKING:
    from mindformers_ext.models.gpt_model import GPTModel

__all__ = [
    "TransformerConfig",
    "WeightLayout",
    "WeightMapping",
    "build_model",
    "hf_config",
    "transformer_config",
    "weight_layout",
]


def build_model(config: TransformerConfig) -> GPTModel:
    """Returns the model without weights."""
    # Configurations and weight names are needed where mindspore is not.
    from mindformers_ext.models.gpt_model import GPTModel

    return GPTModel(config)

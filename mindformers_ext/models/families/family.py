"""What a file in this folder says about its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.weights import WeightLayout


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: value of ``model_type`` in ``config.json``.
        architectures: class name in ``config.json``.
        aliases: names in ``config.json`` or a YAML -> fields of `TransformerConfig`; fields go by their own names too.
        defaults: given the values that were found, those of fields that were not.
        weight_layout: how checkpoints of the family are laid out.
        hf_config: ``config.json`` of a model of the family.
    """

    model_type: str
    architectures: str
    aliases: Mapping[str, str]
    defaults: Callable[[dict[str, Any]], dict[str, Any]]
    weight_layout: Callable[[TransformerConfig], WeightLayout]
    hf_config: Callable[[TransformerConfig], dict[str, Any]]

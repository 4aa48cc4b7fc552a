"""What a file in this folder says about its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.weights import WeightLayout


def _unchanged(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    return dict(section)


def _as_given(values: dict[str, Any]) -> dict[str, Any]:
    return values


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: value of ``model_type`` in ``config.json``.
        architectures: class name in ``config.json``.
        aliases: names in ``config.json`` or a YAML -> fields of `TransformerConfig` and its groups; fields go by their
            own names too.
        defaults: given the values that were found, those of fields that were not.
        weight_layout: how checkpoints of the family are laid out.
        hf_config: ``config.json`` of a model of the family.
        groups: names of the groups of fields that it has, e.g. ``moe``.
        options: optional fields of `TransformerConfig` that it has, e.g. ``partial_rotary_factor``.
        other_names: further values of ``model_type`` and ``architectures``, e.g. of the composite model around it.
        extra_keys: keys that are no fields; `derive` takes them out of the values.
        without_effect: keys that change nothing here, besides those of every family.
        fixed: keys with the only values that the family knows, besides those of every family.
        prepare: rewrites the keys of one source, ``config.json`` or ``model``, before they are mapped.
        derive: completes the joined values of all sources, defaults included.
    """

    model_type: str
    architectures: str
    aliases: Mapping[str, str]
    defaults: Callable[[dict[str, Any]], dict[str, Any]]
    weight_layout: Callable[[TransformerConfig], WeightLayout]
    hf_config: Callable[[TransformerConfig], dict[str, Any]]
    groups: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()
    other_names: frozenset[str] = frozenset()
    extra_keys: frozenset[str] = frozenset()
    without_effect: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    prepare: Callable[[Mapping[str, Any], str], dict[str, Any]] = _unchanged
    derive: Callable[[dict[str, Any]], dict[str, Any]] = _as_given

"""The model families, one file each, and the way from ``config.json`` or a YAML to a `TransformerConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import (
    deepseek_v3,
    deepseek_v4,
    llama,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
)
from mindformers_ext.models.families.family import Family
from mindformers_ext.models.families.mapping import map_section, merge
from mindformers_ext.models.weights import WeightLayout

_MODULES = (deepseek_v3, deepseek_v4, llama, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe)
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}


def transformer_config(section: Mapping[str, Any], hf_config: Mapping[str, Any] | None = None) -> TransformerConfig:
    """Maps a YAML's ``model:`` section and a checkpoint's ``config.json`` to the model's configuration.

    Args:
        section: the YAML's keys, in HuggingFace's or MindSpore Transformers' names; they win over ``hf_config``.
        hf_config: parsed ``config.json``, or None.

    Raises:
        ValueError: unknown family, missing or contradictory keys, or an option that is not supported.
    """
    family = family_of(section, hf_config)
    sources = [map_section(hf_config, family, "config.json")] if hf_config else []
    sources.append(map_section(section, family, "model"))
    return merge(sources, family)


def family_of(section: Mapping[str, Any], hf_config: Mapping[str, Any] | None = None) -> Family:
    """Finds the family by ``model_type``, or by ``architectures`` where that is missing.

    Raises:
        ValueError: neither names a known family.
    """
    for source, where in ((section, "model"), (hf_config or {}, "config.json")):
        model_type, architectures = source.get("model_type"), source.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else architectures
        for family in FAMILIES.values():
            if model_type in (family.model_type, *family.other_names):
                return family
            if model_type is None and name in (family.architectures, *family.other_names):
                return family
        if model_type is not None or name is not None:
            given = f"model_type {model_type!r}" if model_type is not None else f"architectures {name!r}"
            raise ValueError(f"{where}: {given} is not a known family; known are {_known()}")
    raise ValueError(f"model: model_type is missing; known are {_known()}")


def weight_layout(config: TransformerConfig) -> WeightLayout:
    """Returns how HuggingFace checkpoints of this model are laid out."""
    return FAMILIES[config.model_type].weight_layout(config)


def weight_layout_of(hf_config: Mapping[str, Any]) -> WeightLayout:
    """Returns the layout that belongs to a ``config.json``.

    Raises:
        ValueError: see `transformer_config`.
    """
    return weight_layout(transformer_config({}, hf_config))


def hf_config(config: TransformerConfig) -> dict[str, Any]:
    """Returns the ``config.json`` with which transformers would build this model."""
    return FAMILIES[config.model_type].hf_config(config)


def saved_config(hf_config_read: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``config.json`` for weights that were read beside ``hf_config_read`` and are saved again.

    It is the same one, but for a composite model, of which only the text model is read and saved.

    Raises:
        ValueError: see `transformer_config`.
    """
    text = hf_config_read.get("text_config")
    if not isinstance(text, Mapping):
        return dict(hf_config_read)
    tokens = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in text}
    return hf_config(transformer_config({}, hf_config_read)) | tokens


def check_described(config: TransformerConfig) -> None:
    """Refuses a model that `hf_config` cannot describe: its checkpoints would be read as another model's.

    Raises:
        ValueError: names the fields that would be lost.
    """
    read = transformer_config({}, hf_config(config))
    names = [entry.name for entry in fields(config) if entry.name != "seq_length"]
    lost = [name for name in names if getattr(read, name) != getattr(config, name)]
    if lost:
        found = ", ".join(f"{name} {getattr(config, name)} (it would read {getattr(read, name)})" for name in lost)
        raise ValueError(
            f"model: a {config.model_type} config.json cannot say {found}, so the trained checkpoint could not be "
            "used; remove the setting or choose a model_type that has it"
        )


def _known() -> str:
    return ", ".join(f"{family.model_type} ({family.architectures})" for family in FAMILIES.values())

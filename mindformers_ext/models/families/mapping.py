"""From the keys of a ``config.json`` or a YAML to the fields of a `TransformerConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from mindformers_ext.models.config import RopeParameters, TransformerConfig
from mindformers_ext.models.families.family import Family
from mindformers_ext.runtime import logger

# Keys that say how rotary positions are computed; MindSpore Transformers' YAML keeps the parameters loose.
_ROPE_LOOSE = {
    "rotary_scaling_factor": "factor",
    "scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_ROPE_KEYS = {"rope_theta", "rotary_base", "rope_scaling", "rope_parameters", "position_embedding_type", *_ROPE_LOOSE}

# Options that change results and that no family here has: the values under which they change nothing.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swiglu"),
    "activation_func": ("silu", "swiglu"),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "gated_linear_unit": (True,),
    "normalization": ("RMSNorm",),
    "multi_latent_attention": (False, None),
    "num_experts": (0, None),
    "is_encoder_decoder": (False, None),
}

# Keys without effect on a forward in float32.
_WITHOUT_EFFECT = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "sliding_window", "layer_types"),
    *("pretraining_tp", "_name_or_path", "return_dict", "output_attentions", "output_hidden_states"),
    *("chunk_size_feed_forward", "use_flash_attention", "rotary_dtype", "layernorm_compute_dtype", "tokenizer_class"),
    *("softmax_compute_dtype", "id2label", "label2id", "problem_type", "_attn_implementation_autoset"),
    *("attn_implementation", "use_attn_mask_compression", "num_nextn_predict_layers", "mtp_num_layers"),
}
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_DTYPES = ("params_dtype", "compute_dtype")
_FIELDS = {entry.name for entry in fields(TransformerConfig)} - {"rope"}
_REQUIRED = [entry.name for entry in fields(TransformerConfig) if entry.default is entry.default_factory is MISSING]


def map_section(section: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Maps one source's keys to fields; rotary keys are gathered under ``rope`` as they are.

    Args:
        section: keys and values.
        family: gives the aliases.
        where: name of the source in messages.

    Raises:
        ValueError: two keys of one field differ, or an option is not supported.
    """
    found: dict[str, tuple[str, Any]] = {}
    rope: dict[str, Any] = {}
    unused: list[str] = []
    for key, value in section.items():
        target = family.aliases.get(key, key)
        if key in _MUST_BE:
            if value not in _MUST_BE[key]:
                raise ValueError(f"{where}: {key}: {value!r} is not supported for {family.model_type}")
        elif key in _ROPE_KEYS:
            rope[key] = value
        elif target in _FIELDS and key not in _WITHOUT_EFFECT:
            if value is None:
                continue
            other = found.setdefault(target, (key, value))
            if other[1] != value:
                raise ValueError(f"{where}: {other[0]} ({other[1]!r}) and {key} ({value!r}) set the same thing")
        elif key == "layer_types" and set(value or ()) - {"full_attention"}:
            raise ValueError(
                f"{where}: layer_types other than full_attention are not supported for {family.model_type}"
            )
        elif key in _DROPOUTS and not value or key in _DTYPES and value in ("float32", "fp32", None):
            continue
        elif key not in _WITHOUT_EFFECT:
            unused.append(key)
    if unused:
        logger.warning("%s: without effect here: %s", where, ", ".join(sorted(unused)))
    mapped = {target: value for target, (_, value) in found.items()}
    return mapped | ({"rope": rope} if rope else {})


def merge(sources: Sequence[Mapping[str, Any]], family: Family) -> TransformerConfig:
    """Builds the configuration; later sources win.

    Raises:
        ValueError: required keys are missing, or a value is out of range.
    """
    values: dict[str, Any] = {}
    rope: dict[str, Any] = {}
    for source in sources:
        rope |= source.get("rope", {})
        values |= {key: value for key, value in source.items() if key != "rope"}
    values |= {"model_type": family.model_type, "architectures": family.architectures}
    values = family.defaults(values) | values
    heads = values.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0:
        values.setdefault("num_query_groups", heads)
        if isinstance(values.get("hidden_size"), int):
            values.setdefault("kv_channels", values["hidden_size"] // heads)
    missing = [_theirs(name, family) for name in _REQUIRED if name not in values]
    if missing:
        raise ValueError(f"model: missing for {family.model_type}: {', '.join(missing)}")
    return TransformerConfig(**values, rope=_rope(rope))


def _theirs(field_name: str, family: Family) -> str:
    return next((key for key, target in family.aliases.items() if target == field_name), field_name)


def _rope(keys: Mapping[str, Any]) -> RopeParameters:
    nested: dict[str, Any] = {**(keys.get("rope_scaling") or {}), **(keys.get("rope_parameters") or {})}
    theta = nested.pop("rope_theta", None) or keys.get("rope_theta") or keys.get("rotary_base") or 10000.0
    rope_type = nested.pop("rope_type", None) or nested.pop("type", None)
    nested.pop("type", None)
    if nested.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("model: partial_rotary_factor below 1 is not supported for this family")
    position_embedding = keys.get("position_embedding_type", "rope")
    if rope_type is None:
        rope_type = "default" if position_embedding == "rope" else position_embedding
    if rope_type == "default":
        return RopeParameters("default", float(theta))
    loose = {target: keys[key] for key, target in _ROPE_LOOSE.items() if keys.get(key) is not None}
    return RopeParameters(str(rope_type), float(theta), loose | nested)

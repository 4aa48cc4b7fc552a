"""From the keys of a ``config.json`` or a YAML to the fields of a `TransformerConfig`."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from mindformers_ext.models.config import GROUPS, RopeParameters, TransformerConfig, checked_value
from mindformers_ext.models.families.family import Family
from mindformers_ext.runtime import logger

# Where a section comes from; what a user wrote by hand is checked for typing mistakes.
YAML = "model"

# Keys that say how rotary positions are computed; MindSpore Transformers' YAML keeps the parameters loose.
_ROPE_LOOSE = {
    "rope_theta": "rope_theta",
    "rotary_base": "rope_theta",
    "rotary_scaling_factor": "factor",
    "scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_ROPE_NESTED = ("rope_scaling", "rope_parameters")
ROPE_KEYS = {*_ROPE_NESTED, "position_embedding_type", *_ROPE_LOOSE}
_ROPE_NUMBERS = {*_ROPE_LOOSE.values(), "low_freq_factor", "high_freq_factor", "attention_factor"}
_ROPE_MAY_BE_ZERO = {"mscale", "mscale_all_dim"}

# Options that change results and that no family here has: the values under which they change nothing.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swiglu"),
    "activation_func": ("silu", "swiglu"),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "gated_linear_unit": (True,),
    "normalization": ("RMSNorm",),
    "multi_latent_attention": (False, None),
    "num_experts": (0, None),
    "is_encoder_decoder": (False, None),
}

# How the weights are stored; they are computed with in float32.
_QUANTIZATION = "quantization_config"

# Keys without effect on a forward in float32.
_WITHOUT_EFFECT = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "sliding_window", "layer_types"),
    *("pretraining_tp", "_name_or_path", "return_dict", "output_attentions", "output_hidden_states"),
    *("chunk_size_feed_forward", "use_flash_attention", "rotary_dtype", "layernorm_compute_dtype", "tokenizer_class"),
    *("softmax_compute_dtype", "id2label", "label2id", "problem_type", "_attn_implementation_autoset"),
    *("attn_implementation", "use_attn_mask_compression", "num_nextn_predict_layers", "mtp_num_layers"),
}
# Keys of MindSpore Transformers that look like one of the above and are no mistake.
_OTHER_KEYS = {"init_method", "layernorm_compute_type", "quantization_bit", "type"}
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_DTYPES = ("params_dtype", "compute_dtype")
# Fields that only some families have.
_OPTIONS = {
    *("partial_rotary_factor", "attention_output_gate", "layernorm_zero_centered_gamma"),
    *("activation_func_clamp_value", "layer_types", "mlp_layer_types"),
}
_BASE_FIELDS = {entry.name for entry in fields(TransformerConfig)} - {"rope", *GROUPS, *_OPTIONS}


def _known_fields(family: Family) -> set[str]:
    """The fields that a family's sources may set."""
    grouped = {entry.name for group in family.groups for entry in fields(GROUPS[group])}
    return _BASE_FIELDS | (_OPTIONS & family.options) | grouped


def _required(owner: type) -> list[str]:
    return [entry.name for entry in fields(owner) if entry.default is entry.default_factory is MISSING]


def map_section(section: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Maps one source's keys to fields; the rotary ones become one flat dict under ``rope``.

    Args:
        section: keys and values.
        family: gives the aliases.
        where: name of the source in messages, `YAML` or ``config.json``.

    Raises:
        ValueError: two keys of one field differ, a value has the wrong type, an option is not supported, or a key of
            the YAML is almost a known one.
    """
    found: dict[str, tuple[str, Any]] = {}
    rope: dict[str, Any] = {}
    unused: list[str] = []
    known = _known_fields(family)
    fixed = {**_MUST_BE, **family.fixed}
    for key, value in family.prepare(section, where).items():
        target = family.aliases.get(key, key)
        if key in family.extra_keys:
            if value is not None:
                _put(found, key, key, value, where)
        elif target in known and (target in _OPTIONS or key not in _WITHOUT_EFFECT):
            if value is not None:
                _put(found, target, key, checked_value(target, value, f"{where}: {key}"), where)
        elif key in fixed:
            if value not in fixed[key]:
                right = " or ".join(dict.fromkeys(_as_written(known) for known in fixed[key]))
                raise ValueError(f"{where}: {key}: {value!r} is not supported for {family.model_type}; give {right}")
        elif key == _QUANTIZATION:
            _check_quantization(value, where)
        elif key in ROPE_KEYS:
            rope[key] = value
        elif key == "layer_types" and set(value or ()) - {"full_attention"}:
            raise ValueError(
                f"{where}: layer_types other than full_attention are not supported for {family.model_type}"
            )
        elif key in _DROPOUTS and not value or key in _DTYPES and value in ("float32", "fp32", None):
            continue
        elif key not in _WITHOUT_EFFECT and key not in family.without_effect:
            unused.append(key)
    partial = "partial_rotary_factor" in family.options
    if partial:
        for key in _ROPE_NESTED:
            value = _nested_rope(rope, key, where).get("partial_rotary_factor")
            if value is not None:
                checked = checked_value("partial_rotary_factor", value, f"{where}: {key}.partial_rotary_factor")
                _put(found, "partial_rotary_factor", f"{key}.partial_rotary_factor", checked, where)
    _report_unused(unused, family, where)
    mapped = {target: value for target, (_, value) in found.items()}
    return mapped | ({"rope": flat_rope(rope, where, partial)} if rope else {})


def _as_written(value: Any) -> str:
    """A value as a YAML and a ``config.json`` have it."""
    return value if isinstance(value, str) else json.dumps(value)


def _check_quantization(value: Any, where: str) -> None:
    """Accepts the weights that `checkpoint` reads: FP8 in blocks with a scale each, experts perhaps in FP4."""
    if value is None:
        return
    where = f"{where}: {_QUANTIZATION}"
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping, not {value!r}")
    method, block, scales = value.get("quant_method"), value.get("weight_block_size"), value.get("scale_fmt")
    if method != "fp8":
        raise ValueError(
            f"{where}.quant_method {method!r} is not supported; use weights in bfloat16, or fp8 with scales for blocks"
        )
    sizes = block if isinstance(block, (list, tuple)) else ()
    if len(sizes) != 2 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"{where}.weight_block_size must be the two sides of a block, e.g. [128, 128], not {block!r}")
    if scales not in (None, "float", "ue8m0"):
        raise ValueError(f"{where}.scale_fmt {scales!r} is not supported; known are float and ue8m0")


def _put(found: dict[str, tuple[str, Any]], target: str, key: str, value: Any, where: str) -> None:
    other = found.setdefault(target, (key, value))
    if other[1] != value:
        raise ValueError(f"{where}: {other[0]} ({other[1]!r}) and {key} ({value!r}) set the same thing")


def _report_unused(keys: Sequence[str], family: Family, where: str) -> None:
    """Names keys that nothing here reads; in the YAML one that is almost a known key is an error."""
    if not keys:
        return
    if where != YAML:
        logger.info("%s: not needed here: %s", where, ", ".join(sorted(keys)))
        return
    fixed = {*_MUST_BE, *family.fixed, *_DROPOUTS, *_DTYPES, _QUANTIZATION}
    harmless = {*_OTHER_KEYS, *_WITHOUT_EFFECT, *family.without_effect}
    known = {*_known_fields(family), *family.aliases, *family.extra_keys, *ROPE_KEYS, *fixed, *harmless}
    for key in keys:
        meant = None if key in known else _meant(key, known - _OTHER_KEYS)
        if meant is not None:
            raise ValueError(f"{where}: {key}: unknown key; did you mean {meant}?")
    logger.warning("%s: without effect here: %s", where, ", ".join(sorted(keys)))


def _meant(key: str, known: Iterable[str]) -> str | None:
    """The known key that a mistyped one stands for; a key with a further word, as moe_intermediate_size, is another."""
    wanted = key.lower().replace("-", "_")
    close = difflib.get_close_matches(wanted, sorted(known), cutoff=0.8)
    if not close or any(_words(name) < _words(wanted) for name in close):
        return None
    return close[0]


def _words(key: str) -> set[str]:
    return set(filter(None, key.split("_")))


def merge(sources: Sequence[Mapping[str, Any]], family: Family) -> TransformerConfig:
    """Builds the configuration; later sources win key by key, in the rotary settings too. The last is the YAML.

    Raises:
        ValueError: required keys are missing, or a value is out of range.
    """
    values: dict[str, Any] = {}
    rope: dict[str, Any] = {}
    for source in sources:
        rope |= source.get("rope", {})
        values |= {key: value for key, value in source.items() if key != "rope"}
    values |= {"model_type": family.model_type, "architectures": family.architectures}
    values = family.derive(family.defaults(values) | values)
    heads = values.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0:
        values.setdefault("num_query_groups", heads)
        if isinstance(values.get("hidden_size"), int):
            values.setdefault("kv_channels", values["hidden_size"] // heads)
    owners = (TransformerConfig, *(GROUPS[group] for group in family.groups))
    missing = [_theirs(name, family) for owner in owners for name in _required(owner) if name not in values]
    if missing:
        raise ValueError(f"model: missing for {family.model_type}: {', '.join(missing)}")
    rope_type, theta = rope.pop("rope_type", "default"), rope.pop("rope_theta", 10000.0)
    if rope_type == "default":
        ignored = sources[-1].get("rope", {}).keys() - {"rope_type", "rope_theta"}
        if ignored:
            logger.warning("%s: without effect for rope_type default: %s", YAML, ", ".join(sorted(ignored)))
        rope = {}
    groups = {}
    for group in family.groups:
        names = [entry.name for entry in fields(GROUPS[group])]
        groups[group] = GROUPS[group](**{name: values.pop(name) for name in names if name in values})
    return TransformerConfig(**values, **groups, rope=RopeParameters(rope_type, float(theta), rope))


def _theirs(field_name: str, family: Family) -> str:
    return next((key for key, target in family.aliases.items() if target == field_name), field_name)


def flat_rope(keys: Mapping[str, Any], where: str, partial: bool) -> dict[str, Any]:
    """One source's rotary settings under transformers' names: rope_type, rope_theta, factor, ...

    ``partial`` says that the family rotates a part of a head, which is a field of its own.
    """
    found: dict[str, tuple[str, Any]] = {}
    for key, value in keys.items():
        if key in _ROPE_LOOSE and value is not None:
            _put_rope(found, _ROPE_LOOSE[key], key, value, where)
    for key in _ROPE_NESTED:
        nested = _nested_rope(keys, key, where)
        # Older files write type; where both stand, rope_type is the one that transformers reads.
        named = {"rope_type": nested.get("rope_type") or nested.get("type")}
        for name, value in {**nested, **named}.items():
            if name == "partial_rotary_factor" and not partial and value not in (1, None):
                raise ValueError(f"{where}: {key}.partial_rotary_factor below 1 is not supported for this family")
            if name not in ("type", "partial_rotary_factor") and value is not None:
                _put_rope(found, name, f"{key}.{name}", value, where)
    embedding = keys.get("position_embedding_type")
    if embedding is not None and not (embedding == "rope" and "rope_type" in found):
        _put_rope(found, "rope_type", "position_embedding_type", "default" if embedding == "rope" else embedding, where)
    return {name: value for name, (_, value) in found.items()}


def _nested_rope(keys: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    nested = keys.get(key) or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"{where}: {key} must be a mapping, not {nested!r}")
    return nested


def _put_rope(found: dict[str, tuple[str, Any]], name: str, key: str, value: Any, where: str) -> None:
    if name == "rope_type" and not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be text, not {value!r}")
    if isinstance(value, Mapping):
        raise ValueError(f"{where}: {key}: rotary parameters for single kinds of layers are not supported")
    if name in _ROPE_NUMBERS:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or value == 0 and name not in _ROPE_MAY_BE_ZERO:
            kind = "a number of at least 0" if name in _ROPE_MAY_BE_ZERO else "a positive number"
            raise ValueError(f"{where}: {key} must be {kind}, not {value!r}")
    _put(found, name, key, value, where)

"""Qwen3.5 dense: gated delta nets, and gated attention in every fourth layer. The text model only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.families import blocks, dense
from mindformers_ext.models.families.family import Family
from mindformers_ext.models.transforms import copied, joined_rows
from mindformers_ext.models.weights import WeightLayout, WeightMapping

GROUPS = ("delta_net",)
OPTIONS = frozenset({"partial_rotary_factor", "layer_types"})
EXTRA_KEYS = frozenset({"full_attention_interval"})
FIXED = {
    "attn_output_gate": (True, None),
    "attention_output_gate": (True, None),
    "layernorm_zero_centered_gamma": (True, None),
    "mlp_only_layers": ([], None),
}
WITHOUT_EFFECT = frozenset(
    {
        *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("language_model_only", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    }
)
# Published checkpoints hold the text model inside one that also sees.
RENAMES = ((r"^model\.language_model\.", "model."),)
SKIPPABLE = (
    (r"model\.visual\..*", "of the vision model"),
    (r"mtp\..*", "for predicting several tokens at once"),
    blocks.INVERSE_FREQUENCIES,
)

_LAYER_TYPES = ("linear_attention", "full_attention")


def prepare(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Puts the keys of a composite model's ``text_config`` beside its own, which win."""
    text = section.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: text_config must be a mapping, not {text!r}")
    return {**text, **{key: value for key, value in section.items() if key != "text_config"}}


def defaults(values: dict[str, Any]) -> dict[str, Any]:
    """What transformers takes where ``config.json`` says nothing."""
    return {
        "kv_channels": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
        "add_proj_bias": values.get("add_qkv_bias", False),
        "qk_layernorm": True,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }


def derive(values: dict[str, Any]) -> dict[str, Any]:
    """Fills in the layers' types: every ``full_attention_interval``-th has full attention."""
    interval = values.pop("full_attention_interval")
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"model: full_attention_interval must be a positive integer, not {interval!r}")
    if not values.get("layer_types"):
        numbers = range(1, values.get("num_layers", 0) + 1)
        values["layer_types"] = tuple(_LAYER_TYPES[number % interval == 0] for number in numbers)
    unknown = set(values["layer_types"]) - set(_LAYER_TYPES)
    if unknown:
        raise ValueError(f"model: layer_types: {min(unknown)!r} is not known; give {' or '.join(_LAYER_TYPES)}")
    return values


def attention(config: TransformerConfig, index: int, ours: str, theirs: str) -> list[WeightMapping]:
    """Returns the norms and the attention or delta net of a layer."""
    norms = blocks.layer_norms(config, ours, theirs)
    if config.layer_types[index] == "full_attention":
        return norms + blocks.self_attention(config, ours, theirs)
    return norms + _delta_net(config, f"{ours}self_attention.", f"{theirs}linear_attn.")


def _delta_net(config: TransformerConfig, ours: str, theirs: str) -> list[WeightMapping]:
    sizes = config.delta_net
    assert sizes is not None
    hidden, heads = config.hidden_size, sizes.linear_num_value_heads
    projections = tuple(f"{theirs}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    rows = (sizes.conv_size, sizes.value_size, heads, heads)
    conv = (sizes.conv_size, 1, sizes.linear_conv_kernel_dim)
    return [
        joined_rows(f"{ours}in_proj.weight", projections, rows, (hidden,)),
        copied(f"{ours}conv1d.weight", f"{theirs}conv1d.weight", *conv),
        copied(f"{ours}A_log", f"{theirs}A_log", heads, keep_float32=True),
        copied(f"{ours}dt_bias", f"{theirs}dt_bias", heads, keep_float32=True),
        copied(f"{ours}out_norm.weight", f"{theirs}norm.weight", sizes.linear_value_head_dim),
        copied(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", hidden, sizes.value_size),
    ]


def hf_config(config: TransformerConfig) -> dict[str, Any]:
    """Returns the ``config.json`` of the text model, as far as the dense and the sparse family agree."""
    sizes = config.delta_net
    assert sizes is not None
    found = dense.hf_config(config) | {
        "attention_bias": config.add_qkv_bias,
        "layer_types": list(config.layer_types),
        "linear_conv_kernel_dim": sizes.linear_conv_kernel_dim,
        "linear_key_head_dim": sizes.linear_key_head_dim,
        "linear_num_key_heads": sizes.linear_num_key_heads,
        "linear_num_value_heads": sizes.linear_num_value_heads,
        "linear_value_head_dim": sizes.linear_value_head_dim,
    }
    found["rope_parameters"]["partial_rotary_factor"] = config.partial_rotary_factor
    return found


def _layer(config: TransformerConfig, index: int, ours: str, theirs: str) -> list[WeightMapping]:
    mlp = blocks.mlp(config, f"{ours}mlp.", f"{theirs}mlp.", config.ffn_hidden_size)
    return attention(config, index, ours, theirs) + mlp


def _weight_layout(config: TransformerConfig) -> WeightLayout:
    return blocks.decoder_layout(config, _layer, SKIPPABLE, RENAMES)


FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    dense.ALIASES,
    defaults,
    _weight_layout,
    hf_config,
    groups=GROUPS,
    options=OPTIONS,
    other_names=frozenset({"qwen3_5", "Qwen3_5ForConditionalGeneration"}),
    extra_keys=EXTRA_KEYS,
    without_effect=WITHOUT_EFFECT,
    fixed=FIXED,
    prepare=prepare,
    derive=derive,
)

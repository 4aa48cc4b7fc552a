"""DeepSeek-V4: windows beside compressed blocks, hyper-connections, experts that are partly chosen by token id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindformers_ext.models.config import (
    HyperConnectionConfig,
    MoEConfig,
    RopeParameters,
    SparseAttentionConfig,
    TransformerConfig,
)
from mindformers_ext.models.families.deepseek_v4_weights import weight_layout
from mindformers_ext.models.families.family import Family
from mindformers_ext.models.families.mapping import ROPE_KEYS, flat_rope

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _HEAVY: 128}

# HuggingFace's and MindSpore Transformers' YAML names -> fields of TransformerConfig and its groups.
_ALIASES = {
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
    "swiglu_limit": "activation_func_clamp_value",
    "n_routed_experts": "num_moe_experts",
    "num_local_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "intermediate_size": "moe_ffn_hidden_size",
    "scoring_func": "moe_router_score_function",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "compress_rate_csa": "csa_compress_rate",
    "compress_rate_hca": "hca_compress_rate",
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
    "hc_mult": "num_residual_streams",
    "hc_sinkhorn_iters": "mhc_sinkhorn_iterations",
    "hc_eps": "mhc_layernorm_epsilon",
}
_DEFAULTS = {
    "num_query_groups": 1,
    "max_position_embeddings": 1048576,
    "activation_func_clamp_value": 10.0,
    "ffn_hidden_size": 0,
    "moe_router_score_function": "sqrtsoftplus",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_enable_expert_bias": True,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "csa_window_size": 128,
    "csa_compress_rate": _RATES[_SPARSE],
    "hca_compress_rate": _RATES[_HEAVY],
    "dsa_indexer_n_heads": 64,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 512,
    "num_residual_streams": 4,
    "compress_rope_theta": 160000.0,
}
_HASH_LAYERS = 3
# Keys of config.json's compress_ratios and the like, which `_prepare` and `_derive` turn into fields.
_COMPRESS_ROPE = "compress_rope."
_ROPE_NAMES = (
    *("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "truncate"),
)
_EXTRA = frozenset({
    *("partial_rotary_factor", "compress_rope_theta", "num_hash_layers"),
    *("qk_nope_head_dim", "qk_head_dim", "v_head_dim"),
    *(f"{_COMPRESS_ROPE}{name}" for name in _ROPE_NAMES),
})  # fmt: skip
# Names that are replaced before anything else looks at them.
_OTHER_NAMES = {
    "csa_compress_ratios": "compress_ratios",
    "csa_compress_rotary_base": "compress_rope_theta",
    "moe_n_hash_layers": "num_hash_layers",
    "sliding_window": "csa_window_size",
}
_FIXED = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "n_shared_experts": (1,),
    "shared_expert_num": (1,),
    "n_group": (0, 1, None),
    "topk_group": (0, 1, None),
    "experimental_attention_variant": ("dsv4_hybrid", None),
    "enable_hyper_connections": (True,),
    "csa_dense_mode": (False, None),
    "multi_latent_attention": (True, False, None),
    "moe_token_drop_policy": (False, None, "probs"),
}
_WITHOUT_EFFECT = frozenset({
    *("router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "expert_dtype"),
    *("apply_dsa_kernel_fusion", "mhc_init_gating_factor", "moe_router_dtype", "moe_grouped_gemm", "offset"),
    *("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "moe_router_load_balancing_type", "moe_aux_loss_coeff"),
    *("moe_router_bias_update_rate", "moe_router_pre_softmax", "add_bias_linear", "mtp_loss_scaling_factor"),
})  # fmt: skip


def _prepare(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rewrites what has several names or shapes: ratios of layers, rates, groups, rotary settings."""
    keys: dict[str, Any] = {}
    for key, value in section.items():
        name = _OTHER_NAMES.get(key, key)
        if name in keys and keys[name] != value:
            first = next(other for other in section if _OTHER_NAMES.get(other, other) == name)
            raise ValueError(f"{where}: {first} ({keys[name]!r}) and {key} ({value!r}) set the same thing")
        keys[name] = value
    for key in ("moe_router_num_groups", "moe_router_group_topk"):
        if keys.get(key) == 0:
            del keys[key]
    _take_rates(keys, where)
    ratios = keys.pop("compress_ratios", None)
    if ratios is not None and keys.get("layer_types") is None:
        keys["layer_types"] = _layer_types(ratios, keys, where)
    _take_rope(keys, where)
    _check_numbers(keys, where)
    return keys


def _check_numbers(keys: Mapping[str, Any], where: str) -> None:
    """Checks the keys that are no fields."""
    for key in ("compress_rope_theta", "partial_rotary_factor"):
        value = keys.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if value is not None and not number:
            raise ValueError(f"{where}: {key} must be a positive number, not {value!r}")
    for key in ("num_hash_layers", "qk_nope_head_dim", "qk_head_dim", "v_head_dim"):
        value = keys.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"{where}: {key} must be a whole number of at least 0, not {value!r}")


def _take_rates(keys: dict[str, Any], where: str) -> None:
    rates = keys.pop("compress_rates", None)
    if rates is None:
        return
    if not isinstance(rates, Mapping) or not set(rates) <= set(_RATES):
        raise ValueError(
            f"{where}: compress_rates must be a mapping with the keys {' and '.join(_RATES)}, not {rates!r}"
        )
    for kind, name in ((_SPARSE, "compress_rate_csa"), (_HEAVY, "compress_rate_hca")):
        if kind in rates:
            keys.setdefault(name, rates[kind])


def _layer_types(ratios: Any, keys: Mapping[str, Any], where: str) -> list[str]:
    """Names the layers whose tokens of a block are given: 0 for none."""
    sparse = keys.get("compress_rate_csa") or keys.get("csa_compress_rate") or _RATES[_SPARSE]
    heavy = keys.get("compress_rate_hca") or keys.get("hca_compress_rate") or _RATES[_HEAVY]
    kinds = {0: _SLIDING, heavy: _HEAVY, sparse: _SPARSE}
    if not isinstance(ratios, (list, tuple)) or any(type(r) is not int or r not in kinds for r in ratios):
        raise ValueError(
            f"{where}: compress_ratios must be a list of 0, {sparse} and {heavy}, one a layer, not {ratios!r}; other "
            "ratios go into compress_rates"
        )
    return [kinds[ratio] for ratio in ratios]


def _take_rope(keys: dict[str, Any], where: str) -> None:
    """Splits rotary settings: a scaling belongs to the layers with blocks, which have a base of their own."""
    nested = keys.get("rope_parameters") or {}
    if isinstance(nested, Mapping) and {"main", "compress"} <= set(nested):
        del keys["rope_parameters"]
        main, compress = (flat_rope({"rope_parameters": nested[kind]}, where, True) for kind in ("main", "compress"))
        if main.get("rope_type", "default") != "default":
            raise ValueError(f"{where}: rope_parameters.main.rope_type must be default, not {main['rope_type']!r}")
        found = {"rope_theta": main.get("rope_theta"), "compress_rope_theta": compress.pop("rope_theta", None)}
        found["partial_rotary_factor"] = nested["main"].get("partial_rotary_factor")
    else:
        own: dict[str, Any] = {name: keys.pop(name) for name in ("rope_theta", "rotary_base") if name in keys}
        compress = flat_rope({name: keys.pop(name) for name in list(keys) if name in ROPE_KEYS}, where, True)
        theta = compress.pop("rope_theta", None)
        found = {"rope_theta": flat_rope(own, where, True).get("rope_theta", theta)}
    keys.update({name: value for name, value in found.items() if value is not None})
    unknown = sorted(set(compress) - set(_ROPE_NAMES))
    if unknown:
        raise ValueError(f"{where}: rotary parameters that deepseek_v4 does not have: {', '.join(unknown)}")
    keys.update({f"{_COMPRESS_ROPE}{name}": value for name, value in compress.items()})


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    return dict(_DEFAULTS)


def _derive(values: dict[str, Any]) -> dict[str, Any]:
    """Completes sizes of heads, kinds of layers and the rotary settings of blocks."""
    values = dict(values)
    _complete_heads(values)
    if values["num_query_groups"] != 1:
        raise ValueError(f"model: num_key_value_heads must be 1 for deepseek_v4, not {values['num_query_groups']}")
    hash_layers, layers = values.pop("num_hash_layers", None), values.get("num_layers")
    if isinstance(layers, int):
        pattern = [_SPARSE if index % 2 else _HEAVY for index in range(max(layers - 2, 0))]
        kinds = values.get("layer_types") or [_HEAVY] * min(layers, 2) + pattern
        # Published lists have entries for the layers of multi-token prediction, too.
        values["layer_types"] = tuple(kinds[:layers])
        values["mlp_layer_types"] = _mlp_layer_types(values.get("mlp_layer_types"), hash_layers, layers)
        _check_kinds(values)
    if "moe_ffn_hidden_size" in values:
        values.setdefault("moe_shared_expert_intermediate_size", values["moe_ffn_hidden_size"])
    scaling = {name: values.pop(f"{_COMPRESS_ROPE}{name}", None) for name in _ROPE_NAMES}
    scaling = {name: value for name, value in scaling.items() if value is not None}
    kind = scaling.pop("rope_type", "default")
    if kind == "yarn":
        scaling.setdefault("attention_factor", 1.0)
    theta = float(values.pop("compress_rope_theta"))
    values["compress_rope"] = RopeParameters(kind, theta, {} if kind == "default" else scaling)
    return values


def _mlp_layer_types(given: Sequence[str] | None, hash_layers: int | None, layers: int) -> tuple[str, ...]:
    count = _HASH_LAYERS if hash_layers is None else hash_layers
    counted = tuple("hash_moe" if index < count else "moe" for index in range(layers))
    if not given:
        return counted
    kinds = tuple(given[:layers])
    if hash_layers is not None and kinds != counted:
        raise ValueError(f"model: num_hash_layers ({hash_layers}) and mlp_layer_types ({', '.join(kinds)}) disagree")
    return kinds


def _complete_heads(values: dict[str, Any]) -> None:
    nope, value_dim = (values.pop(name, None) for name in ("qk_nope_head_dim", "v_head_dim"))
    nope = values.pop("qk_head_dim", nope)
    factor = values.pop("partial_rotary_factor", None)
    rotary = values.get("qk_pos_emb_head_dim")
    sizes = {
        size for size in (values.get("kv_channels"), value_dim, nope + rotary if nope and rotary else None) if size
    }
    if len(sizes) > 1:
        raise ValueError(
            "model: head_dim, v_head_dim and qk_nope_head_dim + qk_rope_head_dim must be equal for deepseek_v4, which "
            f"has one key that is its own value, not {', '.join(map(str, sorted(sizes)))}"
        )
    dim = values["kv_channels"] = sizes.pop() if sizes else 512
    if rotary is None:
        values["qk_pos_emb_head_dim"] = int(dim * (0.125 if factor is None else factor))
    elif factor is not None and int(dim * factor) != rotary:
        raise ValueError(
            f"model: partial_rotary_factor ({factor}) of head_dim ({dim}) is not qk_rope_head_dim ({rotary})"
        )


def _check_kinds(values: dict[str, Any]) -> None:
    for name, known in (("layer_types", (_SLIDING, _SPARSE, _HEAVY)), ("mlp_layer_types", ("hash_moe", "moe"))):
        wrong = sorted(set(values[name]) - set(known))
        if wrong:
            raise ValueError(
                f"model: {name}: {', '.join(wrong)} is not known for deepseek_v4; known are {', '.join(known)}"
            )


def _groups(config: TransformerConfig) -> tuple[SparseAttentionConfig, MoEConfig, HyperConnectionConfig]:
    if config.sparse_attention is None or config.moe is None or config.hyper_connections is None:
        raise ValueError("model: deepseek_v4 needs sparse_attention, moe and hyper_connections")
    return config.sparse_attention, config.moe, config.hyper_connections


def _hf_config(config: TransformerConfig) -> dict[str, Any]:
    sparse, moe, hyper = _groups(config)
    factor = sparse.qk_pos_emb_head_dim / config.kv_channels
    compress = sparse.compress_rope
    return {
        "architectures": [config.architectures],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": moe.moe_ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": config.kv_channels,
        "q_lora_rank": sparse.q_lora_rank,
        "partial_rotary_factor": factor,
        "qk_rope_head_dim": sparse.qk_pos_emb_head_dim,
        "num_experts_per_tok": moe.moe_router_topk,
        "n_routed_experts": moe.num_moe_experts,
        "n_shared_experts": 1,
        "scoring_func": moe.moe_router_score_function,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(config.layer_types),
        "mlp_layer_types": list(config.mlp_layer_types),
        "compress_rates": {_SPARSE: sparse.csa_compress_rate, _HEAVY: sparse.hca_compress_rate},
        "rope_theta": config.rope.theta,
        "compress_rope_theta": compress.theta,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": config.rope.theta, "partial_rotary_factor": factor},
            "compress": {
                "rope_type": compress.rope_type,
                "rope_theta": compress.theta,
                "partial_rotary_factor": factor,
                **compress.scaling,
            },
        },
        "hc_mult": hyper.num_residual_streams,
        "hc_sinkhorn_iters": hyper.mhc_sinkhorn_iterations,
        "hc_eps": hyper.mhc_layernorm_epsilon,
        "swiglu_limit": config.activation_func_clamp_value,
        "sliding_window": sparse.csa_window_size,
        "o_groups": sparse.o_groups,
        "o_lora_rank": sparse.o_lora_rank,
        "index_n_heads": sparse.dsa_indexer_n_heads,
        "index_head_dim": sparse.dsa_indexer_head_dim,
        "index_topk": sparse.dsa_indexer_topk,
        "hidden_act": "silu",
        "rms_norm_eps": config.layernorm_epsilon,
        "initializer_range": config.init_method_std,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


FAMILY = Family(
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    _ALIASES,
    _defaults,
    weight_layout,
    _hf_config,
    groups=("moe", "sparse_attention", "hyper_connections"),
    options=frozenset({"activation_func_clamp_value", "layer_types", "mlp_layer_types"}),
    extra_keys=_EXTRA,
    without_effect=_WITHOUT_EFFECT,
    fixed=_FIXED,
    prepare=_prepare,
    derive=_derive,
)

"""DeepSeek-V3 and R1: latent attention, experts in groups chosen by sigmoid scores, a few dense layers first.

What multi-token prediction adds to the published checkpoints is neither trained nor used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindformers_ext.models.config import MLAConfig, MoEConfig, TransformerConfig
from mindformers_ext.models.families import blocks, dense
from mindformers_ext.models.families.family import Family
from mindformers_ext.models.transforms import copied, joined_rows
from mindformers_ext.models.weights import WeightLayout, WeightMapping

_ALIASES = {key: target for key, target in dense.ALIASES.items() if key not in ("head_dim", "num_key_value_heads")} | {
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "n_routed_experts": "num_moe_experts",
    "num_local_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "rotary_interleaved": "rope_interleave",
}
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "qk_layernorm": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_moe_experts": 256,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "shared_expert_num": 1,
    "moe_layer_freq": 1,
}
# Values without which it would be another family.
_ONLY = {"qk_layernorm": True, "moe_router_score_function": "sigmoid", "use_shared_expert_gating": False}
_WITHOUT_EFFECT = {
    *("head_dim", "num_key_value_heads", "ep_size", "seq_aux", "aux_loss_alpha", "output_router_logits"),
    *("router_aux_loss_coef", "router_dense_type", "moe_router_dtype", "moe_aux_loss_coeff", "seq_aux_loss_coeff"),
    *("moe_router_load_balancing_type", "moe_router_bias_update_rate", "moe_token_drop_policy", "use_pad_tokens"),
    *("moe_grouped_gemm", "moe_token_dispatcher_type", "mtp_loss_factor", "mtp_loss_scaling_factor"),
}
_MTP_REASON = "a layer of multi-token prediction, which is not used"


def _prepare(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    keys = dict(section)
    if "q_lora_rank" in keys and keys["q_lora_rank"] is None:
        keys["q_lora_rank"] = 0
    # transformers writes the size of a whole head as qk_head_dim, MindSpore Transformers that of its plain part.
    plain, rope = keys.get("qk_nope_head_dim"), keys.get("qk_rope_head_dim")
    if isinstance(plain, int) and isinstance(rope, int) and keys.get("qk_head_dim") == plain + rope:
        del keys["qk_head_dim"]
    if "n_shared_experts" in keys:
        count = keys.pop("n_shared_experts")
        if keys.setdefault("shared_expert_num", count) != count:
            other = keys["shared_expert_num"]
            raise ValueError(f"{where}: n_shared_experts ({count}) and shared_expert_num ({other}) set the same thing")
    return keys


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    # DeepseekV3Attention has its optional bias on the output projection too.
    return _DEFAULTS | {"add_proj_bias": values.get("add_qkv_bias", False)}


def _derive(values: dict[str, Any]) -> dict[str, Any]:
    for name, only in _ONLY.items():
        if values.get(name, only) != only:
            raise ValueError(f"model: {name}: {values[name]!r} is not supported for deepseek_v3, give {only!r}")
    if values.get("add_qkv_bias") and not values["q_lora_rank"]:
        raise ValueError("model: attention_bias is not supported for deepseek_v3 without q_lora_rank")
    shared = values.pop("shared_expert_num")
    if not isinstance(shared, int) or isinstance(shared, bool) or shared < 0:
        raise ValueError(f"model: n_shared_experts must be a number of experts, not {shared!r}")
    heads = values.get("num_attention_heads")
    if heads is not None:
        values["num_query_groups"] = heads
    counted = _mlp_layer_types(values)
    types = blocks.checked_mlp_layer_types(values.get("mlp_layer_types") or counted, "deepseek_v3")
    return {
        "moe_shared_expert_intermediate_size": shared * values["moe_ffn_hidden_size"],
        **values,
        "mlp_layer_types": types,
        "kv_channels": values["qk_head_dim"] + values["qk_pos_emb_head_dim"],
    }


def _mlp_layer_types(values: dict[str, Any]) -> tuple[str, ...]:
    """Takes the keys that say which layers are dense out of the values.

    ``moe_layer_freq`` is a list of one 0 or 1 a layer, or a number: of the layers from ``first_k_dense_replace`` on,
    those whose index is a multiple of it have experts.
    """
    freq, layers = values.pop("moe_layer_freq"), range(values.get("num_layers", 0))
    listed = isinstance(freq, (list, tuple))
    first = values.pop("first_k_dense_replace", 0 if listed else 3)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ValueError(f"model: first_k_dense_replace must be a number of layers, not {first!r}")
    if listed:
        if len(freq) != len(layers) or set(freq) - {0, 1}:
            raise ValueError(f"model: moe_layer_freq must hold one 0 or 1 for each of {len(layers)} layers, not {freq}")
        has_experts = [bool(entry) for entry in freq]
    elif isinstance(freq, int) and not isinstance(freq, bool) and freq > 0:
        has_experts = [index % freq == 0 for index in layers]
    else:
        raise ValueError(f"model: moe_layer_freq must be a positive integer or a list of 0 and 1, not {freq!r}")
    return tuple("moe" if has_experts[index] and index >= first else "dense" for index in layers)


def _groups(config: TransformerConfig) -> tuple[MLAConfig, MoEConfig]:
    if config.mla is None or config.moe is None:
        raise ValueError("model: deepseek_v3 needs the settings of its latent attention and of its experts")
    return config.mla, config.moe


def _attention(config: TransformerConfig, mla: MLAConfig, ours: str, theirs: str) -> list[WeightMapping]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, mla.kv_lora_rank
    queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    first = "q_a_proj" if mla.q_lora_rank else "q_proj"
    sizes = (mla.q_lora_rank or queries, latent + mla.qk_pos_emb_head_dim)

    def fused(kind: str, *columns: int) -> WeightMapping:
        names = (f"{theirs}{first}.{kind}", f"{theirs}kv_a_proj_with_mqa.{kind}")
        return joined_rows(f"{ours}linear_qkv.{kind}", names, sizes, columns)

    expanded = heads * (mla.qk_head_dim + mla.v_head_dim)
    mappings = [fused("weight", hidden)]
    if mla.q_lora_rank:
        mappings += [
            copied(f"{ours}q_layernorm.weight", f"{theirs}q_a_layernorm.weight", mla.q_lora_rank),
            copied(f"{ours}linear_qb.weight", f"{theirs}q_b_proj.weight", queries, mla.q_lora_rank),
        ]
    mappings += [
        copied(f"{ours}k_layernorm.weight", f"{theirs}kv_a_layernorm.weight", latent),
        copied(f"{ours}linear_kvb.weight", f"{theirs}kv_b_proj.weight", expanded, latent),
        copied(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", hidden, heads * mla.v_head_dim),
    ]
    if config.add_qkv_bias:
        mappings.append(fused("bias"))
    if config.add_proj_bias:
        mappings.append(copied(f"{ours}linear_proj.bias", f"{theirs}o_proj.bias", hidden))
    return mappings


def _layer(config: TransformerConfig, index: int, ours: str, theirs: str) -> list[WeightMapping]:
    mla, moe = _groups(config)
    mappings = blocks.layer_norms(config, ours, theirs)
    mappings += _attention(config, mla, f"{ours}self_attention.", f"{theirs}self_attn.")
    mlp = (f"{ours}mlp.", f"{theirs}mlp.")
    if config.mlp_layer_types[index] == "dense":
        return mappings + blocks.mlp(config, *mlp, config.ffn_hidden_size)
    return mappings + blocks.moe(config, moe, *mlp, shared="shared_experts")


def _weight_layout(config: TransformerConfig) -> WeightLayout:
    of_the_model = "|".join(map(str, range(config.num_layers)))
    skippable = (
        blocks.INVERSE_FREQUENCIES,
        (rf"model\.layers\.(?!(?:{of_the_model})\.)\d+\..+", _MTP_REASON),
        (r"mtp\.layers\.\d+\..+", _MTP_REASON),
        (r"decoder\.layers\.\d+\.mlp\..*(?:tokens_per_expert|ga_steps)", "counted anew in training"),
    )
    return blocks.decoder_layout(config, _layer, skippable)


def _hf_config(config: TransformerConfig) -> dict[str, Any]:
    mla, moe = _groups(config)
    types = config.mlp_layer_types
    return dense.hf_config(config) | {
        "head_dim": mla.qk_pos_emb_head_dim,
        "attention_bias": config.add_qkv_bias,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_head_dim,
        "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_interleave": mla.rope_interleave,
        "n_routed_experts": moe.num_moe_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        "moe_intermediate_size": moe.moe_ffn_hidden_size,
        "n_shared_experts": moe.moe_shared_expert_intermediate_size // moe.moe_ffn_hidden_size,
        "n_group": moe.moe_router_num_groups,
        "topk_group": moe.moe_router_group_topk,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": types.index("moe") if "moe" in types else len(types),
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _ALIASES,
    _defaults,
    _weight_layout,
    _hf_config,
    groups=("mla", "moe"),
    options=frozenset({"mlp_layer_types"}),
    extra_keys=frozenset({"first_k_dense_replace", "moe_layer_freq", "shared_expert_num"}),
    without_effect=frozenset(_WITHOUT_EFFECT),
    fixed={
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "multi_latent_attention": (True, None),
        "mla_qkv_concat": (True, None),
    },
    prepare=_prepare,
    derive=_derive,
)

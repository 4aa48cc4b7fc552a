"""Names and layouts of DeepSeek-V4's weights.

Checkpoints come with three sets of names: the original ones (``layers.0.attn.wq_a.weight``), those of transformers'
modules (``model.layers.0.self_attn.q_a_proj.weight``), and the mixture that transformers saves
(``model.layers.0.attn.wq_a.weight``). The last are the ones written here; `RENAMES` turns the others into them.
"""

from __future__ import annotations

from mindformers_ext.models.config import MoEConfig, SparseAttentionConfig, TransformerConfig
from mindformers_ext.models.families.blocks import decoder_layout
from mindformers_ext.models.transforms import copied, expert_down, expert_gate_up, interleaved_gate_up
from mindformers_ext.models.weights import WeightLayout, WeightMapping

_SKIPPABLE = ((r"(model\.)?mtp\..*", "multi-token prediction, which is not used here"),)

RENAMES = (
    (r"^embed\.weight$", "model.embed_tokens.weight"),
    (r"^norm\.weight$", "model.norm.weight"),
    (r"^lm_head\.weight$", "head.weight"),
    (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.self_attn\.", ".attn."),
    (r"^(model\.layers\.\d+)\.mlp\.", r"\1.ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.position_bias$", ".ape"),
    (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.attn\.([qo])_([ab])_proj\.", r".attn.w\1_\2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.kv_norm\.", ".norm."),
    (r"\.ffn\.gate\.e_score_correction_bias$", ".ffn.gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
)


def weight_layout(config: TransformerConfig) -> WeightLayout:
    """Returns the layout of a DeepSeek-V4 checkpoint.

    Raises:
        ValueError: the configuration lacks a group of options of the family.
    """
    layout = decoder_layout(config, _layer, _SKIPPABLE, RENAMES, head="head.weight")
    streams = _streams(config)
    ours, theirs = "decoder.hc_head.hc_", "model.hc_head.hc_"
    head = [
        copied(f"{ours}fn.weight", f"{theirs}fn", streams, streams * config.hidden_size, keep_float32=True),
        copied(f"{ours}base", f"{theirs}base", streams, keep_float32=True),
        copied(f"{ours}scale", f"{theirs}scale", 1, keep_float32=True),
    ]
    return WeightLayout((*layout.mappings, *head), layout.skippable, layout.copies, layout.renames)


def _streams(config: TransformerConfig) -> int:
    if config.hyper_connections is None:
        raise ValueError("model: deepseek_v4 needs hyper_connections")
    return config.hyper_connections.num_residual_streams


def _layer(config: TransformerConfig, index: int, ours: str, theirs: str) -> list[WeightMapping]:
    if config.sparse_attention is None or config.moe is None:
        raise ValueError("model: deepseek_v4 needs sparse_attention and moe")
    hidden, streams = config.hidden_size, _streams(config)
    kind, hashed = config.layer_types[index], config.mlp_layer_types[index] == "hash_moe"
    mappings = [
        copied(f"{ours}input_layernorm.weight", f"{theirs}attn_norm.weight", hidden, keep_float32=True),
        *_attention(config, config.sparse_attention, kind, f"{ours}self_attention.", f"{theirs}attn."),
        copied(f"{ours}pre_mlp_layernorm.weight", f"{theirs}ffn_norm.weight", hidden, keep_float32=True),
        *_experts(config, config.moe, hashed, f"{ours}mlp.", f"{theirs}ffn."),
    ]
    weights = (2 + streams) * streams
    for part in ("attn", "ffn"):
        mine, name = f"{ours}{part}_hc.", f"{theirs}hc_{part}_"
        mappings += [
            copied(f"{mine}mapping_proj.weight", f"{name}fn", weights, streams * hidden, keep_float32=True),
            copied(f"{mine}alpha", f"{name}scale", 3, keep_float32=True),
            copied(f"{mine}bias", f"{name}base", weights, keep_float32=True),
        ]
    return mappings


def _attention(
    config: TransformerConfig, sparse: SparseAttentionConfig, kind: str, ours: str, theirs: str
) -> list[WeightMapping]:
    hidden, dim, heads = config.hidden_size, config.kv_channels, config.num_attention_heads
    latent, output = sparse.q_lora_rank, sparse.o_groups * sparse.o_lora_rank
    core = f"{ours}core_attention."
    mappings = [
        copied(f"{ours}linear_q_down_proj.weight", f"{theirs}wq_a.weight", latent, hidden),
        copied(f"{ours}q_layernorm.weight", f"{theirs}q_norm.weight", latent, keep_float32=True),
        copied(f"{ours}linear_q_up_proj.weight", f"{theirs}wq_b.weight", heads * dim, latent),
        copied(f"{ours}linear_kv_proj.weight", f"{theirs}wkv.weight", dim, hidden),
        copied(f"{ours}kv_layernorm.weight", f"{theirs}norm.weight", dim, keep_float32=True),
        copied(f"{core}attn_sink", f"{theirs}attn_sink", heads, keep_float32=True),
        copied(f"{ours}linear_o_group_proj", f"{theirs}wo_a.weight", output, heads * dim // sparse.o_groups),
        copied(f"{ours}linear_proj.weight", f"{theirs}wo_b.weight", hidden, output),
    ]
    if kind == "heavily_compressed_attention":
        mappings += _compressor(hidden, dim, sparse.hca_compress_rate, 1, f"{core}compressor.", f"{theirs}compressor.")
    if kind == "compressed_sparse_attention":
        rate, index_dim, index_heads = (
            sparse.csa_compress_rate,
            sparse.dsa_indexer_head_dim,
            sparse.dsa_indexer_n_heads,
        )
        mine, name = f"{core}indexer.", f"{theirs}indexer."
        mappings += [
            *_compressor(hidden, dim, rate, 2, f"{core}compressor.", f"{theirs}compressor."),
            *_compressor(hidden, index_dim, rate, 2, f"{mine}compressor.", f"{name}compressor."),
            copied(f"{mine}linear_wq_b.weight", f"{name}wq_b.weight", index_heads * index_dim, latent),
            copied(f"{mine}linear_weights_proj.weight", f"{name}weights_proj.weight", index_heads, hidden),
        ]
    return mappings


def _compressor(hidden: int, dim: int, rate: int, series: int, ours: str, theirs: str) -> list[WeightMapping]:
    return [
        copied(f"{ours}linear_wkv.weight", f"{theirs}wkv.weight", series * dim, hidden),
        copied(f"{ours}linear_wgate.weight", f"{theirs}wgate.weight", series * dim, hidden),
        copied(f"{ours}ape", f"{theirs}ape", rate, series * dim, keep_float32=True),
        copied(f"{ours}norm.weight", f"{theirs}norm.weight", dim, keep_float32=True),
    ]


def _experts(config: TransformerConfig, moe: MoEConfig, hashed: bool, ours: str, theirs: str) -> list[WeightMapping]:
    count, hidden, ffn = moe.num_moe_experts, config.hidden_size, moe.moe_ffn_hidden_size
    single, stacked, shared = f"{theirs}experts.{{e}}.", f"{theirs}experts.", f"{theirs}shared_experts."
    gate_up = (f"{single}w1.weight", f"{single}w3.weight")
    mappings = [
        copied(f"{ours}router.weight", f"{theirs}gate.weight", count, hidden),
        expert_gate_up(f"{ours}experts.weight1", gate_up, f"{stacked}gate_up_proj", count, hidden, ffn),
        expert_down(f"{ours}experts.weight2", f"{single}w2.weight", f"{stacked}down_proj", count, hidden, ffn),
    ]
    if hashed:
        table = (config.vocab_size, moe.moe_router_topk)
        mappings.append(copied(f"{ours}router.tid2eid", f"{theirs}gate.tid2eid", *table, dtype="int32", num_ids=count))
    elif moe.moe_router_enable_expert_bias:
        mappings.append(copied(f"{ours}expert_bias", f"{theirs}gate.bias", count, keep_float32=True))
    width, mine = moe.moe_shared_expert_intermediate_size, f"{ours}shared_experts."
    mappings += [
        interleaved_gate_up(f"{mine}linear_fc1.weight", (f"{shared}w1.weight", f"{shared}w3.weight"), width, (hidden,)),
        copied(f"{mine}linear_fc2.weight", f"{shared}w2.weight", hidden, width),
    ]
    return mappings

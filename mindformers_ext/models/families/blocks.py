"""Where the weights of blocks that families share lie in HuggingFace checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from mindformers_ext.models.config import MoEConfig, TransformerConfig
from mindformers_ext.models.transforms import copied, expert_down, expert_gate_up, fused_qkv, interleaved_gate_up
from mindformers_ext.models.weights import WeightLayout, WeightMapping

# Given the configuration, a layer's index, and the names before its own in our checkpoints and in HuggingFace's.
LayerMappings = Callable[[TransformerConfig, int, str, str], list[WeightMapping]]

INVERSE_FREQUENCIES = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "computed from the configuration")


def decoder_layout(
    config: TransformerConfig,
    layer_mappings: LayerMappings,
    skippable: tuple[tuple[str, str], ...] = (INVERSE_FREQUENCIES,),
    renames: tuple[tuple[str, str], ...] = (),
    head: str = "lm_head.weight",
) -> WeightLayout:
    """Returns the layout of embedding, layers, final norm and head.

    Args:
        config: of the model.
        layer_mappings: the parameters of one layer.
        skippable: see `WeightLayout`.
        renames: see `WeightLayout`.
        head: what HuggingFace calls the weight of the head.
    """
    hidden = config.hidden_size
    mappings = [
        copied("embedding.word_embeddings.weight", "model.embed_tokens.weight", config.vocab_size, hidden),
    ]
    for index in range(config.num_layers):
        mappings += layer_mappings(config, index, f"decoder.layers.{index}.", f"model.layers.{index}.")
    mappings.append(copied("decoder.final_layernorm.weight", "model.norm.weight", hidden))
    copies: tuple[tuple[str, str], ...] = ()
    if config.tie_word_embeddings:
        # A tied checkpoint that was saved under pipeline parallelism may hold the last stage's copy.
        embedding = mappings[0]
        copies = ((head, embedding.sources[0]), ("output_layer.weight", embedding.name))
    else:
        mappings.append(copied("output_layer.weight", head, config.vocab_size, hidden))
    return WeightLayout(tuple(mappings), skippable, copies, renames)


def checked_mlp_layer_types(types: tuple[str, ...], model_type: str) -> tuple[str, ...]:
    """Returns the types of MLPs of a family whose experts are chosen by scores alone.

    Raises:
        ValueError: another type.
    """
    for kind in types:
        if kind not in ("dense", "moe"):
            raise ValueError(f"model: mlp_layer_types: {kind!r} is not known for {model_type}; give dense or moe")
    return types


def layer_norms(config: TransformerConfig, ours: str, theirs: str) -> list[WeightMapping]:
    """Returns the norms before attention and MLP of a layer."""
    return [
        copied(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", config.hidden_size),
        copied(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", config.hidden_size),
    ]


def self_attention(config: TransformerConfig, ours: str, theirs: str) -> list[WeightMapping]:
    """Returns the parameters of grouped-query attention."""
    hidden, attention = config.hidden_size, f"{theirs}self_attn."
    groups, heads, dim = config.num_query_groups, config.heads_per_group, config.kv_channels

    def qkv(kind: str, *columns: int) -> WeightMapping:
        q, k, v = (f"{attention}{part}_proj.{kind}" for part in "qkv")
        name, gated = f"{ours}self_attention.linear_qkv.{kind}", config.attention_output_gate
        return fused_qkv(name, (q, k, v), groups, heads, dim, columns, gated)

    proj = f"{ours}self_attention.linear_proj."
    mappings = [
        qkv("weight", hidden),
        copied(f"{proj}weight", f"{attention}o_proj.weight", hidden, groups * heads * dim),
    ]
    if config.add_qkv_bias:
        mappings.append(qkv("bias"))
    if config.add_proj_bias:
        mappings.append(copied(f"{proj}bias", f"{attention}o_proj.bias", hidden))
    if config.qk_layernorm:
        for part in "qk":
            name = f"{ours}self_attention.{part}_layernorm.weight"
            mappings.append(copied(name, f"{attention}{part}_norm.weight", dim))
    return mappings


def mlp(config: TransformerConfig, ours: str, theirs: str, width: int) -> list[WeightMapping]:
    """Returns the parameters of a gated MLP.

    Args:
        config: of the model.
        ours: name of the block in our checkpoints, e.g. ``decoder.layers.0.mlp.``.
        theirs: its name in HuggingFace's, e.g. ``model.layers.0.mlp.``.
        width: size between its projections.
    """
    hidden = config.hidden_size

    def gate_up(kind: str, *columns: int) -> WeightMapping:
        sources = (f"{theirs}gate_proj.{kind}", f"{theirs}up_proj.{kind}")
        return interleaved_gate_up(f"{ours}linear_fc1.{kind}", sources, width, columns)

    fc2 = f"{ours}linear_fc2."
    mappings = [gate_up("weight", hidden), copied(f"{fc2}weight", f"{theirs}down_proj.weight", hidden, width)]
    if config.add_mlp_bias:
        mappings += [gate_up("bias"), copied(f"{fc2}bias", f"{theirs}down_proj.bias", hidden)]
    return mappings


def moe(config: TransformerConfig, moe_config: MoEConfig, ours: str, theirs: str, shared: str) -> list[WeightMapping]:
    """Returns the parameters of a mixture of experts.

    Args:
        config: of the model.
        moe_config: its experts.
        ours: name of the block in our checkpoints, e.g. ``decoder.layers.0.mlp.``.
        theirs: its name in HuggingFace's, e.g. ``model.layers.0.mlp.``.
        shared: what HuggingFace calls the shared expert.
    """
    count, hidden, ffn = moe_config.num_moe_experts, config.hidden_size, moe_config.moe_ffn_hidden_size
    single, stacked = f"{theirs}experts.{{e}}.", f"{theirs}experts."
    gate_up = (f"{single}gate_proj.weight", f"{single}up_proj.weight")
    mappings = [
        copied(f"{ours}router.weight", f"{theirs}gate.weight", count, hidden),
        expert_gate_up(f"{ours}experts.weight1", gate_up, f"{stacked}gate_up_proj", count, hidden, ffn),
        expert_down(f"{ours}experts.weight2", f"{single}down_proj.weight", f"{stacked}down_proj", count, hidden, ffn),
    ]
    if moe_config.moe_router_enable_expert_bias:
        bias = f"{theirs}gate.e_score_correction_bias"
        mappings.append(copied(f"{ours}expert_bias", bias, count, keep_float32=True))
    width = moe_config.moe_shared_expert_intermediate_size
    if width:
        mappings += mlp(config, f"{ours}shared_experts.", f"{theirs}{shared}.", width)
    if moe_config.use_shared_expert_gating:
        gate = f"{ours}shared_experts.shared_experts_gate.weight"
        mappings.append(copied(gate, f"{theirs}{shared}_gate.weight", 1, hidden))
    return mappings

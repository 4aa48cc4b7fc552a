"""The configuration of a model, in MindSpore Transformers' names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
_OR_ZERO = {"minimum": 0}  # for fields in which 0 means that there is none


@dataclass(frozen=True)
class RopeParameters:
    """Rotary position embedding.

    Attributes:
        rope_type: ``default``, ``linear``, ``llama3`` or ``yarn``.
        theta: base of the wavelengths.
        scaling: further parameters of the type, in transformers' names (``factor``,
            ``original_max_position_embeddings``, ``beta_fast``, ...).
    """

    rope_type: str = "default"
    theta: float = 10000.0
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts.

    Attributes:
        num_moe_experts: routed experts E.
        moe_router_topk: experts of one token.
        moe_ffn_hidden_size: width of one expert.
        moe_router_score_function: from router logits to scores: ``softmax``, ``sigmoid`` or ``sqrtsoftplus``.
        norm_topk_prob: the weights of a token's experts are divided by their sum.
        moe_router_topk_scaling_factor: factor of these weights.
        moe_router_enable_expert_bias: a bias an expert counts in the choice, not in the weight.
        moe_router_num_groups: groups of experts, 1 for none.
        moe_router_group_topk: groups from which a token may choose.
        moe_shared_expert_intermediate_size: width of the shared expert, 0 for none.
        use_shared_expert_gating: the shared expert's output has a sigmoid gate.
    """

    num_moe_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_router_score_function: str = "softmax"
    norm_topk_prob: bool = True
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int = 1
    moe_router_group_topk: int = 1
    moe_shared_expert_intermediate_size: int = field(default=0, metadata=_OR_ZERO)
    use_shared_expert_gating: bool = False

    def __post_init__(self) -> None:
        if self.moe_router_score_function not in SCORE_FUNCTIONS:
            raise ValueError(
                f"model: scoring function {self.moe_router_score_function!r} is not supported; known are "
                f"{', '.join(SCORE_FUNCTIONS)}"
            )
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if self.num_moe_experts % groups or chosen > groups:
            raise ValueError(
                f"model: {self.num_moe_experts} experts cannot be routed in {chosen} of {groups} groups: the number "
                "of groups must divide that of experts and topk_group must not exceed it"
            )
        most = self.num_moe_experts // groups * chosen
        if self.moe_router_topk > most:
            raise ValueError(
                f"model: num_experts_per_tok ({self.moe_router_topk}) must not exceed the {most} experts "
                "that a token can choose from"
            )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        kv_lora_rank: size of the latent of keys and values.
        qk_head_dim: part of a query or key head without positions.
        qk_pos_emb_head_dim: part of a query or key head with rotary positions.
        v_head_dim: size of a value head.
        q_lora_rank: size of the latent of queries, 0 for a direct projection.
        rope_interleave: rotary pairs are neighbours ``(x[2i], x[2i+1])`` in the stored weights.
    """

    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    q_lora_rank: int = field(default=0, metadata=_OR_ZERO)
    rope_interleave: bool = True


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated delta net layers (Yang et al., arXiv 2412.06464).

    Attributes:
        linear_num_key_heads: query and key heads.
        linear_num_value_heads: value heads, a multiple of the key heads.
        linear_key_head_dim: size of a query or key head.
        linear_value_head_dim: size of a value head.
        linear_conv_kernel_dim: width of the causal convolution.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4

    @property
    def key_size(self) -> int:
        """Size of the keys of all heads, and of the queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Size of the values of all heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def __post_init__(self) -> None:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"model: linear_num_value_heads ({self.linear_num_value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.linear_num_key_heads})"
            )


@dataclass(frozen=True)
class SparseAttentionConfig:
    """Sliding-window attention beside compressed blocks (DeepSeek-V4).

    Attributes:
        q_lora_rank: size of the latent of queries.
        qk_pos_emb_head_dim: trailing part of a head with rotary positions.
        o_groups: groups of heads in the output projection.
        o_lora_rank: size of a group's intermediate output.
        csa_window_size: tokens that a token sees uncompressed, itself included.
        csa_compress_rate: tokens of a block in compressed sparse attention.
        hca_compress_rate: tokens of a block in heavily compressed attention.
        compress_rope: rotary position embedding of layers with blocks.
        dsa_indexer_n_heads: heads of the indexer.
        dsa_indexer_head_dim: size of a head of the indexer.
        dsa_indexer_topk: blocks that the indexer chooses for a token.
    """

    q_lora_rank: int = field(metadata=_OR_ZERO)
    qk_pos_emb_head_dim: int
    o_groups: int
    o_lora_rank: int
    csa_window_size: int
    csa_compress_rate: int
    hca_compress_rate: int
    dsa_indexer_n_heads: int
    dsa_indexer_head_dim: int
    dsa_indexer_topk: int
    compress_rope: RopeParameters = field(default_factory=RopeParameters)


@dataclass(frozen=True)
class HyperConnectionConfig:
    """Manifold-constrained hyper-connections: several residual streams that are mixed at every block.

    Attributes:
        num_residual_streams: streams n.
        mhc_sinkhorn_iterations: iterations that make the mixing matrix doubly stochastic.
        mhc_layernorm_epsilon: added to the weights of the mixing.
    """

    num_residual_streams: int
    mhc_sinkhorn_iterations: int = 20
    mhc_layernorm_epsilon: float = 1e-6


@dataclass(frozen=True)
class TransformerConfig:
    """Shape and options of a decoder-only transformer.

    Attributes:
        model_type: name of the family, e.g. ``qwen3``.
        architectures: class name in HuggingFace's ``config.json``, e.g. ``Qwen3ForCausalLM``.
        vocab_size: rows of the embedding; may exceed the tokenizer's vocabulary.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_attention_heads: query heads.
        num_query_groups: key-value heads; divides ``num_attention_heads``.
        kv_channels: size of one head.
        ffn_hidden_size: width of the dense MLPs; 0 if every layer is a mixture of experts.
        max_position_embeddings: longest sequence that the model was made for.
        layernorm_epsilon: epsilon of every RMS norm.
        rope: rotary position embedding.
        add_qkv_bias: bias on the query, key and value projections.
        add_proj_bias: bias on the attention's output projection.
        add_mlp_bias: bias on the projections of the MLP.
        qk_layernorm: RMS norm on every query and key head.
        tie_word_embeddings: the head shares the embedding's weight.
        init_method_std: standard deviation of initial weights.
        seq_length: longest sequence of this run in training and prediction; at most
            ``max_position_embeddings``.
        partial_rotary_factor: part of a head that is rotated.
        attention_output_gate: the query projection also gives a sigmoid gate of the attention's output.
        layernorm_zero_centered_gamma: RMS norms multiply by 1 + weight.
        activation_func_clamp_value: bound of gate and up in the MLPs, 0 for none.
        layer_types: kind of attention of each layer; ``full_attention`` for all if empty.
        mlp_layer_types: ``dense``, ``moe`` or ``hash_moe`` of each layer; ``dense`` for all if empty.
        moe: mixture of experts, if the family has it; so the next.
        mla: multi-head latent attention.
        delta_net: gated delta net layers.
        sparse_attention: windows and compressed blocks.
        hyper_connections: several residual streams.
    """

    model_type: str
    architectures: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int = field(metadata=_OR_ZERO)
    max_position_embeddings: int
    layernorm_epsilon: float = 1e-6
    rope: RopeParameters = field(default_factory=RopeParameters)
    add_qkv_bias: bool = False
    add_proj_bias: bool = False
    add_mlp_bias: bool = False
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False
    init_method_std: float = 0.02
    seq_length: int = field(default=0, metadata=_OR_ZERO)
    partial_rotary_factor: float = 1.0
    attention_output_gate: bool = False
    layernorm_zero_centered_gamma: bool = False
    activation_func_clamp_value: float = field(default=0.0, metadata=_OR_ZERO)
    layer_types: tuple[str, ...] = ()
    mlp_layer_types: tuple[str, ...] = ()
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    delta_net: DeltaNetConfig | None = None
    sparse_attention: SparseAttentionConfig | None = None
    hyper_connections: HyperConnectionConfig | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("seq_length", self.max_position_embeddings),
            ("layer_types", ("full_attention",) * self.num_layers),
            ("mlp_layer_types", ("dense",) * self.num_layers),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        for entry in fields(self):
            if entry.name not in GROUPS:
                value = checked_value(entry.name, getattr(self, entry.name), f"model: {entry.name}")
                object.__setattr__(self, entry.name, value)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"model: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_query_groups})"
            )
        if self.rotary_dim % 2:
            raise ValueError(f"model: head_dim must be even for rotary embeddings, not {self.rotary_dim}")
        for name in ("layer_types", "mlp_layer_types"):
            count = len(getattr(self, name))
            if count != self.num_layers:
                raise ValueError(f"model: {name} has {count} entries for {self.num_layers} layers; give one a layer")
        if "dense" in self.mlp_layer_types and not self.ffn_hidden_size:
            raise ValueError("model: intermediate_size must be a positive integer where layers have a dense MLP, not 0")
        if self.seq_length > self.max_position_embeddings:
            raise ValueError(
                f"model: seq_length ({self.seq_length}) exceeds max_position_embeddings "
                f"({self.max_position_embeddings})"
            )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection, gates included."""
        queries = self.num_attention_heads * (2 if self.attention_output_gate else 1)
        return (queries + 2 * self.num_query_groups) * self.kv_channels

    def cache_width(self, layer_type: str = "full_attention") -> float:
        """Numbers by which the cache of a layer of a type grows with each token, in the mean."""
        sparse = self.sparse_attention
        if sparse is not None and layer_type == "compressed_sparse_attention":
            return (self.kv_channels + sparse.dsa_indexer_head_dim) / sparse.csa_compress_rate
        if sparse is not None and layer_type == "heavily_compressed_attention":
            return self.kv_channels / sparse.hca_compress_rate
        if layer_type != "full_attention":
            return 0.0
        if self.mla is not None:
            return self.mla.kv_lora_rank + self.mla.qk_pos_emb_head_dim
        return 2 * self.num_query_groups * self.kv_channels

    @property
    def rotary_dim(self) -> int:
        """Size of the part of a head that is rotated."""
        part = self.mla or self.sparse_attention
        return part.qk_pos_emb_head_dim if part else int(self.kv_channels * self.partial_rotary_factor)


GROUPS: dict[str, type] = {
    "moe": MoEConfig,
    "mla": MLAConfig,
    "delta_net": DeltaNetConfig,
    "sparse_attention": SparseAttentionConfig,
    "hyper_connections": HyperConnectionConfig,
}
_FIELDS = {entry.name: entry for owner in (*GROUPS.values(), TransformerConfig) for entry in fields(owner)}
_OTHER_TYPES = {
    "bool": (bool, "true or false"),
    "str": (str, "text"),
    "RopeParameters": (RopeParameters, "RopeParameters"),
}


def checked_value(name: str, value: Any, shown: str) -> Any:
    """Checks a value against the type of a field of `TransformerConfig` or of one of its groups.

    Args:
        name: the field.
        value: what it was set to; a whole float may stand for an integer and an integer for a float.
        shown: how the message names the field: the source and the key that the user wrote.

    Returns:
        The value in the type of the field.

    Raises:
        ValueError: another type, or a number that is not positive.
    """
    entry = _FIELDS[name]
    kind = str(entry.type)  # as text: annotations are not evaluated
    if kind in ("int", "float"):
        return _checked_number(value, kind, entry.metadata.get("minimum", 1) == 0, shown)
    if kind == "tuple[str, ...]":
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{shown} must be a list of names, not {value!r}")
        return tuple(value)
    expected, text = _OTHER_TYPES[kind]
    if not isinstance(value, expected):
        raise ValueError(f"{shown} must be {text}, not {value!r}")
    return value


def _checked_number(value: Any, kind: str, zero_allowed: bool, shown: str) -> int | float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    whole = kind == "int"
    if not is_number or value < 0 or (value == 0 and not zero_allowed) or (whole and value != int(value)):
        sort = "integer" if whole else "number"
        raise ValueError(f"{shown} must be a positive {sort}, not {value!r}")
    return int(value) if whole else float(value)

"""How tensor and expert parallelism split the parameters of a model, and the sizes of what is left on a process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.parallel.plan import Block, FirstOnly, Plan, Rule, Shard, split_evenly

# Experts are split over the ranks of expert parallelism.
EXPERT_PLAN: Plan = (("*.mlp.experts.weight?", Shard(0)),)
_VOCABULARY: Plan = (
    ("embedding.word_embeddings.weight", Shard(0)),
    ("output_layer.weight", Shard(0)),
)


def tensor_plan(config: TransformerConfig) -> Plan:
    """Returns which parameter tensor parallelism splits how; what no rule names is copied.

    Projections into heads or into an MLP are split by rows, those back into the residual stream by columns; their
    products are summed over the processes (Megatron-LM, arXiv 1909.08053, section 3).
    """
    rules = [*_VOCABULARY, *_attention_plan(config), *_delta_net_plan(config), *_sparse_attention_plan(config)]
    for mlp in ("*.mlp.", "*.mlp.shared_experts."):
        rules += [
            (f"{mlp}linear_fc1.*", Shard(0, unit=2)),
            (f"{mlp}linear_fc2.weight", Shard(1)),
            (f"{mlp}linear_fc2.bias", FirstOnly()),
        ]
    if config.moe is not None:
        ffn = config.moe.moe_ffn_hidden_size
        rules += [
            ("*.mlp.experts.weight1", Shard(2, blocks=(Block(ffn), Block(ffn)))),
            ("*.mlp.experts.weight2", Shard(1)),
        ]
    return tuple(rules)


def _attention_plan(config: TransformerConfig) -> Plan:
    if config.sparse_attention is not None:
        return ()
    proj = ("*.self_attention.linear_proj.bias", FirstOnly())
    if config.mla is not None:
        mla = config.mla
        head = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        rules: list[tuple[str, Rule]] = [
            proj,
            ("*.self_attention.linear_qb.weight", Shard(0, unit=head)),
            ("*.self_attention.linear_kvb.weight", Shard(0, unit=mla.qk_head_dim + mla.v_head_dim)),
            ("*.self_attention.linear_proj.weight", Shard(1, unit=mla.v_head_dim)),
        ]
        if not mla.q_lora_rank:
            latents = Block(mla.kv_lora_rank + mla.qk_pos_emb_head_dim, unit=0)
            queries = Block(config.num_attention_heads * head, unit=head)
            rules.append(("*.self_attention.linear_qkv.*", Shard(0, blocks=(queries, latents))))
        return tuple(rules)
    dim, heads = config.kv_channels, config.heads_per_group
    query_rows = (Block(heads * dim, unit=dim),) * (2 if config.attention_output_gate else 1)
    fused = Shard(0, blocks=(*query_rows, Block(2 * dim, unit=0)), groups=config.num_query_groups)
    return (
        proj,
        ("*.self_attention.linear_qkv.*", fused),
        ("*.self_attention.linear_proj.weight", Shard(1, unit=dim)),
    )


def _delta_net_plan(config: TransformerConfig) -> Plan:
    sizes = config.delta_net
    if sizes is None:
        return ()
    heads = sizes.linear_num_value_heads
    keys = Block(sizes.linear_num_key_heads * sizes.linear_key_head_dim, unit=sizes.linear_key_head_dim, copied=True)
    values = Block(heads * sizes.linear_value_head_dim, unit=sizes.linear_value_head_dim)
    return (
        ("*.self_attention.in_proj.weight", Shard(0, blocks=(keys, keys, values, values, Block(heads), Block(heads)))),
        ("*.self_attention.conv1d.weight", Shard(0, blocks=(keys, keys, values))),
        ("*.self_attention.A_log", Shard(0)),
        ("*.self_attention.dt_bias", Shard(0)),
        ("*.self_attention.out_proj.weight", Shard(1, unit=sizes.linear_value_head_dim)),
    )


def _sparse_attention_plan(config: TransformerConfig) -> Plan:
    sizes = config.sparse_attention
    if sizes is None:
        return ()
    return (
        ("*.self_attention.linear_q_up_proj.weight", Shard(0, unit=config.kv_channels)),
        ("*.self_attention.core_attention.attn_sink", Shard(0)),
        ("*.self_attention.linear_o_group_proj", Shard(0, unit=sizes.o_lora_rank)),
        ("*.self_attention.linear_proj.weight", Shard(1, unit=sizes.o_lora_rank)),
    )


def tensor_parallel_sizes(config: TransformerConfig) -> list[int]:
    """Returns the degrees of tensor parallelism that a model allows."""
    return [size for size in range(1, config.num_attention_heads + 1) if _allows(config, size)]


def _allows(config: TransformerConfig, size: int) -> bool:
    heads, groups = config.num_attention_heads, config.num_query_groups
    if heads % size:
        return False
    if config.sparse_attention is not None:
        return config.sparse_attention.o_groups % size == 0
    if config.mla is None and groups % size and size % groups:
        return False
    if config.delta_net is not None:
        keys, values = config.delta_net.linear_num_key_heads, config.delta_net.linear_num_value_heads
        return values % size == 0 and (keys % size == 0 or size % keys == 0)
    return True


def check_tensor_parallel(config: TransformerConfig, size: int) -> None:
    """Refuses a degree of tensor parallelism that does not divide the model's heads.

    Raises:
        ValueError: lists the degrees that would do.
    """
    if not _allows(config, size):
        possible = ", ".join(map(str, tensor_parallel_sizes(config)))
        raise ValueError(
            f"parallelism: tensor_parallel {size} does not divide the {config.num_attention_heads} heads of this "
            f"{config.model_type}; possible are {possible}"
        )


def check_expert_parallel(config: TransformerConfig, size: int) -> None:
    """Refuses a degree of expert parallelism that does not divide the experts.

    Raises:
        ValueError: lists the degrees that would do.
    """
    if size == 1:
        return
    if config.moe is None:
        raise ValueError(f"parallelism: expert_parallel {size}: a {config.model_type} has no experts; set it to 1")
    count = config.moe.num_moe_experts
    if count % size:
        possible = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(
            f"parallelism: expert_parallel {size} does not divide the {count} experts; possible are {possible}"
        )


def check_context_parallel(local: TransformerConfig, size: int, ulysses: int) -> None:
    """Refuses to share sequences where a model's layers cannot.

    Args:
        local: sizes on one process of tensor parallelism.
        size: degree of context parallelism.
        ulysses: processes out of these that exchange heads.

    Raises:
        ValueError: says what would do.
    """
    if size == 1:
        return
    if local.sparse_attention is not None:
        raise ValueError(
            f"parallelism: context_parallel {size}: the compressed blocks of {local.model_type} cannot be shared by "
            "processes; set it to 1 and use tensor_parallel or pipeline_parallel"
        )
    if ulysses > 1 and local.mla is not None:
        raise ValueError(
            f"parallelism: context_parallel_method: the heads of this {local.model_type} share latents and cannot be "
            "exchanged; use colossal"
        )
    if not _exchanges_heads(local, ulysses):
        possible = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and _exchanges_heads(local, n))
        raise ValueError(
            f"parallelism: context_parallel_method: {ulysses} processes cannot exchange the "
            f"{local.num_attention_heads} heads, with {local.num_query_groups} key-value heads, that each of them has "
            f"of this {local.model_type}; use hybrid with a ulysses_degree_in_cp out of {possible}, or colossal"
        )


def _exchanges_heads(local: TransformerConfig, ulysses: int) -> bool:
    """Whether so many processes can have equally many heads each; a key-value head may be copied for its queries."""
    return local.heads_per_group % (ulysses // math.gcd(ulysses, local.num_query_groups)) == 0


def local_config(
    config: TransformerConfig, tp: int, tp_index: int, ep: int = 1, ep_index: int = 0
) -> TransformerConfig:
    """Returns the sizes of the blocks on one process: its heads, its part of the MLPs, its experts.

    Args:
        config: of the whole model.
        tp: processes of tensor parallelism, which `check_tensor_parallel` allows.
        tp_index: which of them.
        ep: processes of expert parallelism.
        ep_index: which of them.
    """
    if tp == ep == 1:
        return config
    first = tp_index == 0

    def part(size: int) -> int:
        begin, end = split_evenly(size, tp, tp_index)
        return end - begin

    changes: dict[str, Any] = {
        "num_attention_heads": config.num_attention_heads // tp,
        "num_query_groups": max(1, config.num_query_groups // tp),
        "ffn_hidden_size": part(config.ffn_hidden_size),
        "add_proj_bias": config.add_proj_bias and first,
    }
    if config.moe is not None:
        moe = config.moe
        changes["moe"] = replace(
            moe,
            moe_ffn_hidden_size=moe.moe_ffn_hidden_size if ep > 1 else part(moe.moe_ffn_hidden_size),
            moe_shared_expert_intermediate_size=part(moe.moe_shared_expert_intermediate_size),
        )
    if config.delta_net is not None:
        sizes = config.delta_net
        changes["delta_net"] = replace(
            sizes,
            linear_num_key_heads=max(1, sizes.linear_num_key_heads // tp),
            linear_num_value_heads=sizes.linear_num_value_heads // tp,
        )
    if config.sparse_attention is not None:
        changes["sparse_attention"] = replace(config.sparse_attention, o_groups=config.sparse_attention.o_groups // tp)
    return replace(config, **changes)

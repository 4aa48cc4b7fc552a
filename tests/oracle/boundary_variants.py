"""Configurations of the models that make_boundaries.py builds, and the lengths of their prompts."""

from transformers import DeepseekV3Config, DeepseekV4Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
DENSE = COMMON | {"intermediate_size": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Both leave some of 8 frequencies alone, divide some, and mix some.
YARN_DEFAULTS = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 4096}
YARN = YARN_DEFAULTS | {"original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
MLA = DENSE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
SPARSE = COMMON | {
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 16,
    "head_dim": 16,
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 8,  # with few heads many scores are exactly 0, and which of them are best is anyone's guess
    "index_head_dim": 8,
    "index_topk": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "partial_rotary_factor": 0.5,
}


# For layouts of up to 8 processes: as many heads and experts, few key-value heads, and odd sizes where they may be.
WIDE = {
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 303,  # that of the tests' tokenizer
}
WIDE_EXPERTS = EXPERTS | {"num_experts": 8, "moe_intermediate_size": 20}


def delta_net(ratio=2, **changes):
    """Keys of Qwen3.5 with so many value heads a key head."""
    return DELTA_NET | {"linear_num_value_heads": 2 * ratio} | changes


VARIANTS = {
    "llama": {
        "biases_tied": LlamaConfig(
            **DENSE | {"tie_word_embeddings": True}, head_dim=12, attention_bias=True, mlp_bias=True
        ),
        "llama3_rope": LlamaConfig(**DENSE | {"num_key_value_heads": 4}, head_dim=16, rope_parameters=LLAMA3),
        "yarn_one_group": LlamaConfig(**DENSE | {"num_key_value_heads": 1}, head_dim=16, rope_parameters=YARN),
        "linear_rope": LlamaConfig(
            **DENSE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
        ),
    },
    "qwen2": {
        "untied": Qwen2Config(**DENSE),
        "yarn_one_group": Qwen2Config(
            **DENSE | {"num_key_value_heads": 1, "num_attention_heads": 2}, rope_parameters=YARN_DEFAULTS
        ),
    },
    "qwen3": {
        "tied": Qwen3Config(**DENSE | {"tie_word_embeddings": True}, head_dim=12),
        "biases_yarn": Qwen3Config(
            **DENSE, head_dim=16, attention_bias=True, rope_parameters=YARN | {"attention_factor": 1.3}
        ),
        "eight_heads": Qwen3Config(**DENSE | WIDE | {"tie_word_embeddings": True, "intermediate_size": 44}, head_dim=8),
    },
    "qwen3_moe": {
        "unnormalised_mixed": Qwen3MoeConfig(
            **DENSE, head_dim=16, **EXPERTS, norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[1]
        ),
        "normalised_sparse_step": Qwen3MoeConfig(
            **DENSE, head_dim=12, **EXPERTS, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[]
        ),
        "one_expert_biases": Qwen3MoeConfig(
            **DENSE,
            head_dim=16,
            **EXPERTS | {"num_experts_per_tok": 1},
            norm_topk_prob=False,
            attention_bias=True,
            rope_parameters=YARN,
        ),
        "eight_heads": Qwen3MoeConfig(
            **DENSE | WIDE,
            head_dim=8,
            **WIDE_EXPERTS,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[2],
        ),
    },
    "qwen3_5": {
        "two_values_a_key": Qwen3_5TextConfig(**DENSE, **delta_net()),
        "one_value_a_key_tied": Qwen3_5TextConfig(
            **DENSE | {"tie_word_embeddings": True}, **delta_net(1, linear_conv_kernel_dim=2)
        ),
        "three_values_a_key": Qwen3_5TextConfig(
            **DENSE | {"num_key_value_heads": 1},
            **delta_net(
                3,
                linear_key_head_dim=16,
                linear_value_head_dim=12,
                linear_conv_kernel_dim=3,
                attention_bias=True,
                layer_types=["full_attention", "linear_attention", "linear_attention"],
                rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
            ),
        ),
        "eight_heads": Qwen3_5TextConfig(
            **DENSE | WIDE | {"intermediate_size": 44},
            **delta_net(4, layer_types=["linear_attention", "full_attention"] * 2),
        ),
    },
    "qwen3_5_moe": {
        "two_values_a_key": Qwen3_5MoeTextConfig(
            **COMMON, **delta_net(), **EXPERTS, shared_expert_intermediate_size=24
        ),
        "four_values_a_key_tied": Qwen3_5MoeTextConfig(
            **COMMON | {"tie_word_embeddings": True},
            **delta_net(4, linear_key_head_dim=4),
            **EXPERTS | {"num_experts_per_tok": 3},
            shared_expert_intermediate_size=16,
        ),
    },
    "deepseek_v3": {
        "groups": DeepseekV3Config(**MLA, routed_scaling_factor=2.5),
        "full_queries_halves": DeepseekV3Config(
            **MLA | {"q_lora_rank": None, "v_head_dim": 12, "n_shared_experts": 2},
            rope_interleave=False,
            routed_scaling_factor=1.0,
        ),
        "yarn_mscale": DeepseekV3Config(
            **MLA
            | {
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 0,
                "num_experts_per_tok": 3,
                "qk_rope_head_dim": 16,
            },
            norm_topk_prob=False,
            attention_bias=True,
            rope_parameters=YARN_DEFAULTS | {"mscale": 1.0, "mscale_all_dim": 0.7},
        ),
        "yarn_unequal_mscale_halves": DeepseekV3Config(
            **MLA | {"q_lora_rank": None, "first_k_dense_replace": 2, "qk_rope_head_dim": 16},
            rope_interleave=False,
            rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
        ),
        "eight_heads": DeepseekV3Config(
            **MLA | WIDE | {"num_key_value_heads": 8, "intermediate_size": 44, "moe_intermediate_size": 20},
            routed_scaling_factor=1.5,
        ),
    },
    "deepseek_v4": {
        "rates_4_8": DeepseekV4Config(**SPARSE),
        "rates_2_16_yarn": DeepseekV4Config(
            **SPARSE
            | {
                "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 16},
                "sliding_window": 5,
                "index_topk": 2,
                "hc_mult": 2,
                "hc_sinkhorn_iters": 3,
                "o_groups": 4,
                "head_dim": 32,
                "index_head_dim": 16,
                "compress_rope_theta": 1000.0,
            },
            rope_parameters={key: value for key, value in YARN.items() if key != "rope_theta"},
        ),
        "rates_5_3_clipped": DeepseekV4Config(
            **SPARSE
            | {
                "compress_rates": {"compressed_sparse_attention": 5, "heavily_compressed_attention": 3},
                "sliding_window": 16,
                "layer_types": [
                    "heavily_compressed_attention",
                    "heavily_compressed_attention",
                    "compressed_sparse_attention",
                    "sliding_attention",
                ],
                "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
                "o_groups": 1,
                "num_experts_per_tok": 1,
            },
            swiglu_limit=1.0,
            routed_scaling_factor=1.0,
        ),
        "eight_heads": DeepseekV4Config(
            **SPARSE
            | WIDE
            | {
                "num_hidden_layers": 6,
                "n_routed_experts": 8,
                "moe_intermediate_size": 20,
                "layer_types": [
                    *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention") * 2,
                ],
                "mlp_layer_types": ["hash_moe", *["moe"] * 5],
                "o_groups": 8,
            },
        ),
    },
}


def prompt_lengths(config):
    """Returns the prompt lengths around which something changes in a model."""
    lengths = {1, 2, 33, 70, 127}  # after 127 tokens the cache grows beyond its first 128 slots
    if config.model_type.startswith("qwen3_5"):
        kernel = config.linear_conv_kernel_dim
        lengths |= {*range(kernel - 1, kernel + 2), 63, 64, 65, 129}
    if config.model_type == "deepseek_v4":
        rates = config.compress_rates.values()
        edges = {config.sliding_window, *(rate * count for rate in rates for count in (1, 2, 3, 4))}
        lengths |= {edge + offset for edge in edges for offset in (-1, 0, 1)}
    return sorted(lengths)

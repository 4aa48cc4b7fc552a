"""DeepSeek-V4's configuration and weights in every form in which they are found."""

import json
import pathlib
import re

import numpy as np
import pytest

from mindformers_ext.checkpoint import load_weights
from mindformers_ext.checkpoint.tensor_file import TensorFile
from mindformers_ext.checkpoint.tensor_writer import TensorSpec, write_tensors
from mindformers_ext.models import check_described, hf_config, transformer_config, weight_layout
from mindformers_ext.models.config import RopeParameters
from mindformers_ext.models.rope import rotary_tables

FOLDER = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "deepseek_v4"
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

# The keys of the published DeepSeek-V4-Flash, with fewer layers.
PUBLISHED = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "num_hash_layers": 3,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
}


def fixture_config():
    return json.loads((FOLDER / "config.json").read_text())


def test_the_published_configuration_is_understood():
    config = transformer_config({}, PUBLISHED)
    assert config.layer_types == (SLIDING, SLIDING, SPARSE, HEAVY, SPARSE)
    assert config.mlp_layer_types == ("hash_moe",) * 3 + ("moe",) * 2
    assert (config.rotary_dim, config.kv_channels, config.activation_func_clamp_value) == (64, 512, 10.0)
    assert config.rope == RopeParameters("default", 10000.0)
    compress = config.sparse_attention.compress_rope
    assert (compress.rope_type, compress.theta, compress.scaling["factor"]) == ("yarn", 160000.0, 16)
    assert (config.moe.moe_shared_expert_intermediate_size, config.moe.moe_router_enable_expert_bias) == (2048, True)
    check_described(config)


def test_yarn_stretches_the_positions_of_blocks_without_a_factor():
    tables = rotary_tables(transformer_config({}, PUBLISHED))
    cos, _ = tables["compress"].lookup(np.zeros(1, np.int32))
    np.testing.assert_array_equal(cos, 1)
    cos, sin = tables["main"].lookup(np.array([1]))
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, :32], 10000.0 ** (-np.arange(32) / 32), rtol=1e-5)


def test_the_yaml_of_mindspore_transformers_gives_the_same_configuration():
    theirs = {
        "num_hash_layers": "moe_n_hash_layers",
        "sliding_window": "csa_window_size",
        "compress_ratios": "csa_compress_ratios",
        "compress_rope_theta": "csa_compress_rotary_base",
        "index_n_heads": "dsa_indexer_n_heads",
        "index_head_dim": "dsa_indexer_head_dim",
        "index_topk": "dsa_indexer_topk",
        "hc_mult": "num_residual_streams",
        "hc_sinkhorn_iters": "mhc_sinkhorn_iterations",
        "hc_eps": "mhc_layernorm_epsilon",
        "swiglu_limit": "activation_func_clamp_value",
        "num_nextn_predict_layers": "mtp_num_layers",
        "rope_theta": "rotary_base",
        "num_hidden_layers": "num_layers",
        "n_shared_experts": "shared_expert_num",
    }
    section = {
        theirs.get(key, key): value for key, value in PUBLISHED.items() if key not in ("head_dim", "rope_scaling")
    }
    section |= {"architectures": "DeepseekV4ForCausalLM", "qk_nope_head_dim": 448, "v_head_dim": 512}
    section |= {"position_embedding_type": "yarn", "rotary_scaling_factor": 16, "n_group": 0, "topk_group": 0}
    section |= {"original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    assert transformer_config(section) == transformer_config({}, PUBLISHED)


def test_the_yaml_wins_over_config_json():
    section = {"compress_ratios": [128, 4, 0, 0, 0], "rotary_scaling_factor": 8, "csa_window_size": 64}
    config = transformer_config(section, PUBLISHED)
    assert config.layer_types == (HEAVY, SPARSE, SLIDING, SLIDING, SLIDING)
    assert config.sparse_attention.csa_window_size == 64
    assert config.sparse_attention.compress_rope.scaling["factor"] == 8
    assert config.sparse_attention.compress_rope.scaling["beta_fast"] == 32


def test_other_rates_name_the_layers_of_their_ratios():
    keys = {"compress_ratios": [2, 0, 16, 2, 0], "compress_rates": {SPARSE: 2, HEAVY: 16}}
    config = transformer_config({}, PUBLISHED | keys)
    assert config.layer_types == (SPARSE, SLIDING, HEAVY, SPARSE, SLIDING)
    assert (config.sparse_attention.csa_compress_rate, config.sparse_attention.hca_compress_rate) == (2, 16)
    assert transformer_config({}, hf_config(config)) == config


def test_layers_without_a_list_follow_the_pattern_of_the_larger_model():
    keys = {key: value for key, value in PUBLISHED.items() if key not in ("compress_ratios", "num_hash_layers")}
    config = transformer_config({}, keys)
    assert config.layer_types == (HEAVY, HEAVY, HEAVY, SPARSE, HEAVY)
    assert config.mlp_layer_types == ("hash_moe",) * 3 + ("moe",) * 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"compress_ratios": [0, 0, 4, 64, 4]}, "config.json: compress_ratios must be a list of 0, 4 and 128"),
        ({"compress_ratios": [[0], 0, 4, 128, 4]}, "config.json: compress_ratios must be a list of 0, 4 and 128"),
        ({"compress_ratios": [0, 4]}, "layer_types has 2 entries for 5 layers"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types: full_attention is not known for deepseek_v4"),
        (
            {"mlp_layer_types": ["dense"] * 5, "num_hash_layers": None},
            "mlp_layer_types: dense is not known for deepseek_v4",
        ),
        ({"compress_rates": {"sliding_attention": 3}}, "compress_rates must be a mapping with the keys"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must be 1 for deepseek_v4, not 4"),
        ({"v_head_dim": 128}, "head_dim, v_head_dim and qk_nope_head_dim .* must be equal .* not 128, 512"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .0.5. of head_dim .512. is not qk_rope_head_dim .64."),
        ({"n_shared_experts": 2}, "n_shared_experts: 2 is not supported for deepseek_v4; give 1"),
        ({"csa_window_size": 64}, "sliding_window .128. and csa_window_size .64. set the same thing"),
        ({"rope_scaling": {"rope_type": "yarn", "short_factor": 3}}, "short_factor"),
        (
            {"mlp_layer_types": ["moe"] * 5},
            "num_hash_layers .3. and mlp_layer_types .moe, moe, moe, moe, moe. disagree",
        ),
        ({"num_hash_layers": -1}, "num_hash_layers must be a whole number of at least 0, not -1"),
        ({"compress_rope_theta": "big"}, "compress_rope_theta must be a positive number, not 'big'"),
    ],
)
def test_mistakes_are_refused_with_their_key(keys, message):
    with pytest.raises(ValueError, match=message):
        transformer_config({}, PUBLISHED | keys)


def test_heads_that_do_not_divide_into_groups_are_refused():
    from mindformers_ext.models.gpt_model import GPTModel

    with pytest.raises(ValueError, match="num_attention_heads .4. must be a multiple of o_groups .3."):
        GPTModel(transformer_config({"o_groups": 3}, fixture_config()))


def original(name):
    """The published name of a tensor that transformers saved."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.")
    name = re.sub(r"^hc_head\.hc_", "hc_head_", name)
    return name.replace(".attn.norm.", ".attn.kv_norm.")


# What transformers calls its modules' parameters, by what it saves.
_MODULES = [
    ("head.", "lm_head."), (".attn.indexer.compressor.", ".attn.compressor.indexer."),
    (".attn.indexer.wq_b.", ".attn.compressor.indexer.q_b_proj."),
    (".attn.indexer.weights_proj.", ".attn.compressor.indexer.scorer.weights_proj."),
    (".wkv.", ".kv_proj."), (".wgate.", ".gate_proj."), (".ape", ".position_bias"), (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."), (".wo_a.", ".o_a_proj."), (".wo_b.", ".o_b_proj."), (".q_norm.", ".q_a_norm."),
    (".attn_sink", ".sinks"), (".attn_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."), (".gate.bias", ".gate.e_score_correction_bias"),
    (".shared_experts.w1.", ".shared_experts.gate_proj."), (".shared_experts.w2.", ".shared_experts.down_proj."),
    (".shared_experts.w3.", ".shared_experts.up_proj."), (".attn.", ".self_attn."), (".ffn.", ".mlp."),
]  # fmt: skip


def in_memory(tensors):
    """The parameters of transformers' model, with the experts of a layer in one."""
    result, parts = {}, {}
    for name, values in tensors.items():
        found = re.fullmatch(r"(model\.layers\.\d+\.)ffn\.experts\.(\d+)\.w([123])\.weight", name)
        if found:
            parts.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = values
            continue
        if re.search(r"(attn|compressor)\.norm\.", name):
            name = name.replace(".norm.", ".kv_norm.")
        for saved, module in _MODULES:
            name = module + name.removeprefix(saved) if saved == "head." and name.startswith(saved) else name
            name = name.replace(saved, module) if saved != "head." else name
        result[name] = values
    for layer, kinds in parts.items():
        gate, down, up = ([kinds[kind][number] for number in sorted(kinds[kind])] for kind in "123")
        result[f"{layer}mlp.experts.gate_up_proj"] = np.concatenate([np.stack(gate), np.stack(up)], 1)
        result[f"{layer}mlp.experts.down_proj"] = np.stack(down)
    return result


def saved_tensors():
    with TensorFile(FOLDER / "model.safetensors") as file:
        return {name: tensor.read() for name, tensor in file.tensors.items()}


def parameters(folder):
    arrays = {}
    report = load_weights(folder, weight_layout(transformer_config({}, fixture_config())), arrays.__setitem__)
    return arrays, report


@pytest.mark.parametrize("form", ["original", "in memory"])
def test_weights_load_under_the_names_of_every_release(form, tmp_path):
    tensors = saved_tensors()
    if form == "original":
        named = {original(name): values for name, values in tensors.items()}
        assert {"embed.weight", "norm.weight", "head.weight", "hc_head_base"} < set(named)
        assert "layers.2.attn.kv_norm.weight" in named
    else:
        named = in_memory(tensors)
        assert {"model.layers.0.self_attn.q_a_proj.weight", "lm_head.weight", "model.layers.0.mlp.gate.tid2eid"} < set(
            named
        )
    named["mtp.0.e_proj.weight"] = np.ones((2, 2), np.float32)
    specs = [TensorSpec(name, values.dtype.name, values.shape) for name, values in named.items()]
    write_tensors(tmp_path / "model.safetensors", specs, named.__getitem__, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(fixture_config()))
    loaded, report = parameters(tmp_path)
    assert [name for name, _, _ in report.skipped] == ["mtp.0.e_proj.weight"]
    expected, _ = parameters(FOLDER)
    assert loaded.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(loaded[name], values, err_msg=name)
    assert loaded["decoder.layers.0.mlp.router.tid2eid"].dtype == np.int32


def test_the_table_of_experts_names_experts_of_the_model():
    mappings = weight_layout(transformer_config({}, fixture_config())).mappings
    limits = {mapping.name: mapping.num_ids for mapping in mappings if mapping.dtype == "int32"}
    assert limits == {"decoder.layers.0.mlp.router.tid2eid": fixture_config()["n_routed_experts"]}

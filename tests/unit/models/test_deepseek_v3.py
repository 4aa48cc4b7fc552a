"""DeepSeek-V3: its configuration under all names, its weights both ways, and the options of latent attention."""

import functools
import json
import pathlib

import numpy as np
import pytest
from mindspore import Tensor
from safetensors.numpy import load_file, save_file

from mindformers_ext.checkpoint import CheckpointError, load_weights, save_checkpoint, save_hf_checkpoint
from mindformers_ext.generate import GenerationConfig, generate_rows
from mindformers_ext.models import hf_config, transformer_config
from mindformers_ext.models.config import MLAConfig, MoEConfig, RopeParameters
from mindformers_ext.models.gpt_model import GPTModel
from mindformers_ext.models.latent_attention import LatentState
from mindformers_ext.ops import native

DATA = pathlib.Path(__file__).parents[2] / "data"
CHECKPOINT = DATA / "checkpoints" / "deepseek_v3"
VARIANTS = sorted(folder.name for folder in (DATA / "deepseek_v3").iterdir())
FOLDERS = [CHECKPOINT, *(DATA / "deepseek_v3" / name for name in VARIANTS)]

# config.json of deepseek-ai/DeepSeek-V3 and R1.
PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

# The model section of MindSpore Transformers' pretrain_deepseek3_1b_8p_pynative.yaml, and some of its targets' names.
YAML = {
    "model_type": "deepseek_v3",
    "architectures": "DeepseekV3ForCausalLM",
    "vocab_size": 129280,
    "seq_length": 4096,
    "hidden_size": 1792,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 163840,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 192,
    "multi_latent_attention": True,
    "mla_qkv_concat": True,
    "qk_layernorm": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "params_dtype": "bfloat16",
    "compute_dtype": "bfloat16",
    "initializer_range": 0.01,
    "num_nextn_predict_layers": 1,
    "mtp_loss_scaling_factor": 0.3,
    "position_embedding_type": "yarn",
    "scaling_factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 1e4,
    "router_dense_type": "float32",
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_aux_loss_coeff": 0.001,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.001,
    "use_pad_tokens": True,
    "n_group": 4,
    "topk_group": 2,
}
TARGETS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "n_routed_experts": "num_moe_experts",
    "n_shared_experts": "shared_expert_num",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "scaling_factor": "rotary_scaling_factor",
    "rope_theta": "rotary_base",
    "router_dense_type": "moe_router_dtype",
}


def build(folder):
    model = GPTModel(transformer_config({}, json.loads((folder / "config.json").read_text())))
    load_weights(folder, model.weight_layout(), model.set_weight)
    model.set_train(False)
    return model


@functools.cache
def variant(name):
    folder = DATA / "deepseek_v3" / name
    return build(folder), json.loads((folder / "reference.json").read_text())["cases"]


def test_the_published_config_json_maps_field_by_field():
    config = transformer_config({}, PUBLISHED)
    assert (config.num_layers, config.num_attention_heads, config.kv_channels) == (61, 128, 192)
    assert config.mlp_layer_types == ("dense",) * 3 + ("moe",) * 58
    assert config.mla == MLAConfig(512, 128, 64, 128, 1536, True)
    assert config.moe == MoEConfig(256, 8, 2048, "sigmoid", True, 2.5, True, 8, 4, 2048)
    scaling = {key: value for key, value in PUBLISHED["rope_scaling"].items() if key != "type"}
    assert config.rope == RopeParameters("yarn", 10000.0, scaling)
    assert (config.rotary_dim, config.cache_width()) == (64, 576)


def test_a_mindspore_transformers_yaml_means_the_same_under_the_names_of_its_targets(log):
    config = transformer_config(YAML)
    assert config == transformer_config({TARGETS.get(key, key): value for key, value in YAML.items()})
    assert config.mlp_layer_types == ("dense",) + ("moe",) * 15
    assert config.moe.moe_shared_expert_intermediate_size == 1024
    assert config.rope.scaling["factor"] == 40
    assert {record.getMessage() for record in log.records} == {
        "model: without effect here: compute_dtype, params_dtype"
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_config_json_survives_the_round_trip(folder):
    config = transformer_config({}, json.loads((folder / "config.json").read_text()))
    assert transformer_config({}, hf_config(config)) == config


def test_a_missing_query_latent_is_not_the_default_one():
    assert transformer_config({}, PUBLISHED | {"q_lora_rank": None}).mla.q_lora_rank == 0
    assert transformer_config({}, {k: v for k, v in PUBLISHED.items() if k != "q_lora_rank"}).mla.q_lora_rank == 1536
    assert transformer_config({"q_lora_rank": None}, PUBLISHED).mla.q_lora_rank == 0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, "ddmdm"),
        ({"moe_layer_freq": [0, 1, 0, 1, 1], "first_k_dense_replace": None}, "dmdmm"),
        ({"mlp_layer_types": ["moe", "dense", "moe", "moe", "dense"]}, "mdmmd"),
        ({"first_k_dense_replace": 9}, "ddddd"),
    ],
)
def test_dense_layers_are_named_in_several_ways(keys, expected):
    source = {key: value for key, value in PUBLISHED.items() if key not in keys}
    config = transformer_config({}, source | {"num_hidden_layers": 5} | keys)
    assert "".join(kind[0] for kind in config.mlp_layer_types) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
        ({"moe_router_score_function": "softmax"}, "moe_router_score_function: 'softmax' is not supported"),
        ({"qk_layernorm": False}, "qk_layernorm: False is not supported"),
        ({"mla_qkv_concat": False}, "mla_qkv_concat: False is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attention_bias": True, "q_lora_rank": None}, "attention_bias is not supported .* without q_lora_rank"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a number of layers, not -1"),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be a positive integer or a list"),
        ({"moe_layer_freq": [1, 0]}, "moe_layer_freq must hold one 0 or 1 for each of 61 layers"),
        ({"n_shared_experts": "one"}, "n_shared_experts must be a number of experts, not 'one'"),
        ({"n_shared_experts": 1, "shared_expert_num": 2}, r"n_shared_experts \(1\) and shared_expert_num \(2\) set"),
        ({"qk_nope_head_dim": 128, "qk_head_dim": 100}, "set the same thing"),
        ({"topk_group": 9}, "topk_group must not exceed it"),
    ],
)
def test_what_would_be_another_model_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(keys, PUBLISHED)


@pytest.mark.parametrize("kernels", ["C++", "numpy"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_option_of_latent_attention_equals_transformers(name, kernels, monkeypatch):
    if kernels == "numpy":
        monkeypatch.setattr(native, "available", lambda: False)
    model, cases = variant(name)
    for case in cases:
        logits = model(Tensor(np.array([case["input_ids"]], np.int32)))["logits"].asnumpy()[0, -1]
        np.testing.assert_allclose(logits, case["logits_last"], atol=1e-4)
    prompts, expected = [case["input_ids"] for case in cases], [case["greedy"] for case in cases]
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 3}):
        rows = generate_rows(model, prompts, GenerationConfig(max_new_tokens=16, **options))
        assert [row.token_ids for row in rows] == expected


def test_the_cache_holds_latents_and_no_keys_or_values():
    model, _ = variant("yarn")
    cache = model.new_cache(2, 64)
    model(Tensor(np.ones((2, 5), np.int32)), past_key_values=cache)
    mla = model.config.mla
    for state in cache:
        assert isinstance(state, LatentState)
        assert (state.length, state.latent.shape) == (5, (2, 1, 64, mla.kv_lora_rank + mla.qk_pos_emb_head_dim))
        assert state.nbytes == state.latent.size * 4


def parameters(model):
    return {name: parameter.asnumpy() for name, parameter in model.parameters_dict().items()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_weights_survive_both_forms_bit_by_bit(folder, tmp_path):
    model = build(folder)
    before = parameters(model)
    save_hf_checkpoint(tmp_path / "hf", model.weight_layout(), before.get, hf_config(model.config), "float32")
    save_checkpoint(tmp_path / "mf", 1, before, None, {"global_step": 1})
    assert_equal(parameters(build(tmp_path / "hf")), before)
    again = GPTModel(model.config)
    load_weights(tmp_path / "mf", again.weight_layout(), again.set_weight)
    assert_equal(parameters(again), before)
    # transformers stores the experts of a layer one by one, too, so that the tensors are the same.
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_layers_of_multi_token_prediction_are_passed_over_with_a_reason(tmp_path):
    model, _ = variant("yarn")
    tensors = load_file(DATA / "deepseek_v3" / "yarn" / "model.safetensors")
    added = {
        f"model.layers.{model.config.num_layers}.{name}": np.ones(3, np.float32)
        for name in ("eh_proj.weight", "enorm.weight", "mlp.experts.0.gate_proj.weight", "embed_tokens.weight")
    }
    save_file(tensors | added, tmp_path / "model.safetensors")
    loaded = {}
    report = load_weights(tmp_path, model.weight_layout(), loaded.__setitem__)
    assert {name for name, _, _ in report.skipped} == added.keys()
    assert "multi-token prediction" in report.summary() and "\n" not in report.summary()
    assert_equal(loaded, parameters(model))


def test_layers_of_multi_token_prediction_are_passed_over_in_mindformers_checkpoints(tmp_path):
    model, _ = variant("yarn")
    ours = parameters(model)
    added = {"mtp.layers.0.enorm.weight": np.ones(3, np.float32)}
    counts = {"decoder.layers.1.mlp.tokens_per_expert": np.ones(6, np.float32)}
    save_checkpoint(tmp_path, 1, ours | added | counts, None, {"global_step": 1})
    loaded = {}
    load_weights(tmp_path, model.weight_layout(), loaded.__setitem__)
    assert_equal(loaded, ours)


def test_a_layer_of_the_decoder_that_the_model_lacks_is_still_missed(tmp_path):
    tensors = load_file(DATA / "deepseek_v3" / "yarn" / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.ones(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"left over .* model.layers.1.self_attn.k_proj.weight"):
        load_weights(tmp_path, variant("yarn")[0].weight_layout(), lambda name, array: None)

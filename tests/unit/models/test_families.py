"""From config.json and YAML names to a model configuration."""

import json
import pathlib
from dataclasses import replace

import pytest

from mindformers_ext.models import hf_config, transformer_config
from mindformers_ext.models.config import RopeParameters

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_untied"])
def test_config_json_survives_the_round_trip(family):
    original = json.loads((CHECKPOINTS / family / "config.json").read_text())
    config = transformer_config({}, original)
    assert transformer_config({}, hf_config(config)) == config


def test_huggingface_and_mindformers_names_mean_the_same():
    renamed = {
        "model_type": "qwen3",
        "vocab_size": 32,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "max_position_embeddings": 64,
    }
    assert transformer_config(renamed) == transformer_config(SMALL)


def test_two_names_of_one_field_must_agree():
    with pytest.raises(ValueError, match=r"num_hidden_layers \(2\) and num_layers \(3\) set the same thing"):
        transformer_config(SMALL | {"num_layers": 3})


def test_yaml_wins_over_config_json():
    assert transformer_config({"rms_norm_eps": 1e-5}, SMALL).layernorm_epsilon == 1e-5


def test_unknown_family_lists_the_known_ones():
    with pytest.raises(ValueError, match="'mamba' is not a known family; known are .*llama .* qwen2 .* qwen3"):
        transformer_config({"model_type": "mamba"})


def test_family_is_found_by_architectures_alone():
    section = {key: value for key, value in SMALL.items() if key != "model_type"}
    assert transformer_config(section | {"architectures": ["Qwen2ForCausalLM"]}).model_type == "qwen2"
    with pytest.raises(ValueError, match="model_type is missing; known are"):
        transformer_config(section)


def test_missing_keys_are_named_as_the_user_would_write_them():
    section = {key: value for key, value in SMALL.items() if key not in ("intermediate_size", "vocab_size")}
    with pytest.raises(ValueError, match="missing for qwen3: vocab_size, intermediate_size"):
        transformer_config(section)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_options_that_would_change_results_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        transformer_config(SMALL | {key: value})


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("extra", [{}, {"scale_fmt": "ue8m0"}, {"scale_fmt": "float"}])
def test_weights_in_fp8_blocks_are_accepted_and_not_written_again(extra):
    config = transformer_config({}, SMALL | {"quantization_config": FP8 | extra})
    assert config == transformer_config(SMALL | {"quantization_config": None})
    assert "quantization_config" not in hf_config(config)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "quantization_config.quant_method 'gptq' is not supported; use weights in bfloat16"),
        ({"quant_method": "awq"}, "quant_method 'awq' is not supported"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({}, "quant_method None is not supported"),
        ("fp8", "quantization_config must be a mapping, not 'fp8'"),
        (FP8 | {"weight_block_size": None}, r"weight_block_size must be .* e.g. \[128, 128\], not None"),
        (FP8 | {"weight_block_size": [128, 0]}, r"weight_block_size must be .*, not \[128, 0\]"),
        (FP8 | {"scale_fmt": "e4m3"}, "scale_fmt 'e4m3' is not supported; known are float and ue8m0"),
    ],
)
def test_other_quantizations_are_refused_with_their_key(quantization, message):
    with pytest.raises(ValueError, match=message) as caught:
        transformer_config({}, SMALL | {"quantization_config": quantization})
    assert str(caught.value).startswith("config.json: quantization_config")


def test_keys_without_effect_are_named_in_one_warning(log):
    transformer_config(SMALL | {"offset": 0, "attention_dropout": 0.1, "compute_dtype": "bfloat16"})
    assert [(record.levelname, record.getMessage()) for record in log.records] == [
        ("WARNING", "model: without effect here: attention_dropout, compute_dtype, offset")
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("hiden_size", "hidden_size"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("Head-Dim", "head_dim"),
        ("rope_tetha", "rope_theta"),
        ("tie_word_embedding", "tie_word_embeddings"),
        ("use_sliding_windows", "use_sliding_window"),
        ("rotary_scaling_facter", "rotary_scaling_factor"),
    ],
)
def test_a_mistyped_key_of_the_yaml_is_refused_with_the_nearest_name(key, meant):
    with pytest.raises(ValueError, match=f"model: {key}: unknown key; did you mean {meant}\\?"):
        transformer_config({key: 1}, SMALL)


def test_keys_of_other_families_and_of_mindspore_transformers_are_no_typing_mistakes(log):
    others = (
        *("moe_intermediate_size", "moe_ffn_hidden_size", "v_head_dim", "qk_head_dim", "routed_scaling_factor"),
        *("num_moe_experts", "num_hash_layers", "mhc_layernorm_epsilon", "router_dense_type", "init_method"),
        *("use_eod_attn_mask_compression", "layernorm_compute_type", "kv_lora_rank", "n_group", "offset"),
    )
    assert transformer_config(SMALL | dict.fromkeys(others, 1)) == transformer_config(SMALL)
    (record,) = log.records
    assert all(key in record.getMessage() for key in others)


def test_unknown_keys_of_config_json_are_one_line_of_information(log):
    assert transformer_config({}, SMALL | {"hiden_size": 1, "custom": 2}) == transformer_config(SMALL)
    assert [(record.levelname, record.getMessage()) for record in log.records] == [
        ("INFO", "config.json: not needed here: custom, hiden_size")
    ]


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}},
        {"rotary_base": 5e5, "position_embedding_type": "yarn", "rotary_scaling_factor": 4.0},
    ],
)
def test_rope_is_read_in_every_spelling(keys):
    assert transformer_config(SMALL | keys).rope == RopeParameters("yarn", 5e5, {"factor": 4.0})


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("source", "section", "expected"),
    [
        ({"rope_parameters": {"rope_theta": 10000}}, {"rope_theta": 5e6}, RopeParameters("default", 5e6)),
        ({"rope_theta": 10000}, {"rope_parameters": {"rope_theta": 5e6}}, RopeParameters("default", 5e6)),
        (
            {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
            {"position_embedding_type": "yarn", "rotary_scaling_factor": 4},
            RopeParameters("yarn", 10000.0, {"factor": 4}),
        ),
        (
            {"rope_parameters": YARN},
            {"rotary_scaling_factor": 2, "beta_fast": 16},
            RopeParameters("yarn", 1e6, {"factor": 2, "original_max_position_embeddings": 16, "beta_fast": 16}),
        ),
        ({"rope_parameters": YARN}, {"position_embedding_type": "rope"}, RopeParameters("default", 1e6)),
        ({"rope_parameters": YARN}, {"rope_scaling": {"type": "default"}}, RopeParameters("default", 1e6)),
        (
            {"rope_parameters": YARN},
            {"rope_scaling": None, "rope_theta": None},
            RopeParameters("yarn", 1e6, {"factor": 4.0, "original_max_position_embeddings": 16}),
        ),
    ],
)
def test_rotary_settings_of_the_yaml_win_key_by_key(source, section, expected):
    assert transformer_config(section, SMALL | source).rope == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_theta": "large"}, "model: rope_theta must be a positive number, not 'large'"),
        ({"rope_theta": True}, "model: rope_theta must be a positive number, not True"),
        ({"rotary_base": 0}, "model: rotary_base must be a positive number, not 0"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"model: rope_parameters.rope_theta must be a positive number, not"),
        ({"rope_theta": 1e4, "rotary_base": 1e6}, r"rope_theta \(10000.0\) and rotary_base \(1000000.0\) set the same"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor must be a positive number, not '4'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling.factor must be a positive number, not 0"),
        ({"rope_scaling": {"type": "llama3", "low_freq_factor": 0}}, "low_freq_factor must be a positive number"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": -1}}, "beta_fast must be a positive number, not -1"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": -1}},
            "original_max_position_embeddings must be a positive number, not -1",
        ),
        ({"rope_scaling": {"type": "yarn", "mscale": -1}}, "mscale must be a number of at least 0, not -1"),
        ({"rope_scaling": 4}, "model: rope_scaling must be a mapping, not 4"),
        ({"rope_scaling": {"rope_type": 3}}, "model: rope_scaling.rope_type must be text, not 3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "single kinds of layers are not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor below 1"),
    ],
)
def test_unusable_rotary_settings_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(SMALL | keys)


def test_a_scaling_without_a_type_is_named(log):
    transformer_config({"rotary_scaling_factor": 4}, SMALL)
    assert "model: without effect for rope_type default: factor" in log.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "^model: num_hidden_layers must be a positive integer, not 0$"),
        ({"vocab_size": "32"}, "^model: vocab_size must be a positive integer, not '32'$"),
        ({"hidden_size": True}, "^model: hidden_size must be a positive integer, not True$"),
        ({"seq_length": "256"}, "^model: seq_length must be a positive integer, not '256'$"),
        ({"seq_length": -5}, "^model: seq_length must be a positive integer, not -5$"),
        ({"rms_norm_eps": 0}, "^model: rms_norm_eps must be a positive number, not 0$"),
        ({"rms_norm_eps": "small"}, "^model: rms_norm_eps must be a positive number, not 'small'$"),
        ({"initializer_range": float("nan")}, "^model: initializer_range must be a positive number, not nan$"),
        ({"attention_bias": "false"}, "^model: attention_bias must be true or false, not 'false'$"),
        ({"tie_word_embeddings": 1}, "^model: tie_word_embeddings must be true or false, not 1$"),
        ({"hidden_size": 1.5}, "hidden_size must be a positive integer, not 1.5"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"seq_length": 128}, "seq_length .128. exceeds max_position_embeddings .64."),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(SMALL | change)


def test_llama_attention_bias_is_on_all_four_projections():
    config = transformer_config(SMALL | {"model_type": "llama", "attention_bias": True})
    assert config.add_qkv_bias and config.add_proj_bias


def test_the_message_names_the_file_that_the_value_comes_from():
    with pytest.raises(ValueError, match="^config.json: num_hidden_layers must be a positive integer, not 0$"):
        transformer_config({}, SMALL | {"num_hidden_layers": 0})


def test_whole_floats_are_integers_and_no_seq_length_is_the_longest():
    assert transformer_config(SMALL | {"hidden_size": 16.0}) == transformer_config(SMALL)
    for nothing in (None, 0):
        assert transformer_config(SMALL | {"seq_length": nothing}).seq_length == 64


def test_a_configuration_built_by_hand_is_checked_too():
    with pytest.raises(ValueError, match="model: seq_length must be a positive integer, not -5"):
        replace(transformer_config(SMALL), seq_length=-5)
    with pytest.raises(ValueError, match="model: add_qkv_bias must be true or false, not None"):
        replace(transformer_config(SMALL), add_qkv_bias=None)


@pytest.mark.parametrize("value", [True, False])
def test_qwen2_has_its_biases_whatever_attention_bias_says(value):
    """transformers does not read the key for Qwen2, and published files hold it as false."""
    keys = SMALL | {"model_type": "qwen2"}
    assert transformer_config({}, keys | {"attention_bias": value}) == transformer_config(keys)
    assert transformer_config(keys | {"attention_bias": value}).add_qkv_bias


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_by_token_id_are_refused_where_checkpoints_have_no_table(family):
    keys = json.loads((CHECKPOINTS / family / "config.json").read_text())
    types = ["moe"] * (keys["num_hidden_layers"] - 1) + ["hash_moe"]
    with pytest.raises(ValueError, match=f"mlp_layer_types: 'hash_moe' is not known for {family}; give dense or moe"):
        transformer_config({"mlp_layer_types": types}, keys)

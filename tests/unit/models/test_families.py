"""From config.json and YAML names to a model configuration."""

import json
import logging
import pathlib

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
    with pytest.raises(ValueError, match="model_type 'mamba' is not a known family; known are llama .* qwen2 .* qwen3"):
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
        ("quantization_config", {"quant_method": "fp8"}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_options_that_would_change_results_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        transformer_config(SMALL | {key: value})


def test_keys_without_effect_are_named_in_one_warning(caplog):
    logger = logging.getLogger("mindformers_ext")
    logger.propagate = True
    with caplog.at_level(logging.WARNING, logger="mindformers_ext"):
        transformer_config(SMALL | {"offset": 0, "attention_dropout": 0.1, "compute_dtype": "bfloat16"})
    assert "model: without effect here: attention_dropout, compute_dtype, offset" in caplog.text


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_layers must be a positive integer, not 0"),
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

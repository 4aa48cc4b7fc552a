"""Qwen3.5's own: composite checkpoints, kinds of layers, and a state that does not grow with the tokens."""

import functools
import json
import pathlib

import numpy as np
import pytest
from mindspore import Tensor
from safetensors.numpy import load_file, save_file

from mindformers_ext.checkpoint import check_weights, export, load_weights
from mindformers_ext.models import hf_config, transformer_config, weight_layout
from mindformers_ext.models.delta_net import DeltaNetState
from mindformers_ext.models.gpt_model import GPTModel

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
NAMES = ["qwen3_5", "qwen3_5_moe"]
VISION = {"model_type": "qwen3_5", "depth": 1}


def text_config(name):
    return json.loads((CHECKPOINTS / name / "config.json").read_text())


def composite_config(name):
    """As transformers writes it for a Qwen3_5ForConditionalGeneration with this text model."""
    text = text_config(name)
    (architecture,) = text.pop("architectures")
    return {
        "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "image_token_id": 300,
        "text_config": text,
        "vision_config": VISION,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_composite_config_is_that_of_its_text_model(name):
    composite = transformer_config({}, composite_config(name))
    assert composite == transformer_config({}, text_config(name))
    assert hf_config(composite)["architectures"] == text_config(name)["architectures"]
    assert "text_config" not in hf_config(composite)


def test_the_composite_says_whether_embeddings_are_tied():
    config = composite_config("qwen3_5")
    config["text_config"]["tie_word_embeddings"] = False
    assert transformer_config({}, config).tie_word_embeddings
    assert not transformer_config({}, config | {"tie_word_embeddings": False}).tie_word_embeddings


def test_unusable_composite_configs_are_refused():
    config = composite_config("qwen3_5") | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(ValueError, match=r"config\.json: quantization_config"):
        transformer_config({}, config)
    with pytest.raises(ValueError, match=r"config\.json: text_config must be a mapping, not \['a'\]"):
        transformer_config({}, {"model_type": "qwen3_5", "text_config": ["a"]})
    with pytest.raises(ValueError, match=r"config\.json: rope_parameters must be a mapping, not 'default'"):
        transformer_config({}, {"model_type": "qwen3_5", "text_config": {"rope_parameters": "default"}})


@pytest.mark.parametrize(
    ("interval", "full"), [(None, [3, 7]), (2, [1, 3, 5, 7]), (8, [7]), (1, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_without_layer_types_every_so_many_layers_have_full_attention(interval, full):
    section = text_config("qwen3_5") | {"num_hidden_layers": 8, "full_attention_interval": interval}
    del section["layer_types"]
    types = transformer_config(section).layer_types
    assert [index for index, kind in enumerate(types) if kind == "full_attention"] == full
    assert set(types) <= {"full_attention", "linear_attention"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types: 'sliding_attention' is not"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a positive integer, not 0"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads \(3\) must be a multiple of linear_num_key_heads"),
        ({"attn_output_gate": False}, "attn_output_gate: False is not supported"),
        ({"partial_rotary_factor": 0.03}, "set the same thing"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(text_config("qwen3_5") | change)


def composite_checkpoint(name, folder):
    """Writes the fixture as published checkpoints are: text model inside, experts in one tensor, and more beside."""
    tensors = {}
    for stored, values in load_file(CHECKPOINTS / name / "model.safetensors").items():
        tensors[stored.replace("model.", "model.language_model.", 1)] = values
    for layer in {stored.split(".experts.")[0] for stored in tensors if ".experts." in stored}:
        experts = range(sum(stored.startswith(f"{layer}.experts.") for stored in tensors) // 3)
        gate, up, down = (
            [tensors.pop(f"{layer}.experts.{expert}.{part}_proj.weight") for expert in experts]
            for part in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = np.concatenate((gate, up), 1)
        tensors[f"{layer}.experts.down_proj"] = np.stack(down)
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.ones((4, 4), np.float32)
    tensors["mtp.layers.0.mlp.gate.weight"] = tensors["mtp.fc.weight"] = np.ones((4, 4), np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(composite_config(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_composite_checkpoint_has_the_weights_of_its_text_model(name, tmp_path):
    composite_checkpoint(name, tmp_path)
    layout = weight_layout(transformer_config({}, composite_config(name)))
    found, expected = {}, {}
    load_weights(tmp_path, layout, found.__setitem__)
    load_weights(CHECKPOINTS / name, layout, expected.__setitem__)
    assert found.keys() == expected.keys()
    for parameter, values in expected.items():
        np.testing.assert_array_equal(found[parameter], values, err_msg=parameter)
    skipped = {tensor: reason for tensor, _, reason in check_weights(tmp_path, layout).skipped}
    assert skipped == {
        "model.visual.blocks.0.attn.qkv.weight": "of the vision model",
        "mtp.fc.weight": "for predicting several tokens at once",
        "mtp.layers.0.mlp.gate.weight": "for predicting several tokens at once",
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_composite_checkpoint_is_exported_as_its_text_model(name, tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    composite_checkpoint(name, source)
    assert export.main(["--load_path", str(source), "--output", str(output), "--dtype", "float32"]) == 0
    written = json.loads((output / "config.json").read_text())
    expected = text_config(name)
    for key in ("model_type", "architectures", "eos_token_id", "pad_token_id", "layer_types", "tie_word_embeddings"):
        assert written[key] == expected[key], key
    assert transformer_config({}, written) == transformer_config({}, expected)
    tensors, originals = load_file(output / "model.safetensors"), load_file(CHECKPOINTS / name / "model.safetensors")
    assert tensors.keys() == originals.keys()
    for tensor, values in originals.items():
        np.testing.assert_array_equal(tensors[tensor], values, err_msg=tensor)


@functools.cache
def model():
    loaded = GPTModel(transformer_config({}, text_config("qwen3_5")))
    load_weights(CHECKPOINTS / "qwen3_5", loaded.weight_layout(), loaded.set_weight)
    return loaded


def ids(*shape):
    return np.random.default_rng(0).integers(0, 320, shape).astype(np.int32)


def logits(tokens, cache, mask=None):
    mask = None if mask is None else Tensor(mask)
    return model()(Tensor(np.ascontiguousarray(tokens)), None, mask, cache)["logits"].asnumpy()


def delta_states(cache):
    return [state for state in cache if isinstance(state, DeltaNetState)]


def test_the_state_of_a_delta_net_does_not_grow():
    cache = model().new_cache(2, 200)
    before = [state.nbytes for state in delta_states(cache)]
    assert before == [4 * 2 * (3 * 128 + 4 * 16 * 16)] * 3
    logits(ids(2, 150), cache)
    assert [state.nbytes for state in delta_states(cache)] == before
    assert {state.length for state in cache} == {150}


@pytest.mark.parametrize("rows", [[1, 0, 1], [2, 2], [0, 1, 2, 2, 0]])
def test_reordered_rows_go_on_as_the_rows_that_they_became(rows):
    tokens = ids(3, 9)
    cache, fresh = model().new_cache(3, 20), model().new_cache(len(rows), 20)
    logits(tokens[:, :8], cache)
    buffers = [state.recurrent for state in delta_states(cache)]
    for state in cache:
        state.reorder(np.array(rows))
    in_place = [state.recurrent is buffer for state, buffer in zip(delta_states(cache), buffers, strict=True)]
    assert in_place == [len(rows) == 3] * 3
    logits(tokens[rows, :8], fresh)
    last = tokens[rows, 8:]
    np.testing.assert_allclose(logits(last, cache), logits(last, fresh), rtol=1e-4, atol=1e-4)


def test_a_row_is_moved_whole_although_its_first_tokens_are_shared():
    cache = model().new_cache(2, 20)
    logits(ids(2, 8), cache)
    for state in delta_states(cache):
        expected = state.recurrent.asnumpy()[1].copy(), state.conv.asnumpy()[1].copy()
        state.reorder(np.array([1, 1]), shared=5)
        np.testing.assert_array_equal(state.recurrent.asnumpy(), np.stack([expected[0]] * 2))
        np.testing.assert_array_equal(state.conv.asnumpy(), np.stack([expected[1]] * 2))


def test_a_delta_net_takes_no_tokens_back_but_can_start_anew():
    cache, tokens = model().new_cache(1, 20), ids(1, 6)
    first = logits(tokens, cache)
    (state, *_) = delta_states(cache)
    state.crop(6)
    assert state.length == 6
    with pytest.raises(ValueError, match="cannot go back from 6 to 5 tokens"):
        state.crop(5)
    for entry in cache:
        entry.crop(0)
    np.testing.assert_array_equal(logits(tokens, cache), first)
    for entry in cache:
        entry.clear()
    np.testing.assert_array_equal(logits(tokens, cache), first)


def test_more_tokens_than_the_cache_was_made_for_are_refused():
    with pytest.raises(ValueError, match="made for 5 tokens a row and cannot hold 6"):
        logits(ids(1, 6), model().new_cache(1, 5))


def test_what_stands_at_a_pad_reaches_neither_state_nor_logits():
    tokens, mask = ids(2, 12), np.ones((2, 12), np.int32)
    mask[0, :7] = 0
    results = []
    for pad in (5, 77):
        tokens[0, :7] = pad
        cache = model().new_cache(2, 12)
        for start, end in ((0, 3), (3, 9), (9, 12)):
            last = logits(tokens[:, start:end], cache, mask[:, :end])
        results.append((last, [state.recurrent.asnumpy() for state in delta_states(cache)]))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_new_weights_of_a_delta_net_forget_at_bounded_rates():
    fresh = GPTModel(model().config)
    fresh.init_weights(0)
    values = fresh.parameters_dict()
    rates = np.exp(values["decoder.layers.0.self_attention.A_log"].asnumpy())
    assert (rates >= 0.009).all() and (rates <= 16.001).all() and np.ptp(rates) > 0
    assert (values["decoder.layers.0.self_attention.dt_bias"].asnumpy() == 1).all()
    assert (values["decoder.layers.0.self_attention.out_norm.weight"].asnumpy() == 1).all()
    assert (values["decoder.layers.0.input_layernorm.weight"].asnumpy() == 0).all()
    assert (values["decoder.layers.3.self_attention.q_layernorm.weight"].asnumpy() == 0).all()

"""A prediction with packed weights gives what the plain parameters give."""

import functools
import json
import pathlib

import numpy as np
import pytest
from mindspore import Tensor, _no_grad
from safetensors.numpy import load_file

from mindformers_ext import ops
from mindformers_ext.checkpoint import load_weights
from mindformers_ext.generate import GenerationConfig, generate_rows
from mindformers_ext.models import transformer_config
from mindformers_ext.models.gpt_model import GPTModel
from mindformers_ext.ops import native
from tests.unit.checkpoint import toy

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())
needs_kernels = pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")


def build(family, weight_dtype, values=lambda name, array: array, folder=None):
    stored = CHECKPOINTS / family
    model = GPTModel(transformer_config({}, json.loads((stored / "config.json").read_text())))
    if weight_dtype is not None:
        model.prepare_prediction(weight_dtype)
    load_weights(
        folder or stored, model.weight_layout(), lambda name, array: model.set_weight(name, values(name, array)),
        takes_bits=model.takes_bits,
    )  # fmt: skip
    model.set_train(False)
    return model, json.loads((stored / "reference.json").read_text())["cases"]


load = functools.cache(build)


def logits_of(model, ids):
    with _no_grad():
        return model(Tensor(np.array([ids], np.int32)))["logits"].asnumpy()[0]


@needs_kernels
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_give_the_ids_of_transformers_alone_and_in_one_batch(family, use_cache):
    model, cases = load(family, "auto")
    config = GenerationConfig(max_new_tokens=24, use_cache=use_cache)
    prompts, expected = [case["input_ids"] for case in cases], [case["greedy"] for case in cases]
    assert [row.token_ids for row in generate_rows(model, prompts, config)] == expected
    assert [generate_rows(model, [prompt], config)[0].token_ids for prompt in prompts] == expected


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_every_large_weight_is_packed_and_the_others_are_as_they_were(family):
    packed, _ = load(family, "float32")
    plain, _ = load(family, None)
    large = [mapping for mapping in plain.weight_layout().mappings if len(mapping.shape) > 1]
    assert len(packed.packed_weights()) > len(large) / 2 and not plain.packed_weights()
    for mapping in plain.weight_layout().mappings:
        np.testing.assert_array_equal(packed.weight(mapping.name), plain.weight(mapping.name))


@needs_kernels
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_weights_compute_with_the_values_that_they_hold_kernels_on_and_off(family, weight_dtype, monkeypatch):
    packed, cases = load(family, weight_dtype)
    kept = {mapping.name: packed.weight(mapping.name) for mapping in packed.weight_layout().mappings}
    assert weight_dtype in {weight.dtype for weight in packed.packed_weights()}
    monkeypatch.setattr(native, "available", lambda: False)
    rounded, _ = build(family, weight_dtype)
    assert not rounded.packed_weights()
    assert rounded.takes_bits("embedding.word_embeddings.weight") is False
    for name, values in kept.items():
        np.testing.assert_array_equal(values, rounded.weight(name))
    without = [logits_of(rounded, case["input_ids"]) for case in cases]
    monkeypatch.undo()
    for case, expected in zip(cases, without, strict=True):
        np.testing.assert_allclose(logits_of(packed, case["input_ids"]), expected, atol=5e-4)


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_logits_of_a_row_are_the_same_bits_beside_any_others(family):
    """Also with pads in front, in pieces, and token by token."""
    model, cases = load(family, "auto")
    ids = max((case["input_ids"] for case in cases), key=len)
    alone = logits_of(model, ids)
    with _no_grad():
        padded = np.array([[0, 0, 0, *ids], [5, *ids[::-1], 4, 3]], np.int32)
        mask = np.array([[0, 0, 0, *[1] * len(ids)], [1] * (len(ids) + 3)], np.int32)
        batch = model(Tensor(padded), None, Tensor(mask))["logits"].asnumpy()[0, 3:]
        cache = model.new_cache(1, len(ids))
        steps = [model(Tensor(np.array([[i]], np.int32)), past_key_values=cache)["logits"].asnumpy()[0] for i in ids]
    np.testing.assert_array_equal(batch, alone)
    np.testing.assert_array_equal(np.concatenate(steps), alone)


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_all_layers_in_one_call_give_the_bits_of_one_after_another(family, monkeypatch):
    model, cases = load(family, "bfloat16")
    ids = cases[0]["input_ids"]

    def run():
        cache = model.new_cache(1, len(ids))
        with _no_grad():
            first = model(Tensor(np.array([ids[:-1]], np.int32)), past_key_values=cache)["logits"].asnumpy()
            last = model(Tensor(np.array([ids[-1:]], np.int32)), past_key_values=cache)["logits"].asnumpy()
        return np.concatenate((first, last), 1), [buffer.asnumpy() for state in cache for buffer in state.buffers]

    together, kept = run()
    assert model.decoder._stack is not None
    monkeypatch.setattr(model.decoder, "_is_dense", False)
    apart, kept_apart = run()
    np.testing.assert_array_equal(together, apart)
    for one, other in zip(kept, kept_apart, strict=True):
        np.testing.assert_array_equal(one, other)


@needs_kernels
@pytest.mark.parametrize("part", ["input_layernorm", "self_attention.q_layernorm", "self_attention.linear_proj"])
@pytest.mark.parametrize("is_dense", [True, False], ids=["one-call", "layer-by-layer"])
def test_a_weight_that_is_set_after_a_forward_counts_in_the_next(part, is_dense, monkeypatch):
    name = f"decoder.layers.1.{part}.weight"
    expected, cases = build("qwen3", "float32", lambda key, array: array * 2 if key == name else array)
    model, _ = build("qwen3", "float32")
    for one in (model, expected):
        monkeypatch.setattr(one.decoder, "_is_dense", is_dense)
    ids = cases[0]["input_ids"]
    before = logits_of(model, ids)
    model.set_weight(name, model.weight(name) * 2)
    np.testing.assert_array_equal(logits_of(model, ids), logits_of(expected, ids))
    assert not np.array_equal(logits_of(model, ids), before)


@needs_kernels
def test_without_a_cache_all_layers_use_one_pair_of_buffers_and_give_the_bits_of_a_cache(monkeypatch):
    model, cases = load("qwen3", "float32")
    ids, given = cases[0]["input_ids"], []
    original = ops.dense_layers

    def spied(stack, hidden, rotary, visible, buffers, past):
        given.append([id(buffer) for pair in buffers for buffer in pair])
        return original(stack, hidden, rotary, visible, buffers, past)

    monkeypatch.setattr(ops, "dense_layers", spied)
    cache = model.new_cache(1, len(ids))
    with _no_grad():
        kept = model(Tensor(np.array([ids], np.int32)), past_key_values=cache)["logits"].asnumpy()[0]
    np.testing.assert_array_equal(logits_of(model, ids), kept)
    layers = model.config.num_layers
    assert [len(buffers) for buffers in given] == [2 * layers, 2 * layers]
    assert [len(set(buffers)) for buffers in given] == [2 * layers, 2]


@needs_kernels
def test_an_additive_mask_and_holes_in_a_mask_mean_the_same_to_packed_and_plain_weights():
    packed, cases = load("qwen3", "float32")
    plain, _ = load("qwen3", None)
    ids = np.array([cases[0]["input_ids"][:6]], np.int32)
    holes = np.ones(ids.shape, np.int32)
    holes[0, 2] = 0
    additive = np.where(np.tri(ids.shape[1], dtype=bool), 0, np.finfo(np.float32).min).astype(np.float32)[None, None]
    additive[..., 1:, 0] = -1.5
    with _no_grad():
        for mask in (holes, additive):
            outputs = [model(Tensor(ids), None, Tensor(mask))["logits"].asnumpy() for model in (packed, plain)]
            np.testing.assert_allclose(*outputs, atol=5e-4)


@needs_kernels
@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_moe"])
def test_bfloat16_checkpoints_keep_their_bits_and_give_the_numbers_of_float32(family, tmp_path):
    """Biases, which qwen2 has, are widened; so is what no product reads."""
    toy.write_single(tmp_path, load_file(CHECKPOINTS / family / "model.safetensors"), "BF16")
    (kept, cases), (wide, _), (plain, _) = (
        build(family, dtype, folder=tmp_path) for dtype in ("auto", "float32", None)
    )
    assert kept.embedding.table.dtype == "bfloat16" and wide.embedding.table.dtype == "float32"
    assert kept.embedding.table.nbytes * 2 == wide.embedding.table.nbytes
    for mapping in plain.weight_layout().mappings:
        np.testing.assert_array_equal(kept.weight(mapping.name), plain.weight(mapping.name))
    for case in cases:
        logits = logits_of(kept, case["input_ids"])
        np.testing.assert_array_equal(logits, logits_of(wide, case["input_ids"]))
        np.testing.assert_allclose(logits, logits_of(plain, case["input_ids"]), atol=5e-4)


@pytest.mark.parametrize("available", [True, False])
def test_a_value_that_int8_cannot_hold_is_refused_with_the_name_of_its_parameter(available, monkeypatch):
    if not available:
        monkeypatch.setattr(native, "available", lambda: False)

    def broken(name, array):
        if name == "decoder.layers.0.mlp.linear_fc2.weight":
            array[3, 2] = np.nan
        return array

    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.linear_fc2\.weight cannot be kept as int8: .*not finite"):
        build("qwen3", "int8", broken)

"""Checkpoints of every family go through this package bit by bit, in both forms."""

import json
import pathlib

import numpy as np
import pytest

from mindformers_ext.checkpoint import load_weights, save_checkpoint, save_hf_checkpoint
from mindformers_ext.checkpoint.tensor_file import TensorFile
from mindformers_ext.models import hf_config, transformer_config, weight_layout

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())


def load(folder, layout):
    arrays = {}
    load_weights(folder, layout, arrays.__setitem__)
    return arrays


def stored(*files):
    tensors = {}
    for path in files:
        with TensorFile(path) as file:
            tensors |= {name: tensor.read() for name, tensor in file.tensors.items()}
    return tensors


def same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_huggingface_checkpoint_is_saved_as_transformers_saved_it(family, max_shard_bytes, tmp_path):
    source = CHECKPOINTS / family
    config = transformer_config({}, json.loads((source / "config.json").read_text()))
    layout = weight_layout(config)
    parameters = load(source, layout)
    files = save_hf_checkpoint(
        tmp_path / "hf", layout, parameters.__getitem__, hf_config(config), "float32", max_shard_bytes
    )
    assert (len(files) > 1) == (max_shard_bytes < 10**9)
    same(stored(*files), stored(source / "model.safetensors"))
    written = transformer_config({}, json.loads((tmp_path / "hf" / "config.json").read_text()))
    assert written == config
    same(load(tmp_path / "hf", weight_layout(written)), parameters)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mindformers_checkpoint_holds_the_same_bits(family, tmp_path):
    source = CHECKPOINTS / family
    layout = weight_layout(transformer_config({}, json.loads((source / "config.json").read_text())))
    parameters = load(source, layout)
    save_checkpoint(tmp_path, 1, parameters, None, {})
    same(load(tmp_path, layout), parameters)

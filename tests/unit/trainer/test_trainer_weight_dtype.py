"""checkpoint.weight_dtype, from the YAML to the rows."""

import json
import pathlib
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindformers_ext.config import ConfigError, load_config
from mindformers_ext.ops import native
from mindformers_ext.trainer import Trainer
from tests.unit.checkpoint import toy

DATA = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
needs_kernels = pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint in bfloat16."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((DATA / "qwen3" / name).read_bytes())
    values = load_file(DATA / "qwen3" / "model.safetensors")
    rounded = {
        name: (array.astype(np.float32).view(np.uint32) >> 16 << 16).view(np.float32) for name, array in values.items()
    }
    (model / "model.safetensors").write_bytes(toy.file_bytes(rounded, "BF16"))
    return model


def yaml(folder, **checkpoint):
    return {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(folder), **checkpoint},
        "inference": {"max_new_tokens": 8, "batch_size": 2},
        "generation": {"eos_token_id": None},
        "predict": {"progress": False, "resume": False},
    }


def ids(folder, **checkpoint):
    cases = json.loads((DATA / "qwen3" / "reference.json").read_text())["cases"]
    return Trainer(yaml(folder, **checkpoint)).inference([case["prompt"] for case in cases])


@needs_kernels
def test_auto_keeps_bfloat16_and_gives_the_ids_of_float32_kernels_on_and_off(folder, log, monkeypatch):
    kept = ids(folder)
    assert re.search(r"packed for the products of a prediction, [\d,]+ bytes as bfloat16$", log.text, re.MULTILINE)
    assert ids(folder, weight_dtype="float32") == kept
    assert re.search(r"packed for the products of a prediction, [\d,]+ bytes as float32$", log.text, re.MULTILINE)
    monkeypatch.setattr(native, "available", lambda: False)
    assert ids(folder) == kept


@needs_kernels
def test_int8_gives_the_same_ids_kernels_on_and_off(folder, log, monkeypatch):
    kept = ids(folder, weight_dtype="int8")
    assert "bytes as int8" in log.text
    monkeypatch.setattr(native, "available", lambda: False)
    assert ids(folder, weight_dtype="int8") == kept


@pytest.mark.parametrize("value", ["bf16", "fp8", "INT8", "8"])
def test_another_type_is_refused_with_those_that_there_are(folder, value, tmp_path):
    text = json.dumps(yaml(folder, weight_dtype=value))
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"checkpoint\.weight_dtype.*auto.*float32.*bfloat16.*int8"):
        load_config(tmp_path / "job.yaml")


def test_a_given_model_that_cannot_keep_narrow_weights_is_refused(folder):
    class Given:
        pass

    from mindformers_ext.trainer.model import load_model_weights

    with pytest.raises(ValueError, match="weight_dtype: int8 needs a model with prepare_prediction"):
        load_model_weights(Given(), folder, weight_dtype="int8")


def test_training_says_that_it_keeps_float32():
    train = pathlib.Path(__file__).parents[2] / "data" / "config" / "train.yaml"
    config = load_config(train, {"checkpoint.weight_dtype": "int8"})
    assert [warning for warning in config.warnings if "weight_dtype" in warning] == [
        "no effect: checkpoint.weight_dtype (training keeps weights in float32; run_mode: predict follows it)"
    ]
    assert not [warning for warning in load_config(train).warnings if "weight_dtype" in warning]

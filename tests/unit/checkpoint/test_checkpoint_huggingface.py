"""HuggingFace folders that we write hold the right values under the right names, in one file or in shards."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mindformers_ext.checkpoint import export, load_weights, save_checkpoint, save_hf_checkpoint, write_model_files
from mindformers_ext.checkpoint.convert import widen_bfloat16
from mindformers_ext.checkpoint.tensor_file import TensorFile
from mindformers_ext.checkpoint.tensor_writer import narrow
from mindformers_ext.models.transforms import expert_gate_up
from mindformers_ext.models.weights import WeightLayout
from tests.unit.checkpoint import toy

LAYOUT = toy.make_layout()
HF = toy.hf_weights()
PARAMETERS = toy.parameters(HF, LAYOUT)
CONFIG = {"model_type": "toy", "torch_dtype": "float32", "vocab_size": toy.VOCAB}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("max_shard_bytes", [1, 150, 10**9])
def test_a_written_folder_reads_back(tmp_path: Path, dtype: str, max_shard_bytes: int) -> None:
    folder = tmp_path / "out"
    files = save_hf_checkpoint(folder, LAYOUT, PARAMETERS.__getitem__, CONFIG, dtype, max_shard_bytes)
    stored = {}
    for path in files:
        with TensorFile(path) as file:
            stored.update(
                {name: (tensor.dtype, tensor.read().astype(np.float32)) for name, tensor in file.tensors.items()}
            )
    assert {kind for kind, _ in stored.values()} == {{"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]}
    toy.assert_same({name: stored[name][1] for name in HF}, HF)
    assert len(stored) == len(HF)
    assert (len(files) > 1) == (folder / "model.safetensors.index.json").is_file()
    model = toy.Model()
    load_weights(folder, LAYOUT, model.assign)
    toy.assert_same(model.arrays, PARAMETERS)
    assert json.loads((folder / "config.json").read_text()) == {**CONFIG, "torch_dtype": dtype}


def test_shards_stay_below_the_limit_and_parts_of_a_parameter_stay_together(tmp_path: Path) -> None:
    files = save_hf_checkpoint(tmp_path / "out", LAYOUT, PARAMETERS.__getitem__, CONFIG, "float32", 200)
    holders = {}
    for path in files:
        with TensorFile(path) as file:
            holders.update(dict.fromkeys(file.tensors, path.name))
            assert sum(tensor.nbytes for tensor in file.tensors.values()) <= 200
    assert len(files) > 2
    assert len({holders[name] for name in toy.QKV}) == 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == holders
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in HF.values())


def test_each_parameter_is_read_once(tmp_path: Path) -> None:
    reads: list[str] = []

    def read(name: str) -> np.ndarray:
        reads.append(name)
        return PARAMETERS[name]

    save_hf_checkpoint(tmp_path / "out", LAYOUT, read, CONFIG)
    assert reads == list(PARAMETERS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_writing_copies_no_parameter(tmp_path: Path, dtype: str) -> None:
    mapping = expert_gate_up("w", ("e.{e}.gate", "e.{e}.up"), None, 2, 2048, 1024)
    parameter = np.ones(mapping.shape, np.float32)
    tracemalloc.start()
    try:
        save_hf_checkpoint(tmp_path / "out", WeightLayout((mapping,)), lambda name: parameter, {}, dtype)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < parameter.nbytes // 4  # 32 MiB


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.0039064, 3.3895314e38, 0.0, -0.0, 1e-40], np.float32)
    wide = widen_bfloat16(narrow(values, "bfloat16", "x"))
    expected = np.array([1.0, 1.0, 1.015625, -1.0078125, 3.3895314e38, 0.0, -0.0, 2.0**-133], np.float32)
    np.testing.assert_array_equal(wide, expected)
    assert np.signbit(wide[6])
    assert np.all(np.abs(wide[:5] - values[:5]) <= np.abs(values[:5]) / 256)


def test_nan_and_infinity_survive_bfloat16() -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000], np.uint32)
    wide = widen_bfloat16(narrow(bits.view(np.float32), "bfloat16", "x"))
    assert np.isnan(wide[:3]).all()
    np.testing.assert_array_equal(wide[3:], [np.inf, -np.inf])


def test_every_bfloat16_survives_a_round_trip() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = widen_bfloat16(bits)
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(narrow(wide, "bfloat16", "x")[numbers], bits[numbers])


def test_values_too_large_for_float16_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    values = {**PARAMETERS, "decoder.final_layernorm.weight": np.full(toy.HIDDEN, 7e4, np.float32)}
    with pytest.raises(ValueError, match=f"{toy.NORM} holds values above 65504"):
        save_hf_checkpoint(tmp_path / "out", LAYOUT, values.__getitem__, CONFIG, "float16")
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="new or empty"):
        save_hf_checkpoint(tmp_path, LAYOUT, PARAMETERS.__getitem__, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_output_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    save_hf_checkpoint(tmp_path / "out", LAYOUT, PARAMETERS.__getitem__, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "message"), [({"dtype": "int8"}, "dtype must be one of"), ({"max_shard_bytes": 0}, "max_shard_bytes")]
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_hf_checkpoint(tmp_path / "out", LAYOUT, PARAMETERS.__getitem__, CONFIG, **arguments)


def test_model_files_are_copied_and_code_is_not(tmp_path: Path) -> None:
    source, target = tmp_path / "tokenizer", tmp_path / "run"
    source.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "modeling.py",
        "model.safetensors",
    ):
        (source / name).write_text(name)
    write_model_files(target, CONFIG, source)
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in target.iterdir()) == names
    assert json.loads((target / "config.json").read_text()) == CONFIG
    write_model_files(target, None, target)
    assert (target / "tokenizer.json").read_text() == "tokenizer.json"
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        write_model_files(target, None, tmp_path / "nowhere")


def test_the_export_command_turns_a_training_checkpoint_into_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mindformers_ext.models import families

    monkeypatch.setattr(families, "weight_layout_of", lambda config: LAYOUT)
    root, output = tmp_path / "run", tmp_path / "model"
    save_checkpoint(root, 5, PARAMETERS, None, {})
    write_model_files(root, CONFIG, None)
    (root / "tokenizer.json").write_text("{}")
    arguments = ["--load_path", str(root / "iteration_00000005"), "--output", str(output)]
    assert export.main(arguments) == 0
    assert "5 parameters" in capsys.readouterr().out
    model = toy.Model()
    assert load_weights(output, LAYOUT, model.assign).dtypes == {"BF16": len(HF)}
    toy.assert_same(model.arrays, PARAMETERS)
    assert (output / "tokenizer.json").is_file() and (output / "config.json").is_file()

    assert export.main(arguments) == 1
    assert "new or empty" in capsys.readouterr().err
    (root / "config.json").unlink()
    assert export.main(["--load_path", str(root), "--output", str(tmp_path / "other")]) == 1
    assert "config.json is missing" in capsys.readouterr().err

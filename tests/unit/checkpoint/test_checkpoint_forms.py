"""Renamed tensors, other forms of a parameter, tables of ids and parameters that stay float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindformers_ext.checkpoint import (
    CheckpointError,
    check_weights,
    convert,
    load_weights,
    save_checkpoint,
    save_hf_checkpoint,
)
from mindformers_ext.checkpoint.tensor_file import TensorFile
from mindformers_ext.models.transforms import expert_down, expert_gate_up
from mindformers_ext.models.weights import WeightLayout, WeightMapping
from tests.unit.checkpoint import toy

LAYOUT = toy.make_layout()
HF = toy.hf_weights()

EXPERTS, HIDDEN, FFN = 3, 8, 5
GATE_UP = expert_gate_up("w1", ("experts.{e}.gate", "experts.{e}.up"), "gate_up", EXPERTS, HIDDEN, FFN)
DOWN = expert_down("w2", "experts.{e}.down", "down", EXPERTS, HIDDEN, FFN)
MOE = WeightLayout((GATE_UP, DOWN))


def experts() -> dict[str, np.ndarray]:
    """The tensors of the experts one by one; the values survive 16 bits."""
    generator = np.random.default_rng(1)
    shapes = {name: shape for m in MOE.mappings for name, shape in zip(m.sources, m.source_shapes, strict=True)}
    return {name: generator.integers(-128, 128, shape).astype(np.float32) / 64 for name, shape in shapes.items()}


def stacked(single: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def stack(*kinds: str) -> np.ndarray:
        return np.stack([np.concatenate([single[f"experts.{e}.{kind}"] for kind in kinds]) for e in range(EXPERTS)])

    return {"gate_up": stack("gate", "up"), "down": stack("down")}


def loaded(path: Path, layout: WeightLayout) -> dict[str, np.ndarray]:
    model = toy.Model()
    load_weights(path, layout, model.assign)
    return model.arrays


# Experts


@pytest.mark.parametrize("piece", [3, 1 << 20])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_experts_load_from_both_forms_and_are_saved_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, piece: int
) -> None:
    monkeypatch.setattr(convert.pieces, "__defaults__", (piece,))
    monkeypatch.setattr(convert, "_TILE", 2)
    single = experts()
    both = stacked(single)
    expected = {"w1": both["gate_up"].transpose(0, 2, 1), "w2": both["down"].transpose(0, 2, 1)}
    for tensors in (single, both, {**single, "down": both["down"]}):
        kept = {name: array for name, array in tensors.items() if not ("down" in tensors and name.endswith(".down"))}
        toy.write_single(tmp_path, kept, dtype)
        toy.assert_same(loaded(tmp_path, MOE), expected)
        assert check_weights(tmp_path, MOE).dtypes == {dtype: len(kept)}
    (path,) = save_hf_checkpoint(tmp_path / "out", MOE, loaded(tmp_path, MOE).__getitem__, {}, "bfloat16")
    with TensorFile(path) as file:
        toy.assert_same({name: file.tensors[name].read() for name in single}, single)
        assert len(file.tensors) == len(single)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda single: single | {"gate_up": stacked(single)["gate_up"]},
            "several forms at once (1): w1: 6 of 6 like experts.0.gate (complete) and 1 of 1 like gate_up (complete)",
        ),
        (
            lambda single: {n: a for n, a in single.items() if n != "experts.1.up"} | {"gate_up": np.zeros(1)},
            "w1: 5 of 6 like experts.0.gate (without experts.1.up) and 1 of 1 like gate_up (complete)",
        ),
        (
            lambda single: {n: a for n, a in single.items() if n != "experts.1.up"},
            "tensors missing from model.safetensors (1): experts.1.up (for w1)",
        ),
        (lambda single: {n: a for n, a in single.items() if "down" in n}, "missing from model.safetensors (6)"),
        (
            lambda single: stacked(single) | {"down": np.zeros((EXPERTS, FFN, HIDDEN))},
            "wrong shapes (1): down in model.safetensors is [3, 5, 8], expected [3, 8, 5]",
        ),
    ],
    ids=["both forms", "mixture", "partial", "none", "transposed"],
)
def test_mixed_and_partial_forms_are_refused_with_the_missing_names(tmp_path: Path, change, message: str) -> None:
    toy.write_single(tmp_path, change(experts()))
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path, MOE)
    assert message in str(caught.value)


def test_a_layout_that_does_not_cover_its_parameter_with_views_is_an_error_of_the_program(tmp_path: Path) -> None:
    toy.write_single(tmp_path, {"p": np.zeros((4, 2))})
    for parts, message in (
        (lambda parameter: [parameter.copy()], "does not make views"),
        (lambda parameter: [parameter[:3]], "does not make views"),
    ):
        layout = WeightLayout((WeightMapping("p", (4, 2), ("p",), ((4, 2),), parts),))
        with pytest.raises(RuntimeError, match=message):
            load_weights(tmp_path, layout, toy.Model().assign)
    half = WeightLayout((WeightMapping("p", (8, 2), ("p",), ((4, 2),), lambda parameter: [parameter[:4]]),))
    with pytest.raises(RuntimeError, match="without a source"):
        load_weights(tmp_path, half, toy.Model().assign)


# Names

RENAMED = replace(
    LAYOUT, renames=((r"^model\.language_model\.", "model."), (r"\.attn\.w([qkv])\.", r".self_attn.\1_proj."))
)


def test_renames_apply_in_order_to_every_tensor_name(tmp_path: Path) -> None:
    def theirs(name: str) -> str:
        for part in "qkv":
            name = name.replace(f"self_attn.{part}_proj", f"attn.w{part}")
        return name.replace("model.", "model.language_model.", 1)

    old = {theirs(name): array for name, array in HF.items()}
    toy.write_sharded(tmp_path, old | {"model.language_model.layers.0.rotary_emb.inv_freq": np.zeros(2)})
    toy.assert_same(loaded(tmp_path, RENAMED), toy.parameters(HF, LAYOUT))
    (skipped,) = check_weights(tmp_path, RENAMED).skipped
    assert skipped[0] == "model.language_model.layers.0.rotary_emb.inv_freq"
    with pytest.raises(CheckpointError, match=r"left over .*model\.language_model\.norm\.weight in model-0000"):
        check_weights(tmp_path, LAYOUT)


def test_two_tensors_that_get_one_name_are_refused_by_both_names(tmp_path: Path) -> None:
    toy.write_single(tmp_path, HF | {"model.language_model.norm.weight": HF[toy.NORM]})
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path, RENAMED)
    assert (
        "two tensors for one name (1): model.norm.weight in model.safetensors and model.language_model.norm.weight in "
        "model.safetensors are both model.norm.weight" in str(caught.value)
    )


def test_mindformers_names_are_never_renamed(tmp_path: Path) -> None:
    parameters = toy.parameters(HF, LAYOUT)
    save_checkpoint(tmp_path, 1, parameters, None, {})
    toy.assert_same(loaded(tmp_path, replace(LAYOUT, renames=((".", "x"),))), parameters)


# Types

TABLE = toy.plain("table", "tid2eid", (3, 2), dtype="int32")
IDS = np.array([[0, 1], [2**31 - 1, -(2**31)], [7, 8]], np.int64)


@pytest.mark.parametrize("stored", ["I64", "I32"])
def test_a_table_of_ids_loads_as_int32_and_is_saved_as_int64(tmp_path: Path, stored: str) -> None:
    layout = WeightLayout((TABLE,))
    toy.write_single(tmp_path, {"tid2eid": IDS}, stored)
    found = loaded(tmp_path, layout)
    toy.assert_same(found, {"table": IDS.astype(np.int32)})
    (path,) = save_hf_checkpoint(tmp_path / "out", layout, found.__getitem__, {})
    with TensorFile(path) as file:
        toy.assert_same({name: tensor.read() for name, tensor in file.tensors.items()}, {"tid2eid": IDS})
    save_checkpoint(tmp_path / "run", 1, found, None, {})
    toy.assert_same(loaded(tmp_path / "run", layout), found)


@pytest.mark.parametrize("worst", [2**31, -(2**31) - 1])
def test_an_id_beyond_int32_is_refused(tmp_path: Path, worst: int) -> None:
    ids = IDS.copy()
    ids[2, 1] = worst
    toy.write_single(tmp_path, {"tid2eid": ids}, "I64")
    with pytest.raises(CheckpointError, match=f"tid2eid in model.safetensors holds {worst}, which is no int32"):
        load_weights(tmp_path, WeightLayout((TABLE,)), toy.Model().assign)


@pytest.mark.parametrize("worst", [-1, 9])
def test_an_id_that_names_nothing_is_refused(tmp_path: Path, worst: int) -> None:
    layout = WeightLayout((toy.plain("table", "tid2eid", (3, 2), dtype="int32", num_ids=9),))
    ids = np.array([[0, 1], [8, 2], [7, 8]], np.int64)
    toy.write_single(tmp_path, {"tid2eid": ids}, "I64")
    toy.assert_same(loaded(tmp_path, layout), {"table": ids.astype(np.int32)})
    ids[1, 1] = worst
    toy.write_single(tmp_path, {"tid2eid": ids}, "I64")
    with pytest.raises(CheckpointError, match=f"tid2eid in model.safetensors holds {worst}, but the model's ids"):
        load_weights(tmp_path, layout, toy.Model().assign)


def test_types_of_tables_and_weights_are_not_confused(tmp_path: Path) -> None:
    layout = WeightLayout((TABLE, toy.plain("w", "w", (2,))))
    toy.write_single(tmp_path, {"tid2eid": IDS, "w": np.zeros(2)}, {"tid2eid": "F32", "w": "I64"})
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path, layout)
    assert "types other than I64, I32 (1): tid2eid in model.safetensors is F32" in str(caught.value)
    assert "types other than F32, F16, BF16 (1): w in model.safetensors is I64" in str(caught.value)


def test_parameters_that_stay_float32_are_exported_so(tmp_path: Path) -> None:
    exact = np.array([1 + 2**-20, 7e4], np.float32)
    layout = WeightLayout((toy.plain("router", "gate", (2,), keep_float32=True), toy.plain("w", "w", (2,))))
    values = {"router": exact, "w": np.ones(2, np.float32)}
    (path,) = save_hf_checkpoint(tmp_path / "out", layout, values.__getitem__, {}, "float16")
    with TensorFile(path) as file:
        assert {name: tensor.dtype for name, tensor in file.tensors.items()} == {"gate": "F32", "w": "F16"}
    toy.assert_same(loaded(tmp_path / "out", layout), values)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "float16"}

"""Weights in FP8 and FP4 with scales for blocks load as exactly the float32 numbers they stand for."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mindformers_ext.checkpoint import CheckpointError, check_weights, export, load_weights, quantized
from mindformers_ext.checkpoint.tensor_file import TensorFile
from mindformers_ext.models.transforms import copied, expert_down, expert_gate_up, fused_qkv
from mindformers_ext.models.weights import WeightLayout
from tests.unit.checkpoint import toy
from tests.unit.checkpoint.codes import E2M1, e4m3, e5m2, e8m0, random_codes, spread, unpacked


def loaded(path: Path, layout: WeightLayout) -> dict[str, np.ndarray]:
    model = toy.Model()
    load_weights(path, layout, model.assign)
    return model.arrays


def random_scales(*shape: int) -> np.ndarray:
    """Scales that survive 16 bits, and with which no product is rounded twice."""
    return np.random.default_rng(7).integers(1, 128, shape).astype(np.float32) / 64


# Tables


def test_every_code_has_the_value_of_its_format() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for kind, expected in (("F8_E4M3", e4m3(codes)), ("F8_E5M2", e5m2(codes))):
        table = quantized.TABLES[kind]
        assert table.dtype == np.float32
        np.testing.assert_array_equal(table, expected)
        np.testing.assert_array_equal(np.signbit(table)[:128], False)
    assert [quantized.TABLES["F8_E4M3"][code] for code in (0x38, 0x7E, 0x01, 0x08, 0xC0)] == [1, 448, 2**-9, 2**-6, -2]
    assert [quantized.TABLES["F8_E5M2"][code] for code in (0x3C, 0x7B, 0x01, 0x7C)] == [1, 57344, 2**-16, np.inf]
    assert np.isnan(quantized.TABLES["F8_E8M0"][255])
    np.testing.assert_array_equal(quantized.TABLES["F8_E8M0"][:255], e8m0(codes[:255]))
    np.testing.assert_array_equal(quantized.E2M1, E2M1)


# FP8


@pytest.mark.parametrize("small_pieces", [False, True])
@pytest.mark.parametrize("scale_type", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_fp8_blocks_load_into_plain_fused_and_transposed_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scale_type: str, small_pieces: bool
) -> None:
    if small_pieces:
        monkeypatch.setattr(quantized, "_PIECE", 7)
        monkeypatch.setattr(quantized, "_CHUNK", 5)
    layout = WeightLayout(
        (
            copied("plain", "p.weight", 300, 200),
            fused_qkv("qkv", ("q.weight", "k.weight", "v.weight"), 2, 3, 2, (9,)),
            expert_down("down", "e.{e}.weight", None, 2, 10, 6),
        )
    )
    tensors, types, values = {}, {}, {}
    for mapping in layout.mappings:
        for name, shape in zip(mapping.sources, mapping.source_shapes, strict=True):
            block = 128 if name == "p.weight" else 4
            scales = random_scales(-(-shape[0] // block), -(-shape[1] // block))
            tensors |= {name: random_codes(*shape, top=0x78), f"{name}_scale_inv": scales}
            types |= {name: kind, f"{name}_scale_inv": scale_type}
            decoded = {"F8_E4M3": e4m3, "F8_E5M2": e5m2}[kind](tensors[name])
            values[name] = decoded * spread(scales, (block, block), shape)
    toy.write_single(tmp_path, tensors, types)
    found = loaded(tmp_path, layout)
    np.testing.assert_array_equal(found["plain"], values["p.weight"])
    grouped = [values[f"{part}.weight"].reshape(2, -1, 9) for part in "qkv"]
    np.testing.assert_array_equal(found["qkv"], np.concatenate(grouped, axis=1).reshape(-1, 9))
    np.testing.assert_array_equal(found["down"], np.stack([values["e.0.weight"].T, values["e.1.weight"].T]))
    report = check_weights(tmp_path, layout)
    assert report.dtypes == {kind: 6, scale_type: 6}
    assert report.skipped == ()


@pytest.mark.parametrize("name", ["w.scale", "w.weight_scale_inv"])
def test_scales_may_be_powers_of_two(tmp_path: Path, name: str) -> None:
    codes, scales = random_codes(6, 8), np.array([[120, 127], [130, 135]], np.uint8)
    expected = e4m3(codes) * spread(e8m0(scales), (4, 4), (6, 8))
    for scale_type in ("F8_E8M0", "U8"):
        toy.write_single(tmp_path, {"w.weight": codes, name: scales}, {"w.weight": "F8_E4M3", name: scale_type})
        toy.assert_same(loaded(tmp_path, WeightLayout((copied("w", "w.weight", 6, 8),))), {"w": expected})


def test_stacked_experts_have_stacked_scales(tmp_path: Path) -> None:
    codes, scales = random_codes(3, 8, 6), random_scales(3, 2, 2)
    toy.write_single(tmp_path, {"gate_up": codes, "gate_up_scale_inv": scales}, {"gate_up": "F8_E4M3"})
    mapping = expert_gate_up("w", ("e.{e}.gate", "e.{e}.up"), "gate_up", 3, 6, 4)
    expected = (e4m3(codes) * spread(scales, (4, 4), (3, 8, 6))).transpose(0, 2, 1)
    toy.assert_same(loaded(tmp_path, WeightLayout((mapping,))), {"w": expected})


@pytest.mark.parametrize(
    ("size", "count", "block"),
    [(576, 5, 128), (7168, 56, 128), (192, 2, 128), (257, 3, 128), (96, 3, 32), (64, 64, 1), (100, 1, 100)]
    + [(10, 3, 4), (20, 5, 4), (36, 3, 16), (77, 7, 11), (5, 0, None), (3, 4, None), (10, 6, None)],
)
def test_the_size_of_a_block_follows_from_the_shapes(size: int, count: int, block: int | None) -> None:
    assert quantized._block_size(size, count) == block


# FP4

EXPERTS = WeightLayout(
    (
        expert_gate_up("w1", ("model.e.{e}.gate.weight", "model.e.{e}.up.weight"), None, 2, 64, 6),
        expert_down("w2", "model.e.{e}.down.weight", None, 2, 64, 6),
    ),
    # The scales are found by their stored names, so a rename need not think of them.
    renames=((r"^layers\.0\.ffn\.experts\.(\d)\.w1\.weight$", r"model.e.\1.gate.weight"),)
    + ((r"^layers\.0\.ffn\.experts\.(\d)\.w3\.", r"model.e.\1.up."),)
    + ((r"^layers\.0\.ffn\.experts\.(\d)\.w2\.", r"model.e.\1.down."),),
)


@pytest.mark.parametrize("small_pieces", [False, True])
@pytest.mark.parametrize("kind", ["I8", "U8", "F4"])
def test_packed_fp4_experts_load_under_their_original_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, small_pieces: bool
) -> None:
    if small_pieces:
        monkeypatch.setattr(quantized, "_PIECE", 50)
        monkeypatch.setattr(quantized, "_CHUNK", 70)
    tensors, types, values = {}, {}, {}
    for expert in range(2):
        for part, (rows, columns) in {"w1": (6, 64), "w2": (64, 6), "w3": (6, 64)}.items():
            name = f"layers.0.ffn.experts.{expert}.{part}"
            codes = np.random.default_rng(len(tensors)).integers(0, 256, (rows, columns // 2)).astype(np.uint8)
            scales = np.random.default_rng(1).integers(110, 140, (rows, -(-columns // 32))).astype(np.uint8)
            tensors |= {f"{name}.weight": codes, f"{name}.scale": scales}
            types |= {f"{name}.weight": kind, f"{name}.scale": "F8_E8M0"}
            values[part, expert] = unpacked(codes) * spread(e8m0(scales), (1, 32), (rows, columns))
    toy.write_single(tmp_path, tensors, types)
    joined = [np.concatenate([values["w1", e].T, values["w3", e].T], axis=1) for e in (0, 1)]
    expected = {"w1": np.stack(joined), "w2": np.stack([values["w2", e].T for e in (0, 1)])}
    toy.assert_same(loaded(tmp_path, EXPERTS), expected)
    assert check_weights(tmp_path, EXPERTS).dtypes == {kind: 6, "F8_E8M0": 6}


def test_the_low_four_bits_come_first(tmp_path: Path) -> None:
    tensors = {"w.weight": np.array([[0x21, 0xF7]], np.uint8), "w.scale": np.array([[128]], np.uint8)}
    toy.write_single(tmp_path, tensors, {"w.weight": "U8", "w.scale": "F8_E8M0"})
    found = loaded(tmp_path, WeightLayout((copied("w", "w.weight", 1, 4),)))
    np.testing.assert_array_equal(found["w"], [[1, 2, 12, -12]])


# What does not fit

ONE = WeightLayout((copied("w", "w.weight", 8, 64),))
FP8 = random_codes(8, 64)
PACKED = random_codes(8, 32)
REFUSED = {
    "no scales": (
        {"w.weight": FP8},
        {"w.weight": "F8_E4M3"},
        "w.weight in model.safetensors is F8_E4M3 and needs its scales, w.weight_scale_inv or w.scale",
    ),
    "no fp4 scales": ({"w.weight": PACKED}, {"w.weight": "I8"}, "is I8 and needs its scales"),
    "bytes": ({"w.weight": FP8}, {"w.weight": "U8"}, "types other than F32, F16, BF16 (1): w.weight in"),
    "scale shape": (
        {"w.weight": FP8, "w.scale": np.ones((3, 2, 1))},
        {"w.weight": "F8_E4M3"},
        "w.scale in model.safetensors is [3, 2, 1], which does not divide [8, 64] into blocks of one size",
    ),
    "scale of no block": (
        {"w.weight": FP8, "w.scale": np.ones((6, 2))},
        {"w.weight": "F8_E5M2"},
        "is [6, 2], which does not divide [8, 64]",
    ),
    "scale type": (
        {"w.weight": FP8, "w.scale": np.ones((2, 2))},
        {"w.weight": "F8_E4M3", "w.scale": "I64"},
        "w.scale in model.safetensors has type I64; scales are one of",
    ),
    "fp4 block": (
        {"w.weight": PACKED, "w.scale": np.ones((8, 4))},
        {"w.weight": "I8", "w.scale": "F8_E8M0"},
        "is [8, 4], which does not divide [8, 64] into pairs of values and blocks of [1, 32]",
    ),
    "shape": (
        {"w.weight": FP8[:4], "w.scale": np.ones((1, 1))},
        {"w.weight": "F8_E4M3"},
        "w.weight in model.safetensors holds [4, 64] values, expected [8, 64]",
    ),
    "fp4 shape": (
        {"w.weight": FP8, "w.scale": np.ones((8, 2))},
        {"w.weight": "I8", "w.scale": "F8_E8M0"},
        "holds [8, 128] values, expected [8, 64]",
    ),
    "scales of a weight in 16 bits": (
        {"w.weight": FP8, "w.scale": np.ones((8, 2))},
        {"w.weight": "BF16"},
        "left over tensors, which the model does not have (1): w.scale",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_quantized_tensors_that_do_not_fit_are_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    tensors, types, message = REFUSED[kind]
    toy.write_single(tmp_path, tensors, types)
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path, ONE)
    assert message in str(caught.value)
    assert str(caught.value).count("(1)") == 1, "one mistake is reported once"


def test_mindformers_checkpoints_hold_no_codes(tmp_path: Path) -> None:
    data = toy.file_bytes({"w": FP8, "w.scale": np.ones((1, 1))}, {"w": "F8_E4M3"})
    (tmp_path / toy.rank_file()).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"types other than F32, F16, BF16 \(1\): w in"):
        check_weights(tmp_path, ONE)


@pytest.mark.parametrize("kind", ["F8_E4M3", "I8"])
def test_decoding_needs_little_memory_beside_the_parameter(tmp_path: Path, kind: str) -> None:
    shape = (4096, 2048)
    columns, block = (2048, (128, 128)) if kind == "F8_E4M3" else (1024, (1, 32))
    scales = np.full((shape[0] // block[0], shape[1] // block[1]), 127, np.uint8)
    tensors = {"w.weight": np.full((4096, columns), 0x22, np.uint8), "w.scale": scales}
    toy.write_single(tmp_path, tensors, {"w.weight": kind, "w.scale": "F8_E8M0"})
    model = toy.Model()
    tracemalloc.start()
    try:
        load_weights(tmp_path, WeightLayout((copied("w", "w.weight", *shape),)), model.assign)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < model.arrays["w"].nbytes + (6 << 20)  # 32 MiB and the scratch


def test_a_quantized_model_is_exported_as_one_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindformers_ext.models import families

    monkeypatch.setattr(families, "weight_layout_of", lambda config: ONE)
    scales = np.full((1, 1), 0.5, np.float32)
    toy.write_single(tmp_path / "fp8", {"w.weight": FP8, "w.scale": scales}, {"w.weight": "F8_E4M3"})
    config = {"model_type": "x", "quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    output = tmp_path / "out"
    assert export.main(["--load_path", str(tmp_path / "fp8"), "--output", str(output)]) == 0
    assert json.loads((output / "config.json").read_text()) == {"model_type": "x", "torch_dtype": "bfloat16"}
    with TensorFile(output / "model.safetensors") as file:
        assert list(file.tensors) == ["w.weight"]
        assert file.tensors["w.weight"].dtype == "BF16"
    toy.assert_same(loaded(output, ONE), {"w": e4m3(FP8) / 2})

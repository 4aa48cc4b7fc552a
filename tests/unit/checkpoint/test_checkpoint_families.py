"""DeepSeek's checkpoints as they are published, in FP8 and FP4: the same parameters as from the numbers in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindformers_ext.checkpoint import check_weights, load_weights
from mindformers_ext.models.families import weight_layout_of
from mindformers_ext.models.weights import WeightLayout
from tests.unit.checkpoint import toy
from tests.unit.checkpoint.codes import e4m3, e8m0, random_codes, spread, unpacked

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"
BLOCK = 16  # of the small models; the published ones have 128

Stored = tuple[dict[str, np.ndarray], dict[str, str], dict[str, np.ndarray]]


def read(family: str) -> tuple[WeightLayout, dict[str, np.ndarray]]:
    folder = CHECKPOINTS / family
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    layout = weight_layout_of(config | {"quantization_config": quantization})
    return layout, load_file(folder / "model.safetensors")


def loaded(path: Path, layout: WeightLayout) -> dict[str, np.ndarray]:
    model = toy.Model()
    load_weights(path, layout, model.assign)
    return model.arrays


def fp8(name: str, shape: tuple[int, ...], scale: str, powers: bool) -> Stored:
    """Codes and scales under their names, their types, and the numbers that they are."""
    codes = random_codes(*shape, top=0x7F)
    exponents = np.random.default_rng(3).integers(115, 130, [-(-size // BLOCK) for size in shape]).astype(np.uint8)
    scales = exponents if powers else e8m0(exponents) * np.float32(1.25)
    factors = e8m0(scales) if powers else scales
    types = {name: "F8_E4M3", scale: "F8_E8M0" if powers else "F32"}
    return {name: codes, scale: scales}, types, {name: e4m3(codes) * spread(factors, (BLOCK, BLOCK), shape)}


def fp4(name: str, shape: tuple[int, ...], scale: str) -> Stored:
    codes = np.random.default_rng(4).integers(0, 256, (shape[0], shape[1] // 2)).astype(np.uint8)
    exponents = np.random.default_rng(5).integers(115, 130, (shape[0], -(-shape[1] // 32))).astype(np.uint8)
    numbers = unpacked(codes) * spread(e8m0(exponents), (1, 32), shape)
    return {name: codes, scale: exponents}, {name: "I8", scale: "F8_E8M0"}, {name: numbers}


def write_both(folder: Path, tensors: Mapping[str, np.ndarray], parts: list[Stored]) -> None:
    """The quantized checkpoint, and one of the same numbers in float32."""
    stored, types, numbers = dict(tensors), {name: _type(array) for name, array in tensors.items()}, dict(tensors)
    wide = dict(types)
    for arrays, kinds, values in parts:
        stored |= arrays
        types |= kinds
        numbers |= values
    toy.write_single(folder / "quantized", stored, types)
    toy.write_single(folder / "wide", numbers, wide)


def _type(array: np.ndarray) -> str:
    return {"float32": "F32", "int64": "I64"}[array.dtype.name]


def test_deepseek_v3_in_fp8(tmp_path: Path) -> None:
    layout, tensors = read("deepseek_v3")
    names = [name for name in tensors if re.search(r"(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$", name)]
    parts = [fp8(name, tensors[name].shape, f"{name}_scale_inv", powers=False) for name in names]
    write_both(tmp_path, tensors, parts)
    toy.assert_same(loaded(tmp_path / "quantized", layout), loaded(tmp_path / "wide", layout))
    assert check_weights(tmp_path / "quantized", layout).dtypes["F8_E4M3"] == len(names) > 10


@pytest.mark.parametrize("original", [True, False], ids=["original names", "saved names"])
def test_deepseek_v4_in_fp8_with_experts_in_fp4(tmp_path: Path, original: bool) -> None:
    layout, saved = read("deepseek_v4")
    tensors = {_original(name) if original else name: array for name, array in saved.items()}
    parts = []
    for name, array in tensors.items():
        scale = name.replace(".weight", ".scale")
        if re.search(r"\.ffn\.experts\.\d+\.w[123]\.weight$", name):
            parts.append(fp4(name, array.shape, scale))
        elif re.search(r"\.(wq_a|wq_b|wo_a|wo_b|shared_experts\.w[123])\.weight$", name):
            parts.append(fp8(name, array.shape, scale, powers=True))
    write_both(tmp_path, tensors, parts)
    toy.assert_same(loaded(tmp_path / "quantized", layout), loaded(tmp_path / "wide", layout))
    found = check_weights(tmp_path / "quantized", layout).dtypes
    assert found["I8"] > 20 and found["F8_E4M3"] > 10 and found["F8_E8M0"] == found["I8"] + found["F8_E4M3"]


def _original(name: str) -> str:
    name = re.sub(r"^model\.hc_head\.hc_", "hc_head_", name).removeprefix("model.")
    return name.replace("embed_tokens.", "embed.")

"""docs/checkpoints.md says truly which types load."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mindformers_ext.checkpoint import CheckpointError, check_weights, load_weights
from mindformers_ext.models.transforms import copied
from mindformers_ext.models.weights import WeightLayout
from tests.unit.checkpoint import toy

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
TYPES = PAGE.partition("\n## Types\n")[2].partition("\n### ")[0]
ROWS = re.findall(r"^\| ([A-Z].+) \| (.+) \| (.+) \|$", TYPES, re.MULTILINE)
CASES = [(stored, weight, ids) for types, weight, ids in ROWS for stored in types.split(", ")]


def test_the_page_has_the_table() -> None:
    assert len(CASES) == len({stored for stored, _, _ in CASES}) == 13


@pytest.mark.parametrize(("stored", "weight", "ids"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_each_type_is_read_or_refused_as_the_page_says(
    tmp_path: Path, stored: str, weight: str, ids: str, dtype: str
) -> None:
    says = weight if dtype == "float32" else ids
    columns = 16 if stored in ("I8", "U8", "F4") else 32  # of pairs
    tensors = {"w.weight": np.ones((4, columns), np.uint8)}
    types = {"w.weight": stored}
    layout = WeightLayout((copied("w", "w.weight", 4, 32, dtype=dtype),))
    if "scales" in says:
        toy.write_single(tmp_path, tensors, types)
        with pytest.raises(CheckpointError, match="needs its scales"):
            check_weights(tmp_path, layout)
        tensors["w.scale"] = np.full((4, 1), 127)
        types["w.scale"] = "F8_E8M0"
    toy.write_single(tmp_path, tensors, types)
    if says == "refused":
        with pytest.raises(CheckpointError, match=rf"types other than .*: w\.weight in model\.safetensors is {stored}"):
            check_weights(tmp_path, layout)
        return
    assert says.startswith("read")
    model = toy.Model()
    load_weights(tmp_path, layout, model.assign)
    assert model.arrays["w"].dtype == dtype
    if "scales" not in says:
        np.testing.assert_array_equal(model.arrays["w"], 1)


def test_the_messages_on_the_page_are_the_real_ones(tmp_path: Path) -> None:
    layout = WeightLayout((copied("n", "model.norm.weight", 4),))
    shown = re.findall(r"`(model\.norm\.weight in model\.safetensors is F8_E4M3 .*?)`", PAGE)
    toy.write_single(tmp_path, {"model.norm.weight": np.ones(4)}, "F8_E4M3")
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path, layout)
    assert len(shown) == 1 and shown[0] in str(caught.value)

    shown = re.findall(r"`(w\.scale in model\.safetensors .*?)`", PAGE)
    tensors = {"w.weight": np.ones((8, 64)), "w.scale": np.ones((6, 2))}
    toy.write_single(tmp_path, tensors, {"w.weight": "F8_E4M3"})
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path, WeightLayout((copied("w", "w.weight", 8, 64),)))
    assert len(shown) == 1 and shown[0] in str(caught.value)

"""scripts/check_layers.py finds the first layer that differs."""

import json
import pathlib
import sys

import numpy as np
import pytest

from scripts import check_layers

CHECKPOINT = pathlib.Path(__file__).parents[1] / "data" / "checkpoints" / "qwen3"
KINDS = ["full_attention + dense", "sliding_attention + moe"]


def states(**changes):
    values = {
        "embedding": np.ones((3, 4), np.float32),
        "layer 0": np.full((3, 2, 4), 10, np.float32),
        "layer 1": np.full((3, 2, 4), -20, np.float32),
        "logits": np.ones((3, 5), np.float32),
    }
    return values | {name.replace("_", " "): value for name, value in changes.items()}


def test_equal_states_pass_whatever_their_axes():
    rows = check_layers.compare(states(layer_0=np.full((3, 8), 10, np.float32)), states(), KINDS)
    assert [row.difference for row in rows] == [0, 0, 0, 0]
    assert [row.kind for row in rows] == ["", *KINDS, ""]
    assert not check_layers.differing(rows, 1e-4)
    assert check_layers.report(rows, 1e-4).splitlines()[-1] == "no difference above 0.0001; the largest is 0.0e+00"


def test_first_difference_is_named_and_relative_to_the_largest_value():
    off = states(layer_1=states()["layer 1"] + np.float32(0.02), logits=states()["logits"] * 3)
    rows = check_layers.compare(off, states(), KINDS)
    assert rows[2].largest == 20 and rows[2].difference == pytest.approx(1e-3, rel=1e-4)
    assert [row.name for row in check_layers.differing(rows, 1e-4)] == ["layer 1", "logits"]
    assert [row.name for row in check_layers.differing(rows, 1e-2)] == ["logits"]
    lines = check_layers.report(rows, 1e-4).splitlines()
    assert lines[-1] == "first difference above 0.0001: layer 1 sliding_attention + moe"
    assert [line.split()[0] for line in lines[1:-1] if line.endswith("<-")] == ["layer", "logits"]


def test_one_nan_is_a_difference():
    broken = states()["layer 0"].copy()
    broken[2, 1, 3] = np.nan
    rows = check_layers.compare(states(layer_0=broken), states(), KINDS)
    assert [row.name for row in check_layers.differing(rows, 1e9)] == ["layer 0"]


def test_models_of_other_depth_or_width_cannot_be_compared():
    shallow = states()
    del shallow["layer 1"]
    with pytest.raises(ValueError, match="transformers embedding, layer 0, layer 1, logits"):
        check_layers.compare(shallow, states(), KINDS)
    with pytest.raises(ValueError, match=r"layer 0 has shape \(3, 4\) here and \(3, 2, 4\)"):
        check_layers.compare(states(layer_0=np.ones((3, 4), np.float32)), states(), KINDS)


def test_states_of_a_checkpoint_lead_to_its_stored_logits_in_any_pieces():
    case = json.loads((CHECKPOINT / "reference.json").read_text(encoding="utf-8"))["cases"][-1]
    whole, kinds = check_layers.our_states(CHECKPOINT, case["input_ids"], len(case["input_ids"]))
    pieces, _ = check_layers.our_states(CHECKPOINT, case["input_ids"], 3)
    assert list(whole) == ["embedding", *(f"layer {number}" for number in range(len(kinds))), "logits"]
    np.testing.assert_allclose(whole["logits"][-1], case["logits_last"], atol=5e-4)
    assert not check_layers.differing(check_layers.compare(pieces, whole, kinds), 1e-5)


def test_exit_code_tells_whether_anything_differs(monkeypatch, capsys):
    ids = [5, 6, 7]
    peer, _ = check_layers.our_states(CHECKPOINT, ids, len(ids))
    monkeypatch.setattr(check_layers, "ask_peer", lambda python, folder, given: peer)
    monkeypatch.setattr(sys, "argv", ["check_layers.py", str(CHECKPOINT), "--ids", *map(str, ids)])
    assert check_layers.main() == 0
    peer["layer 1"] = peer["layer 1"] * np.float32(1.01)
    assert check_layers.main() == 1
    assert "first difference above 0.0001: layer 1 full_attention + dense" in capsys.readouterr().out

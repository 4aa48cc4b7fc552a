"""Rotary tables equal those of transformers."""

import json
import pathlib

import numpy as np
import pytest

from mindformers_ext.models.config import RopeParameters
from mindformers_ext.models.rope import RotaryTable, inverse_frequencies

CASES = json.loads((pathlib.Path(__file__).parents[2] / "data" / "rope.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['theta']:g}")
def test_scaled_frequencies_equal_transformers(case):
    scaling = {key: value for key, value in case["parameters"].items() if key != "rope_type"}
    rope = RopeParameters(case["parameters"]["rope_type"], case["theta"], scaling)
    frequencies, factor = inverse_frequencies(rope, 64, 131072)
    np.testing.assert_allclose(frequencies, case["frequencies"], rtol=2e-6)
    assert factor == pytest.approx(case["attention_factor"], rel=1e-7)


def test_missing_parameter_is_named():
    with pytest.raises(ValueError, match="'llama3' needs low_freq_factor"):
        inverse_frequencies(RopeParameters("llama3", 1e4, {"factor": 8.0}), 64, 8192)


def test_unknown_type_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="rope_type 'longrope' is not supported; known are default, linear, llama3, yarn"
    ):
        inverse_frequencies(RopeParameters("longrope"), 64, 8192)


def test_table_grows_without_changing_earlier_rows():
    table = RotaryTable(RopeParameters(), 8, 4096)
    first, _ = table.lookup(np.arange(10))
    later, sin = table.lookup(np.arange(3000))
    np.testing.assert_array_equal(later[:10], first)
    np.testing.assert_allclose(sin[2999, 0], np.sin(np.float32(2999)), atol=1e-6)

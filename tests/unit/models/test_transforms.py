"""Views of HuggingFace's tensors in fused parameters: right places, every element once, both forms of experts."""

from __future__ import annotations

import numpy as np
import pytest

from mindformers_ext.models.transforms import (
    copied,
    expert_down,
    expert_gate_up,
    fused_qkv,
    interleaved_gate_up,
    joined_rows,
)
from mindformers_ext.models.weights import Sources, WeightMapping

HIDDEN, FFN, EXPERTS = 4, 3, 5
GATE_UP = expert_gate_up("weight1", ("e.{e}.gate", "e.{e}.up"), "gate_up", EXPERTS, HIDDEN, FFN)
DOWN = expert_down("weight2", "e.{e}.down", "down", EXPERTS, HIDDEN, FFN)
MAPPINGS = [
    copied("p", "p", 3, 2),
    fused_qkv("qkv", ("q", "k", "v"), 2, 3, 4, (5,)),
    fused_qkv("qkv_bias", ("q", "k", "v"), 2, 3, 4, ()),
    interleaved_gate_up("fc1", ("gate", "up"), 3, (2,)),
    interleaved_gate_up("fc1_bias", ("gate", "up"), 3, ()),
    joined_rows("joined", ("above", "below"), (3, 4), (2,)),
    GATE_UP,
    DOWN,
    fused_qkv("gated_qkv", ("q", "k", "v"), 2, 3, 4, (5,), gated=True),
    fused_qkv("gated_qkv_bias", ("q", "k", "v"), 2, 3, 4, (), gated=True),
    joined_rows("in_proj", ("a", "b", "c"), (3, 1, 2), (5,)),
]


def tensors_of(form: Sources) -> list[np.ndarray]:
    """Distinct values for all tensors of a form."""
    first, tensors = 0, []
    for shape in form.shapes:
        size = int(np.prod(shape))
        tensors.append(np.arange(first, first + size, dtype=np.float32).reshape(shape))
        first += size
    return tensors


def filled(mapping: WeightMapping, form: Sources, tensors: list[np.ndarray]) -> np.ndarray:
    parameter = np.full(mapping.shape, np.nan, np.float32)
    for view, tensor in zip(form.parts(parameter), tensors, strict=True):
        view[...] = tensor.reshape(view.shape)
    return parameter


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: mapping.name)
def test_the_views_of_every_form_cover_each_element_once(mapping: WeightMapping) -> None:
    for form in mapping.forms:
        assert len(form.names) == len(set(form.names)) == len(form.shapes)
        parameter = np.zeros(mapping.shape)
        for view, shape in zip(form.parts(parameter), form.shapes, strict=True):
            assert view.size == np.prod(shape)
            view += 1
        np.testing.assert_array_equal(parameter, 1)


def test_qkv_rows_are_fused_group_by_group() -> None:
    mapping = MAPPINGS[1]
    q, k, v = tensors_of(mapping.forms[0])
    groups = [np.concatenate([q[g * 12 : g * 12 + 12], k[g * 4 : g * 4 + 4], v[g * 4 : g * 4 + 4]]) for g in (0, 1)]
    np.testing.assert_array_equal(filled(mapping, mapping.forms[0], [q, k, v]), np.concatenate(groups))


def test_gates_of_a_group_follow_its_queries() -> None:
    mapping = next(mapping for mapping in MAPPINGS if mapping.name == "gated_qkv")
    q, k, v = tensors_of(mapping.forms[0])
    heads = q.reshape(2, 3, 2, 4, 5)  # group, head, query or gate
    expected = [
        part.reshape(-1, 5) for g in (0, 1) for part in (heads[g, :, 0], heads[g, :, 1], k[4 * g :][:4], v[4 * g :][:4])
    ]
    np.testing.assert_array_equal(filled(mapping, mapping.forms[0], [q, k, v]), np.concatenate(expected))


def test_joined_rows_keep_their_order() -> None:
    tensors = tensors_of(MAPPINGS[-1].forms[0])
    np.testing.assert_array_equal(filled(MAPPINGS[-1], MAPPINGS[-1].forms[0], tensors), np.concatenate(tensors))


def test_gate_and_up_rows_alternate() -> None:
    mapping = MAPPINGS[3]
    gate, up = tensors_of(mapping.forms[0])
    expected = np.array([gate[0], up[0], gate[1], up[1], gate[2], up[2]])
    np.testing.assert_array_equal(filled(mapping, mapping.forms[0], [gate, up]), expected)


def test_rows_of_the_second_projection_follow_those_of_the_first() -> None:
    mapping = MAPPINGS[5]
    above, below = tensors_of(mapping.forms[0])
    np.testing.assert_array_equal(filled(mapping, mapping.forms[0], [above, below]), np.concatenate([above, below]))


def test_experts_one_by_one_and_stacked_make_the_same_parameter() -> None:
    single, stacked = GATE_UP.forms
    tensors = tensors_of(single)
    expected = np.stack([np.concatenate([tensors[2 * e].T, tensors[2 * e + 1].T], axis=1) for e in range(EXPERTS)])
    assert single.names[2:4] == ("e.1.gate", "e.1.up")
    np.testing.assert_array_equal(filled(GATE_UP, single, tensors), expected)
    joined = np.stack([np.concatenate([tensors[2 * e], tensors[2 * e + 1]]) for e in range(EXPERTS)])
    np.testing.assert_array_equal(filled(GATE_UP, stacked, [joined]), expected)

    single, stacked = DOWN.forms
    tensors = tensors_of(single)
    expected = np.stack([tensor.T for tensor in tensors])
    np.testing.assert_array_equal(filled(DOWN, single, tensors), expected)
    np.testing.assert_array_equal(filled(DOWN, stacked, [np.stack(tensors)]), expected)


def test_experts_without_a_stacked_name_have_one_form() -> None:
    assert len(expert_down("w", "e.{e}.down", None, 2, 3, 4).forms) == 1

"""Layer state in place, and the additive bias of a forward."""

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.models.cache import KeyValueState
from mindformers_ext.models.mask import MASKED, attention_bias


def tensor(*shape, start=0):
    return Tensor(np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape))


def test_state_grows_in_steps_and_keeps_what_it_holds():
    state = KeyValueState(2, 1, 4, max_length=300)
    first = tensor(2, 1, 100, 4)
    state.update(first, first)
    assert state.capacity == 128
    second = tensor(2, 1, 60, 4, start=5000)
    key, _ = state.update(second, second)
    assert (state.capacity, state.length) == (256, 160)
    np.testing.assert_array_equal(key.asnumpy()[:, :, :100], first.asnumpy())
    np.testing.assert_array_equal(key.asnumpy()[:, :, 100:160], second.asnumpy())
    state.reserve(300)
    assert state.capacity == 300


def test_state_refuses_more_tokens_than_it_was_made_for():
    with pytest.raises(ValueError, match="made for 8 tokens a row and cannot hold 9"):
        KeyValueState(1, 1, 2, max_length=8).reserve(9)


def test_reorder_in_place_leaves_the_shared_tokens_where_they_are():
    state = KeyValueState(3, 1, 2, max_length=8)
    values = tensor(3, 1, 5, 2)
    state.update(values, values)
    buffer = state.key
    state.reorder(np.array([1, 0, 0]), shared=3)
    expected = values.asnumpy().copy()
    expected[:, :, 3:] = expected[[1, 0, 0]][:, :, 3:]
    assert state.key is buffer
    np.testing.assert_array_equal(state.key.asnumpy()[:, :, :5], expected)
    np.testing.assert_array_equal(state.value.asnumpy()[:, :, :5], expected)


def test_reorder_copies_rows_and_crop_forgets_the_tail():
    state = KeyValueState(3, 1, 2, max_length=8)
    values = tensor(3, 1, 2, 2)
    state.update(values, values)
    state.reorder(np.array([2, 2, 0, 1]))
    np.testing.assert_array_equal(state.key.asnumpy()[:, :, :2], values.asnumpy()[[2, 2, 0, 1]])
    state.crop(1)
    replaced = tensor(4, 1, 1, 2, start=100)
    state.update(replaced, replaced)
    assert state.length == 2
    np.testing.assert_array_equal(state.value.asnumpy()[:, :, 1:2], replaced.asnumpy())


def test_clear_frees_the_buffers():
    state = KeyValueState(1, 2, 4, max_length=64)
    state.update(tensor(1, 2, 3, 4), tensor(1, 2, 3, 4))
    assert state.nbytes == 2 * 2 * 64 * 4 * 4
    state.clear()
    assert (state.nbytes, state.length) == (0, 0)


def test_bias_is_causal_and_hides_pads_and_empty_slots():
    bias = attention_bias(np.array([[0, 1, 1, 1], [1, 1, 1, 1]]), batch=2, length=2, past=2, slots=6)
    visible = bias[:, 0] == 0
    assert bias.shape == (2, 1, 2, 6)
    np.testing.assert_array_equal(visible[0], [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(visible[1], [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])


def test_additive_mask_is_widened_to_the_buffer():
    mask = np.array([[[[0.0, -1.5]]]], np.float32)
    np.testing.assert_array_equal(attention_bias(mask, 1, 1, 1, 3)[0, 0, 0], np.array([0, -1.5, MASKED], np.float32))


@pytest.mark.parametrize(
    "mask",
    [
        np.ones((1, 3), int),
        np.ones((2, 4), int),
        np.ones((1, 1, 2, 4), int),
        np.ones((1, 1, 2, 4), bool),
        np.zeros((1, 1, 1, 4), np.float32),
        np.zeros((3, 1, 2, 4), np.float32),
    ],
    ids=lambda mask: f"{mask.dtype}{mask.shape}",
)
def test_a_mask_that_does_not_fit_is_refused(mask):
    with pytest.raises(ValueError, match="does not fit 1 rows of 2 cached and 2 new tokens"):
        attention_bias(mask, batch=1, length=2, past=2, slots=4)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_additive_masks_of_other_types_become_float32(dtype):
    bias = attention_bias(np.zeros((1, 1, 2, 4), dtype), batch=1, length=2, past=2, slots=4)
    assert bias.dtype == np.float32

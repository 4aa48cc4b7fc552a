"""Rows of a state that become those of another one, and pads in front that come and go."""

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.models.cache import KeyValueState
from mindformers_ext.ops import reference


def filled(rows, length, start, dim=2):
    state = KeyValueState(rows, 1, dim, max_length=1 << 20)
    values = np.arange(start, start + rows * length * dim, dtype=np.float32).reshape(rows, 1, length, dim)
    state.update(Tensor(values), Tensor(-values))
    return state, values


@pytest.mark.parametrize("length", [3, 7])
def test_the_last_tokens_of_a_row_become_the_last_ones_here(length):
    state, before = filled(3, 5, 100)
    source, values = filled(2, length, 500)
    state.take_rows(np.array([2, 0]), source)
    found = state.key.asnumpy()[:, :, :5]
    kept = min(5, length)
    for row, origin in ((2, 0), (0, 1)):
        np.testing.assert_array_equal(found[row, 0, 5 - kept :], values[origin, 0, length - kept :])
        assert not found[row, 0, : 5 - kept].any()
    np.testing.assert_array_equal(found[1], before[1])
    np.testing.assert_array_equal(state.value.asnumpy()[:, :, :5], -found)


@pytest.mark.parametrize("by", [-3, 0, 2, 200])
def test_a_shift_moves_every_token_and_makes_room(by):
    state, values = filled(2, 5, 1)
    state.shift(by)
    assert state.length == 5 + by
    found = state.key.asnumpy()[:, :, : state.length]
    kept = min(5, 5 + by)
    np.testing.assert_array_equal(found[:, :, state.length - kept :], values[:, :, 5 - kept :])
    assert not found[:, :, : max(by, 0)].any()


@pytest.mark.parametrize("by", [-4, -1, 0, 3])
def test_plain_operations_do_what_those_on_the_host_do(by):
    base = np.random.default_rng(0).normal(size=(4, 2, 9, 3)).astype(np.float32)
    source = Tensor(np.random.default_rng(1).normal(size=(2, 2, 6, 3)).astype(np.float32))
    found = []
    for implementation in (ops, reference):
        buffer = Tensor(base.copy())
        implementation.shift_slots(buffer, by, 5)
        moved = buffer.asnumpy()[:, :, : 5 + by].copy()
        implementation.put_rows(buffer, np.array([3, 1]), 5, source, 2, 6)
        found.append((moved, buffer.asnumpy()[:, :, : min(5, 5 + by)].copy(), buffer.asnumpy()[[3, 1], :, :5].copy()))
    for ours, plain in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("end", [3, 8, 21])
def test_rows_of_a_ring_keep_the_order_of_their_tokens(end):
    size = 5
    ring = Tensor(np.zeros((3, 1, size, 1), np.float32))
    source = Tensor(np.zeros((1, 1, size, 1), np.float32))
    for slot in range(12):
        ops.write_ring(source, slot, Tensor(np.full((1, 1, 1), slot + 1, np.float32)))
    ops.put_ring_rows(ring, np.array([1]), end, source, 12)
    assert ops.read_ring(ring, end - size, end).asnumpy()[1, :, 0].tolist() == [8, 9, 10, 11, 12]
    assert not ring.asnumpy()[[0, 2]].any()
    ops.shift_ring(ring, 3)
    assert ops.read_ring(ring, end + 3 - size, end + 3).asnumpy()[1, :, 0].tolist() == [8, 9, 10, 11, 12]

"""Rows of a state that become those of another one, and pads in front that come and go."""

from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.models.cache import KeyValueState
from mindformers_ext.models.context_parallel import SharedState
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


class Processes:
    """Several processes in one: what each sums up is added when all of them have."""

    def __init__(self, size):
        self.sums, self.turn = {}, 0
        self.groups = [SimpleNamespace(size=size, rank=rank, all_reduce=self._first) for rank in range(size)]

    def _first(self, array):
        self.sums.setdefault(self.turn, []).append(array)
        self.turn += 1
        return array

    def together(self, calls):
        """Runs the calls of all processes, first to learn what they sum, then with the sums."""
        self.sums = {}
        for call in calls:
            self.turn = 0
            call()
        totals = {turn: sum(arrays) for turn, arrays in self.sums.items()}
        for group, call in zip(self.groups, calls, strict=True):
            turns = iter(range(len(totals)))
            group.all_reduce = lambda array, turns=turns: totals[next(turns)]
            call()
            group.all_reduce = self._first


@pytest.mark.parametrize("by", [-4, 0, 3])
@pytest.mark.parametrize("length", [4, 9])
def test_rows_of_a_sequence_that_processes_share_are_taken_by_all_of_them(by, length):
    size, rows = 3, np.array([1])
    processes = Processes(size)
    whole, values = filled(2, 8, 100)
    other, new = filled(1, length, 900)
    shared, sources = [], []
    for rank, group in enumerate(processes.groups):
        for array, target in ((values, shared), (new, sources)):
            total = array.shape[2]
            # The first half in contiguous parts, the rest in turn, as a prefill and steps leave them.
            half = total // 2
            own = [s for s in range(total) if (s * size // max(half, 1) if s < half else s % size) == rank]
            part = SharedState(KeyValueState(len(array), 1, 2, max_length=64), group)
            part.state.update(*(Tensor(np.ascontiguousarray(sign * array[:, :, own])) for sign in (1, -1)))
            part.slots, part.length = np.array(own, np.int64), total
            target.append(part)
    whole.shift(by)
    whole.take_rows(rows, other)
    for part in shared:
        part.shift(by)
    processes.together([lambda p=p, s=s: p.take_rows(rows, s) for p, s in zip(shared, sources, strict=True)])
    assert sorted(np.concatenate([part.slots for part in shared])) == list(range(8 + by))
    for part in shared:
        held = part.state.key.asnumpy()[:, :, : len(part.slots)]
        np.testing.assert_array_equal(held, whole.key.asnumpy()[:, :, part.slots])
        assert part.length == whole.length

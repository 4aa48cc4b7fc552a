"""Groups of one process, the order of their creation on many, counters, failures, and agreement."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.parallel import AXES, ParallelDims, groups
from mindformers_ext.parallel.agreement import PeerError, failing_together, first_error, require_same
from mindformers_ext.parallel.collectives import Group, Traffic
from mindformers_ext.parallel.mesh import Mesh


@pytest.mark.parametrize("make", [lambda x: x, Tensor], ids=["array", "tensor"])
def test_a_group_of_one_gives_back_what_it_gets_and_counts_nothing(make):
    context = groups.single()
    assert set(context.groups) == set(AXES)
    group = context.tp
    x = make(np.arange(6, dtype=np.int32).reshape(1, 2, 3))
    for result, shape in (
        (group.all_reduce(x), (1, 2, 3)),
        (group.all_gather(x), (1, 1, 2, 3)),
        (group.reduce_scatter(x), (2, 3)),
        (group.all_to_all(x), (1, 2, 3)),
        (group.broadcast(x, 0), (1, 2, 3)),
    ):
        assert type(result) is type(x) and result.shape == shape
        assert np.asarray(result if make is not Tensor else result.asnumpy()).ravel().tolist() == list(range(6))
    group.barrier()
    assert group.all_gather_object({"a": [1, None]}) == [{"a": [1, None]}]
    assert group.all_gather_object(b"\x00\xff") == [b"\x00\xff"]
    assert group.any(True) and not group.any(False)
    assert context.traffic.counts == {}
    assert context.previous_stage is None and context.next_stage is None


@pytest.mark.parametrize("make", [np.asarray, Tensor], ids=["array", "tensor"])
def test_scalars_and_vectors_of_one_element_a_rank_travel_like_larger_arrays(make, monkeypatch):
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *options: None)
    ends = socket.socketpair()
    pairs = [Group("tp", (0, 1), rank, mesh=Mesh(rank, {1 - rank: ends[rank]})) for rank in range(2)]

    def collect(group):
        scalar = make(np.array(3 + group.rank, np.int32))
        vector = make(np.array([10, 20], np.int32) + group.rank)
        found = [
            group.all_reduce(scalar),
            group.broadcast(scalar, 1),
            group.all_gather(scalar),
            group.reduce_scatter(vector),
            group.all_to_all(vector),
        ]
        return [np.asarray(one if make is np.asarray else one.asnumpy()).tolist() for one in found]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(collect, pairs, timeout=60)
    assert first == [7, 4, [3, 4], 21, [10, 11]]
    assert second == [7, 4, [3, 4], 41, [20, 21]]


def test_wrong_arguments_are_refused_before_anything_is_sent():
    traffic = Traffic()
    pair = Group("tp", (4, 5), 5, traffic=traffic)
    assert (pair.rank, pair.size) == (1, 2)
    four = Group("tp", range(4), 2, traffic=traffic)
    x = np.zeros((3, 2), np.float32)
    for call, message in (
        (lambda: pair.all_to_all(x), r"all_to_all in group 'tp': the first dimension of \(3, 2\) must be .* 2"),
        (lambda: pair.reduce_scatter(x), "the first dimension"),
        (lambda: pair.broadcast(x, 2), "2 is not a member, 0 to 1"),
        (lambda: pair.send(x, 1), "member 1 of 2 cannot have peer 1"),
        (lambda: four.receive((3,), np.float32, 1), "member 2 of 4 cannot have peer 1"),
        (lambda: pair.all_reduce(x > 0), "not bool"),
        (lambda: pair.all_reduce(x.astype(np.float64)), "not float64"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert traffic.counts == {}


class Broken:
    def all_reduce(self, x):
        raise RuntimeError("CollectiveWait failed\n- C++ call stack")


def test_a_failing_collective_names_itself_its_group_and_this_rank():
    group = Group("tp", range(16), 3)
    group._device = Broken()
    with pytest.raises(ConnectionError) as raised:
        group.all_reduce(np.zeros(2, np.float32))
    assert str(raised.value) == (
        "all_reduce in group 'tp' (ranks 0, 1, 2, 3, 4, 5, 6, 7, ...) failed on rank 3: CollectiveWait failed"
    )


class Echo:
    """A device of a group whose other ranks give the same."""

    def __init__(self, size):
        self.size = size

    def all_reduce(self, x):
        return x * self.size

    def all_gather(self, x):
        return Tensor(np.stack([x.asnumpy()] * self.size))

    def send(self, x, peer):
        pass


def test_traffic_counts_calls_and_the_bytes_of_a_native_implementation():
    traffic = Traffic()
    four, pair = Group("tp", range(4), 0, traffic=traffic), Group("stages", (0, 4), 0, traffic=traffic)
    four._device, pair._device = Echo(4), Echo(2)
    x = np.zeros(100, np.float32)
    for _ in range(3):
        four.all_reduce(x)
    four.all_gather(x)
    pair.send(x, 1)
    counts = {key: (count.calls, count.bytes) for key, count in traffic.counts.items()}
    assert counts == {("all_reduce", "tp"): (3, 1800), ("all_gather", "tp"): (1, 1200), ("send", "stages"): (1, 400)}
    assert (traffic.total().calls, traffic.total().bytes) == (5, 3400)
    assert traffic.total(group="tp").bytes == 3000 and traffic.total(collective="send").calls == 1
    traffic.clear()
    assert traffic.total().calls == 0


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(1, 2, 1, 2, 2, 4, 8),
        ParallelDims(2, 1, 2, 1, 2, 1, 8),
        ParallelDims(1, 1, 1, 1, 8, 1, 8),
        ParallelDims(1, 1, 1, 2, 3, 2, 6),
        ParallelDims(1, 1, 4, 2, 1, 1, 8, 2),
    ],
)
def test_all_members_make_a_group_at_the_same_time(dims, monkeypatch):
    """Creation blocks until all members call it, so the ranks' sequences must not wait for each other in a circle."""
    sequences = []
    for rank in range(dims.world_size):
        created = []
        monkeypatch.setattr(groups, "_communicators", {tuple(range(dims.world_size)): "world"})
        monkeypatch.setattr(
            groups.communication, "create_group", lambda name, ranks, created=created: created.append((name, ranks))
        )
        context = groups._context(dims, rank)
        assert all(rank in ranks for _, ranks in created)
        assert context.groups["tp"].ranks == dims.ranks_of("tp", rank)
        line, stage = dims.ranks_of("pp", rank), context.coordinates.pp
        for group, pair in ((context.previous_stage, line[stage - 1 : stage + 1]), (context.next_stage, line[stage:])):
            assert (group.ranks if group else ()) == (pair[:2] if len(pair) > 1 else ())
        sequences.append(created)
    assert len({name for created in sequences for name, _ in created}) == len(
        {tuple(ranks) for created in sequences for _, ranks in created}
    )
    while any(sequences):
        heads = [created[0] if created else None for created in sequences]
        ready = [head for head in heads if head and all(heads[member] == head for member in head[1])]
        assert ready, "the ranks wait for each other"
        for created in sequences:
            if created and created[0] in ready:
                created.pop(0)


class Told(Group):
    """A group whose other members are played by the test."""

    def __init__(self, values, rank):
        super().__init__("world", range(len(values)), rank)
        self.values = values

    def all_gather_object(self, value):
        return [value if index == self.rank else other for index, other in enumerate(self.values)]

    def any(self, flag):
        return flag or any(value is not None for index, value in enumerate(self.values) if index != self.rank)


def test_differing_values_are_refused_with_the_ranks_that_have_them():
    context = groups.single()
    same = {"batch_size": 4, "seed": 1}
    require_same(context, same, Told([same] * 3, 1))
    others = [{"batch_size": 8, "seed": 1}, None, {"batch_size": 8}]
    with pytest.raises(ValueError) as raised:
        require_same(context, same, Told(others, 1))
    assert str(raised.value) == (
        "the ranks of this job were given different settings: batch_size is 8 on ranks 0, 2, 4 on rank 1; "
        "seed is 1 on ranks 0, 1, missing on rank 2"
    )


def told(values, rank):
    """The context of rank ``rank`` in a job whose other ranks are played by the test."""
    context = groups.single()
    return replace(context, rank=rank, groups=context.groups | {"world": Told(values, rank)})


def report(rank, kinds, message, victim=False):
    return {"rank": rank, "kinds": kinds, "message": message, "victim": victim}


def test_all_ranks_raise_the_error_of_the_lowest_rank_that_failed():
    reports = [None, report(1, ["OSError", "Exception"], "no disk"), report(2, ["ValueError"], "bad")]
    for rank, own in ((0, None), (2, ValueError("bad"))):
        with pytest.raises(PeerError, match="^rank 1 failed: no disk$") as raised:
            first_error(told(reports, rank), own)
        assert (raised.value.rank, raised.value.kind) == (1, "OSError")
    mine = OSError("no disk")
    with pytest.raises(OSError, match="no disk") as raised:
        first_error(told(reports, 1), mine)
    assert raised.value is mine
    first_error(told([None] * 3, 1), None)


def test_the_error_that_is_told_is_the_cause_and_not_that_of_a_lower_rank_which_waited_for_it():
    victim = report(1, ["ValueError"], "bad", victim=True)
    with pytest.raises(PeerError, match="^rank 1 failed: bad$"):
        first_error(told([victim, report(1, ["ValueError"], "bad")], 0), PeerError(1, ["ValueError"], "bad"))
    with pytest.raises(ValueError, match="^bad$"):
        first_error(told([victim, None], 1), ValueError("bad"))


def test_a_block_fails_together_or_not_at_all():
    context = groups.single()
    with failing_together(context):
        pass
    gone = told([report(0, ["E"], "gone"), None], 1)
    with pytest.raises(PeerError, match="rank 0 failed: gone"), failing_together(gone):
        pass
    with pytest.raises(KeyError), failing_together(context):
        raise KeyError("x")

"""Runs on 4 ranks: every collective on groups of 4 and 2 ranks, against numpy. Prints one line when all are right."""

import os

import numpy as np
from mindspore import Tensor

from mindformers_ext.parallel.agreement import PeerError, failing_together, require_same
from mindformers_ext.parallel.groups import init_parallel
from mindformers_ext.parallel.parallel_dims import ParallelDims
from mindformers_ext.runtime import setup_runtime

EXTREMES = {
    "float32": [0.0, -0.0, 1e-42, 3.4e38, -1.5, np.inf, np.nan],
    "int32": [2**31 - 1, -(2**31), 2**24 + 1, -1, 0],
    "int64": [2**63 - 1, -(2**63), 2**53 + 1, -1],
    "float16": [65504.0, -0.0, 6e-8],
    "uint8": [255, 0, 7],
    "bool": [True, False],
}


def data_of(rank, dtype, shape):
    """The array that every rank knows rank ``rank`` to give."""
    random = np.random.default_rng(1000 + rank)
    extremes = np.array(EXTREMES[dtype], dtype)
    if dtype in ("float32", "float16"):
        array = random.standard_normal(shape).astype(dtype)
    elif dtype == "bool":
        array = random.integers(0, 2, shape).astype(bool)
    else:
        info = np.iinfo(dtype)
        array = random.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    array.reshape(-1)[: len(extremes)] = np.roll(extremes, rank)[: array.size]
    return array


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual.dtype, actual.shape)
    assert np.ascontiguousarray(actual).tobytes() == np.ascontiguousarray(expected).tobytes()


def call(method, array, *args):
    """Calls with a numpy array and with a tensor; both must give the same, each in its own kind."""
    from_array, from_tensor = method(array, *args), method(Tensor(array), *args)
    assert isinstance(from_array, np.ndarray) and isinstance(from_tensor, Tensor)
    same_bits(from_array, from_tensor.asnumpy())
    return from_array


def check_sums(group, dtype):
    parts = [data_of(rank, dtype, (group.size, 3, 5)) for rank in group.ranks]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.sum(np.stack(parts), axis=0, dtype=dtype)
    mine = parts[group.rank]
    total, scattered = call(group.all_reduce, mine), call(group.reduce_scatter, mine)
    if dtype in ("float32", "float16"):
        # The order of a sum of floats is MindSpore's.
        close = {"rtol": 1e-6, "atol": 1e-6} if dtype == "float32" else {"rtol": 2e-3, "atol": 2e-3}
        np.testing.assert_allclose(total, expected, **close)
        np.testing.assert_allclose(scattered, expected[group.rank], **close)
    else:
        same_bits(total, expected)
        same_bits(scattered, expected[group.rank])


def check_moves(group, dtype):
    parts = [data_of(rank, dtype, (group.size, 7)) for rank in group.ranks]
    mine = parts[group.rank]
    same_bits(call(group.all_gather, mine), np.stack(parts))
    same_bits(call(group.all_to_all, mine), np.stack([part[group.rank] for part in parts]))
    for source in range(group.size):
        same_bits(call(group.broadcast, mine, source), parts[source])
    if group.size == 2:
        peer = 1 - group.rank
        for sender in range(2):
            for kind in (np.dtype(dtype), Tensor(mine).dtype):
                if group.rank == sender:
                    group.send(mine, peer)
                else:
                    received = group.receive(mine.shape, kind, peer)
                    same_bits(received if isinstance(received, np.ndarray) else received.asnumpy(), parts[peer])


def check_objects(group):
    value = {"rank": group.rank, "text": "é" * 10**group.rank, "none": None}
    gathered = group.all_gather_object(value)
    assert gathered == [{"rank": r, "text": "é" * 10**r, "none": None} for r in range(group.size)]
    assert group.all_gather_object(bytes(range(group.rank))) == [bytes(range(r)) for r in range(group.size)]
    assert [group.any(group.rank == r) for r in range(group.size)] == [True] * group.size
    assert not group.any(False)
    group.barrier()
    for empty in (np.zeros((0, 3), np.float32), np.zeros(0, np.int32)):
        assert group.all_gather(empty).shape == (group.size, *empty.shape)


def check_traffic(context):
    context.traffic.clear()
    context.tp.all_reduce(np.zeros(8, np.float32))
    context.world.all_gather(np.zeros(8, np.int32))
    context.world.broadcast(np.zeros(8, np.int32), 1)
    counts = {key: (count.calls, count.bytes) for key, count in context.traffic.counts.items()}
    source = 3 * 32 if context.rank == 1 else 0
    assert counts == {
        ("all_reduce", "tp"): (1, 32),
        ("all_gather", "world"): (1, 96),
        ("broadcast", "world"): (1, source),
    }, counts


def check_agreement(context):
    require_same(context, {"batch_size": 4, "hash": "abc"})
    try:
        require_same(context, {"batch_size": 4 if context.rank != 2 else 8, "hash": "abc"})
        raise AssertionError("a difference was not refused")
    except ValueError as error:
        assert str(error).endswith("batch_size is 4 on ranks 0, 1, 3, 8 on rank 2"), error
    with failing_together(context):
        pass
    try:
        with failing_together(context):
            if context.rank in (1, 3):
                raise FileNotFoundError(f"no file {context.rank}")
        raise AssertionError("a failure of rank 1 was not seen")
    except FileNotFoundError as error:
        assert context.rank == 1 and str(error) == "no file 1"
    except PeerError as error:
        assert context.rank != 1 and (error.rank, error.kind) == (1, "FileNotFoundError")
        assert str(error) == "rank 1 failed: no file 1"


def check_layouts():
    context = init_parallel(ParallelDims(dp_replicate=2, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=4))
    assert context.tp.ranks == ((0, 1), (0, 1), (2, 3), (2, 3))[context.rank]
    assert context.dp.ranks == ((0, 2), (1, 3), (0, 2), (1, 3))[context.rank]
    for group in (context.world, context.tp, context.dp):
        for dtype in EXTREMES:
            if dtype != "bool":
                check_sums(group, dtype)
            check_moves(group, dtype)
        check_objects(group)
    check_traffic(context)
    check_agreement(context)
    # Another layout in the same job: stages 0-1-2-3, whose links are pairs that overlap.
    line = init_parallel(ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=4, ep=1, world_size=4))
    token = np.array([0], np.int32)
    if line.previous_stage is not None:
        token = line.previous_stage.receive((1,), np.int32, 0)
    if line.next_stage is not None:
        line.next_stage.send(token + 1, 1)
    assert token[0] == line.rank


def main():
    setup_runtime("CPU")
    check_layouts()
    print("all collectives over connections are right", flush=True)
    os.environ["MINDFORMERS_EXT_COLLECTIVES"] = "mindspore"
    check_layouts()
    print("all collectives by MindSpore's sums are right", flush=True)


main()

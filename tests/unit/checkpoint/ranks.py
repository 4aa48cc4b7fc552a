"""Jobs of several ranks in one process: what each rank of a layout holds, and collectives between threads."""

import json
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mindformers_ext.checkpoint import Part, load_weights
from mindformers_ext.config.schema import ParallelismSection
from mindformers_ext.models import transformer_config, weight_layout
from mindformers_ext.models.shard import shard_of
from mindformers_ext.parallel import ParallelDims, groups
from mindformers_ext.parallel.schedule import split_layers

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"


def dims_of(size, tp=1, pp=1, fsdp=1, ep=1, cp=1):
    degrees = ParallelismSection(
        data_parallel_shard=fsdp, tensor_parallel=tp, context_parallel=cp, pipeline_parallel=pp, expert_parallel=ep
    )
    return ParallelDims.from_config(degrees, size)


def described(family):
    config = transformer_config({}, json.loads((CHECKPOINTS / family / "config.json").read_text()))
    return config, weight_layout(config)


def whole_model(family, layout):
    whole = {}
    load_weights(CHECKPOINTS / family, layout, whole.__setitem__)
    return whole


def regions_of(config, layout, dims, monkeypatch):
    """What every rank of a layout holds; ValueError where the model cannot be split like this."""
    monkeypatch.setattr(groups, "_communicator", lambda ranks: "")
    found = []
    for rank in range(dims.world_size):
        context = groups._context(dims, rank)
        layers = split_layers(config.num_layers, dims.pp, "auto")[context.coordinates.pp]
        found.append(shard_of(config, context, layers).stored_regions(layout))
    return found


def parts_of(whole, regions):
    return {name: Part(region, region.take(whole[name])) for name, region in regions.items()}


class ThreadJob:
    """One of several ranks that are threads."""

    def __init__(self, rank, board, barrier):
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def _exchange(self, value):
        self._board[self.rank] = value
        self._barrier.wait(20)
        found = list(self._board)
        self._barrier.wait(20)
        return found

    def all_gather_object(self, value):
        return [json.loads(text) for text in self._exchange(json.dumps(value))]

    def all_reduce(self, x):
        return np.sum(self._exchange(x), axis=0, dtype=x.dtype)


def on_all_ranks(size, action):
    """Runs ``action(job)`` on every rank; returns what each returned or raised."""
    board, barrier = [None] * size, threading.Barrier(size)

    def run(rank):
        try:
            return action(ThreadJob(rank, board, barrier))
        except threading.BrokenBarrierError:
            raise
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))

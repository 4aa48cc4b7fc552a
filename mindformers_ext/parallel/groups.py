"""Joins the job and makes the groups of a layout."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, communication, ops

from mindformers_ext.ops.backend import device_target
from mindformers_ext.parallel.collectives import Group, Traffic
from mindformers_ext.parallel.mesh import TOKEN_BYTES, Mesh, connect, listen
from mindformers_ext.parallel.parallel_dims import AXES, Axis, Coordinates, ParallelDims

# MindSpore's groups live as long as the process; layouts that follow each other share them.
_communicators: dict[tuple[int, ...], str] = {}
# The connections of this process, for all layouts of the job.
_meshes: list[Mesh] = []
_ADDRESS_BYTES = 80


@dataclass(frozen=True)
class ParallelContext:
    """The place of this process in a layout, and the groups it works in.

    Attributes:
        dims: the degrees of the job.
        rank: global rank of this process.
        coordinates: its place.
        traffic: what this rank sends, by collective and group.
        groups: the group of each axis, see `ParallelDims.ranks_of`.
        previous_stage: this rank and its neighbour in the stage before, the neighbour first; None in the first stage.
        next_stage: this rank and its neighbour in the stage after, the neighbour last; None in the last stage.
    """

    dims: ParallelDims
    rank: int
    coordinates: Coordinates
    traffic: Traffic
    groups: Mapping[Axis, Group]
    previous_stage: Group | None = None
    next_stage: Group | None = None

    @property
    def world(self) -> Group:
        """All ranks of the job."""
        return self.groups["world"]

    @property
    def pp(self) -> Group:
        """The stages of one pipeline."""
        return self.groups["pp"]

    @property
    def cp(self) -> Group:
        """The ranks that share a sequence."""
        return self.groups["cp"]

    @property
    def ulysses(self) -> Group:
        """The ranks out of cp that exchange heads for tokens."""
        return self.groups["ulysses"]

    @property
    def colossal(self) -> Group:
        """The ranks out of cp that gather the keys of the same heads."""
        return self.groups["colossal"]

    @property
    def tp(self) -> Group:
        """The ranks that share a layer."""
        return self.groups["tp"]

    @property
    def ep(self) -> Group:
        """The ranks that share the experts."""
        return self.groups["ep"]

    @property
    def dp(self) -> Group:
        """The ranks that work on different records."""
        return self.groups["dp"]

    @property
    def fsdp(self) -> Group:
        """The ranks that share the parameters of a layer."""
        return self.groups["fsdp"]

    @property
    def unit(self) -> Group:
        """The ranks that decode the same records."""
        return self.groups["unit"]

    @property
    def replica(self) -> Group:
        """The ranks that hold one copy of the model and run the same forwards."""
        return self.groups["replica"]


def single() -> ParallelContext:
    """Returns the context of a job of one process: every group has one member, nothing communicates."""
    return _context(ParallelDims.single(), 0)


def init_parallel(dims: ParallelDims) -> ParallelContext:
    """Joins the job that msrun started and makes every group of ``dims``, in one order on all ranks.

    May be called again for another layout of the same job. On CPUs, MINDFORMERS_EXT_COLLECTIVES=mindspore has MindSpore
    sum in place of `mesh`: slower, and a rank that fails leaves the others waiting until MindSpore gives up.

    Raises:
        ValueError: the job has another number of processes than ``dims``, or the variable another value.
        RuntimeError: MindSpore could not join the job or make a group.
        ConnectionError: another process of the job cannot be reached.
    """
    if dims.world_size == 1:
        return single()
    if not communication.GlobalComm.INITED:
        communication.init("mccl" if device_target() == "CPU" else "hccl")
    processes = communication.get_group_size()
    if processes != dims.world_size:
        raise ValueError(f"the layout has {dims.world_size} ranks, but the job has {processes} processes")
    if _uses_mesh():
        if not _meshes:
            _meshes.append(_connected(communication.get_rank(), processes))
        return _context(dims, communication.get_rank(), _meshes[0])
    _communicators.setdefault(tuple(range(processes)), communication.GlobalComm.WORLD_COMM_GROUP)
    return _context(dims, communication.get_rank())


def _uses_mesh() -> bool:
    if device_target() != "CPU":
        return False
    wanted = os.environ.get("MINDFORMERS_EXT_COLLECTIVES", "")
    if wanted not in ("", "mindspore"):
        raise ValueError(f"MINDFORMERS_EXT_COLLECTIVES must be mindspore or not set, not {wanted!r}")
    return not wanted


def _connected(rank: int, processes: int) -> Mesh:
    """Connects this process with all others; MindSpore tells each where the others listen."""
    host = _own_address(os.environ.get("MS_SCHED_HOST", "127.0.0.1"))
    listener = listen(host)
    token = os.urandom(TOKEN_BYTES)
    address = f"{host} {listener.getsockname()[1]}".encode()
    told = np.zeros(TOKEN_BYTES + _ADDRESS_BYTES, np.float32)
    told[:TOKEN_BYTES] = list(token)
    told[TOKEN_BYTES : TOKEN_BYTES + len(address)] = list(address)
    gathered = ops.AllGather()(Tensor.from_numpy(told)).asnumpy().reshape(processes, -1).astype(np.uint8)
    texts = [bytes(row[TOKEN_BYTES:]).rstrip(b"\0").decode().split() for row in gathered]
    addresses = [(other, int(port)) for other, port in texts]
    return connect(rank, addresses, listener, bytes(gathered[0, :TOKEN_BYTES]))


def _own_address(scheduler: str) -> str:
    """Returns the address by which this host is seen from the one that runs the scheduler."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((scheduler, 9))  # no packet is sent
        return str(probe.getsockname()[0])


def _context(dims: ParallelDims, rank: int, mesh: Mesh | None = None) -> ParallelContext:
    traffic = Traffic()
    place = dims.coordinates(rank)

    def group(name: str, ranks: Sequence[int]) -> Group:
        communicator = "" if mesh is not None else _communicator(tuple(ranks))
        return Group(name, ranks, rank, communicator, traffic, mesh)

    axes = {axis: group(axis, dims.ranks_of(axis, rank)) for axis in AXES}
    links = {stage: group("stages", ranks) for stage, ranks in _stage_links(dims, rank)}
    return ParallelContext(dims, rank, place, traffic, axes, links.get(place.pp - 1), links.get(place.pp))


def _stage_links(dims: ParallelDims, rank: int) -> list[tuple[int, tuple[int, int]]]:
    """Returns ``(stage, ranks)`` for each link of this rank between ``stage`` and the next, in the order of creation.

    Links between disjoint pairs of stages are made at the same time: first those of even stages, then of odd ones.
    """
    line = dims.ranks_of("pp", rank)
    stages = [*range(0, dims.pp - 1, 2), *range(1, dims.pp - 1, 2)]
    return [(stage, (line[stage], line[stage + 1])) for stage in stages if rank in line[stage : stage + 2]]


def _communicator(ranks: tuple[int, ...]) -> str:
    """Returns MindSpore's name of the group of ``ranks``, which all its members make together when it is new."""
    if len(ranks) == 1:
        return ""
    if ranks not in _communicators:
        name = f"mfx_{len(ranks)}_{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        communication.create_group(name, list(ranks))
        _communicators[ranks] = name
    return _communicators[ranks]

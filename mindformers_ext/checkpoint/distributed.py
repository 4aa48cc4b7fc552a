"""Save a checkpoint from several processes, each of which writes what it holds."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindformers_ext.checkpoint.errors import CheckpointError
from mindformers_ext.checkpoint.files import json_text, write_synced
from mindformers_ext.checkpoint.locate import METADATA_FILE, iteration_name, rank_file_name
from mindformers_ext.checkpoint.metadata import metadata_of
from mindformers_ext.checkpoint.save import (
    begin_folder,
    check_arguments,
    prune,
    publish_iteration,
    temporary_folder,
    write_common,
)
from mindformers_ext.checkpoint.sharing import Held, SharedTensor, owners_of_cells, place_in_part, share_tensors
from mindformers_ext.checkpoint.tensor_writer import TensorSpec, write_tensors
from mindformers_ext.parallel.plan import Region

logger = logging.getLogger(__name__)

# Values of a tensor that are on their way between the processes at a time.
_PIECE = 1 << 24


class Job(Protocol):
    """The processes that save together, such as `mindformers_ext.parallel.collectives.Group`."""

    rank: int
    size: int

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns what all processes gave."""

    def all_reduce(self, x: Any) -> Any:
        """Returns the sum over all processes."""


@dataclass(frozen=True)
class Part:
    """What this process holds of a tensor.

    Attributes:
        region: which part it is.
        values: array of ``region.shape``.
    """

    region: Region
    values: np.ndarray


Parts = Mapping[str, Part]


@dataclass(frozen=True)
class SavePlan:
    """What goes into which file.

    Attributes:
        tensors: of each kind, ``model`` or ``opt``.
        files: of each kind the name of every rank's file; ranks without anything to write have none.
    """

    tensors: Mapping[str, Sequence[SharedTensor]]
    files: Mapping[str, Mapping[int, str]]

    def metadata(self) -> dict[str, Any]:
        """Returns the content of metadata.json."""
        return metadata_of((tensor, self.files[kind]) for kind, found in self.tensors.items() for tensor in found)


def plan_files(
    everyone: Sequence[Mapping[str, Mapping[str, Held]]], prefix: str | None, remove_redundancy: bool
) -> SavePlan:
    """Decides what every rank writes.

    Args:
        everyone: for each rank and kind (``model``, ``opt``) what the rank holds.
        prefix: start of the file names.
        remove_redundancy: see `save_distributed`.

    Raises:
        CheckpointError: processes disagree about a tensor, or a part of it is held by none.
    """
    tensors = {kind: share_tensors([one[kind] for one in everyone], remove_redundancy) for kind in everyone[0]}
    files = {}
    for kind, found in tensors.items():
        writing = sorted({rank for tensor in found for writers in tensor.writers for rank in writers})
        files[kind] = {rank: rank_file_name(kind, prefix, index, len(writing)) for index, rank in enumerate(writing)}
    return SavePlan(tensors, files)


def save_distributed(
    save_path: str | os.PathLike[str],
    step: int,
    model_parts: Parts,
    optimizer_parts: Parts | None,
    common: Mapping[str, Any],
    job: Job,
    *,
    prefix: str | None = "checkpoint",
    save_max: int = 5,
    written: list[Path] | None = None,
    remove_redundancy: bool = False,
) -> Path:
    """Saves one training step from all processes of a job, as `save_checkpoint` does from one.

    Every process calls it, with a ``save_path`` that all of them share. Each writes a file of its own; metadata.json
    says which file holds which piece. Where the parts of a tensor are no equal pieces along its dimensions, which
    metadata.json could not describe, one process gets the whole from the others and writes it.

    Args:
        save_path: root folder; made when missing.
        step: training step, 0 or more.
        model_parts: what this process holds of the parameters, by name.
        optimizer_parts: the same of the optimizer's state, or None on all processes.
        common: see `save_checkpoint`; that of rank 0 is written.
        job: the processes.
        prefix: start of the file names.
        save_max: how many of the run's own checkpoints are kept.
        written: see `save_checkpoint`; rank 0 deletes.
        remove_redundancy: write a piece that several processes hold once; False: each of them writes it.

    Returns:
        The iteration folder.

    Raises:
        ValueError: for arguments or values that cannot be stored.
        OSError: a process cannot write. Either error is raised on all processes and names the rank; the temporary
            folder is removed, the checkpoint before and the tracker are as they were.
    """
    check_arguments(step, prefix, save_max)
    final = Path(save_path) / iteration_name(step)
    temporary = temporary_folder(final)
    own = {"model": model_parts} | ({} if optimizer_parts is None else {"opt": optimizer_parts})
    try:
        _together(job, lambda: begin_folder(final) if job.rank == 0 else None)
        everyone = _everyone(job, own)
        plan = plan_files(everyone, prefix, remove_redundancy)
        values = {kind: _to_write(plan.tensors[kind], own[kind], [one[kind] for one in everyone], job) for kind in own}
        _together(job, lambda: _write_files(temporary, plan, values, job.rank))
        _together(job, lambda: _publish(temporary, final, step, plan, common) if job.rank == 0 else None)
    except BaseException:
        if job.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if written is not None and job.rank == 0:
        prune(final, save_max, written)
    return final


def _everyone(job: Job, own: Mapping[str, Parts]) -> list[dict[str, dict[str, Held]]]:
    """Tells every process what each of them holds."""
    told = {
        kind: {name: [part.values.dtype.name, part.region.full, part.region.ranges] for name, part in parts.items()}
        for kind, parts in own.items()
    }
    return [
        {
            kind: {name: Held(dtype, _region(full, ranges)) for name, (dtype, full, ranges) in parts.items()}
            for kind, parts in one.items()
        }
        for one in job.all_gather_object(told)
    ]


def _region(full: Sequence[int], ranges: Sequence[Sequence[Sequence[int]]]) -> Region:
    return Region(tuple(full), tuple(tuple((begin, end) for begin, end in pieces) for pieces in ranges))


def _to_write(
    tensors: Sequence[SharedTensor], own: Parts, everyone: Sequence[Mapping[str, Held]], job: Job
) -> dict[str, np.ndarray]:
    """Returns the arrays that go to this rank's file, by name; tensors that are joined come from all processes."""
    chosen = {}
    for tensor in tensors:
        part = own.get(tensor.name)
        values = None if part is None else part.values
        if tensor.joined:
            held = {rank: one[tensor.name].region for rank, one in enumerate(everyone) if tensor.name in one}
            values = join_parts(tensor, part, held, job)
        if values is not None and any(job.rank in writers for writers in tensor.writers):
            chosen[tensor.name] = values
    return chosen


def join_parts(tensor: SharedTensor, part: Part | None, held: Mapping[int, Region], job: Job) -> np.ndarray | None:
    """Brings a whole tensor to its writer; every process takes part, and needs the memory of some rows.

    Args:
        tensor: the tensor.
        part: what this process holds of it.
        held: the regions of all ranks that hold some of it.
        job: the processes.

    Returns:
        The tensor on its writer, None elsewhere.
    """
    mine = owners_of_cells(tensor.name, held).get(job.rank, [])
    whole = np.empty(tensor.shape, tensor.dtype) if tensor.writers == ((job.rank,),) else None
    step = max(1, _PIECE // max(1, math.prod(tensor.shape[1:])))
    for first in range(0, tensor.shape[0], step):
        last = min(first + step, tensor.shape[0])
        # A sum with -0.0 keeps every value, -0.0 among them.
        rows = np.full((last - first, *tensor.shape[1:]), -0.0, tensor.dtype)
        for (begin, end), *rest in mine:
            low, high = max(begin, first), min(end, last)
            if part is not None and low < high:
                box = tuple(slice(*one) for one in ((low - first, high - first), *rest))
                rows[box] = part.values[place_in_part(part.region, ((low, high), *rest))]
        rows = job.all_reduce(rows)
        if whole is not None:
            whole[first:last] = rows
    return whole


def _write_files(folder: Path, plan: SavePlan, values: Mapping[str, Mapping[str, np.ndarray]], rank: int) -> None:
    for kind, tensors in values.items():
        file = plan.files[kind].get(rank)
        if file is None:
            continue
        specs = [TensorSpec(name, array.dtype.name, array.shape) for name, array in tensors.items()]
        try:
            write_tensors(folder / file, specs, tensors.__getitem__, {"format": "ms"})
        except OSError as error:  # a full disk does not say which file
            raise OSError(error.errno, error.strerror, str(folder / file)) from error


def _publish(temporary: Path, final: Path, step: int, plan: SavePlan, common: Mapping[str, Any]) -> None:
    for files in plan.files.values():
        for rank, name in files.items():
            if not (temporary / name).is_file():
                raise CheckpointError(
                    f"rank 0 does not see {temporary / name}, which rank {rank} wrote; checkpoint.save_path must be a "
                    "folder that all processes share"
                )
    write_synced(temporary / METADATA_FILE, json_text(plan.metadata(), METADATA_FILE).encode())
    write_common(temporary, common)
    publish_iteration(temporary, final, step)


def _together(job: Job, action: Callable[[], object]) -> None:
    """Runs something on all processes; the first failure is raised on all of them, with its rank.

    Raises:
        OSError: the first failure was one.
        CheckpointError: it was anything else.
    """
    error: Exception | None = None
    try:
        action()
    except Exception as raised:
        error = raised
    reports = job.all_gather_object(None if error is None else [isinstance(error, OSError), _text(error)])
    for rank, report in enumerate(reports):
        if report is not None:
            kind: type[Exception] = OSError if report[0] else CheckpointError
            raise kind(f"rank {rank}: {report[1]}") from error


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # its own text begins with a number
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"

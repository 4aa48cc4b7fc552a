"""Check a checkpoint against the parameters of a model, and read it one parameter at a time."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindformers_ext.checkpoint.errors import CheckpointError, ProblemList, listed
from mindformers_ext.checkpoint.locate import Location, locate_checkpoint
from mindformers_ext.checkpoint.tensor_file import WEIGHT_DTYPES, StoredTensor, TensorFile
from mindformers_ext.models.weights import WeightLayout, WeightMapping

# Values of a stored copy and of its original that are in memory together.
_PIECE = 1 << 16

Found = dict[str, list[StoredTensor]]  # tensors by name, one for each file that holds it


@dataclass(frozen=True)
class CheckReport:
    """What a checkpoint that fits a model consists of.

    Attributes:
        format: ``huggingface`` or ``mindformers``.
        folder: the folder that holds the weight files.
        files: the weight files.
        step: training step of a MindFormers checkpoint, if its folder tells.
        num_parameters: number of parameters of the model.
        num_values: number of values in them.
        stored_bytes: bytes of the tensors that are read.
        dtypes: stored type -> number of tensors of it.
        skipped: (tensor, file, reason) of every tensor that the model does not need.
    """

    format: str
    folder: Path
    files: tuple[Path, ...]
    step: int | None
    num_parameters: int
    num_values: int
    stored_bytes: int
    dtypes: dict[str, int]
    skipped: tuple[tuple[str, str, str], ...]

    def summary(self) -> str:
        """One line for the log."""
        types = " + ".join(f"{count} {dtype}" for dtype, count in sorted(self.dtypes.items()))
        skipped = f", passed over: {listed((f'{n} ({why})' for n, _, why in self.skipped), 3)}" if self.skipped else ""
        return (
            f"{self.num_parameters} parameters, {self.num_values:,} values from {self.folder} "
            f"({self.format}, {len(self.files)} file(s), {types} tensors, {self.stored_bytes:,} bytes){skipped}"
        )


class WeightReader:
    """The parameters of one open checkpoint, as float32 arrays.

    Attributes:
        report: what was found when the checkpoint was checked.
    """

    def __init__(self, sources: dict[str, tuple[WeightMapping, tuple[StoredTensor, ...]]], report: CheckReport) -> None:
        self._sources = sources
        self.report = report

    def read(self, name: str) -> np.ndarray:
        """Reads one parameter: float32, C-contiguous, writable, shared with nobody.

        Raises:
            CheckpointError: if a file changed since it was opened.
            RuntimeError: if the layout makes another shape or type than it announces.
        """
        mapping, tensors = self._sources[name]
        if self.report.format == "huggingface":
            array = mapping.to_parameter([tensor.float32() for tensor in tensors])
        else:
            array = tensors[0].float32()
        if array.shape != mapping.shape or array.dtype != np.float32:
            raise RuntimeError(
                f"the layout of {name} makes {array.dtype} {array.shape} instead of float32 {mapping.shape}"
            )
        return own(array)


def own(array: np.ndarray) -> np.ndarray:
    """Returns the array itself if its memory is writable, contiguous and its own, else a copy."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if array.flags.c_contiguous and array.flags.writeable and root.flags.owndata and root.nbytes == array.nbytes:
        return array
    return np.array(array, order="C")


def check_weights(path: str | os.PathLike[str], layout: WeightLayout) -> CheckReport:
    """Checks from the headers alone that a checkpoint fills every parameter and that nothing is left over.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: with everything that does not fit, naming files and tensors.
    """
    with _open(path, layout) as (reader, _):
        return reader.report


def load_weights(
    path: str | os.PathLike[str], layout: WeightLayout, assign: Callable[[str, np.ndarray], None]
) -> CheckReport:
    """Checks a checkpoint, then reads it and hands over each parameter once.

    Peak memory is the model and one parameter: each array (float32, C-contiguous, writable, shared with nobody, of the
    parameter's shape) may become the parameter's memory without a copy.

    Args:
        path: folder of a HuggingFace model, root of MindFormers iterations, or one iteration folder.
        layout: names and shapes of the model.
        assign: called with parameter name and array, in the order of the layout.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: with everything that does not fit, or a tensor that ought to be a copy of another one and is
            not; nothing was assigned then.
    """
    with open_weights(path, layout) as reader:
        for mapping in layout.mappings:
            assign(mapping.name, reader.read(mapping.name))
        return reader.report


@contextmanager
def open_weights(path: str | os.PathLike[str], layout: WeightLayout) -> Iterator[WeightReader]:
    """Opens and checks a checkpoint, for reading parameters by name in any order.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: see `load_weights`.
    """
    with _open(path, layout) as (reader, found):
        _compare_copies(reader.report.folder, layout, found)
        yield reader


@contextmanager
def _open(path: str | os.PathLike[str], layout: WeightLayout) -> Iterator[tuple[WeightReader, Found]]:
    """Opens a checkpoint and checks the headers."""
    location = locate_checkpoint(path)
    with ExitStack() as stack:
        files = open_files(location.folder, location.files, stack)
        found = _tensors_by_name(location, files)
        sources = _match(location, layout, found)
        yield WeightReader(sources, _report(location, layout, sources, found)), found


def _compare_copies(folder: Path, layout: WeightLayout, found: Found) -> None:
    """Refuses a stored copy with other values than its original, as the model would not be the one that was saved."""
    for name, original in layout.copies:
        for tensor in found.get(name, ()):
            source = found[original][0]
            if not _same_values(tensor, source):
                raise CheckpointError(
                    f"checkpoint {folder}: {tensor.where} differs from {source.where}, of which it is a copy in a "
                    "model with tied embeddings; set model.tie_word_embeddings: false if both are meant"
                )


def _same_values(tensor: StoredTensor, original: StoredTensor) -> bool:
    pairs = zip(tensor.pieces(_PIECE), original.pieces(_PIECE), strict=True)
    return all(np.array_equal(piece, other, equal_nan=True) for piece, other in pairs)


def open_files(folder: Path, paths: Iterable[Path], stack: ExitStack) -> list[TensorFile]:
    """Opens files for the life of ``stack``.

    Raises:
        CheckpointError: naming every file that is damaged.
    """
    files, damaged = [], []
    for path in paths:
        try:
            files.append(stack.enter_context(TensorFile(path, os.path.relpath(path, folder))))
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(listed(damaged))
    return files


def _tensors_by_name(location: Location, files: Sequence[TensorFile]) -> Found:
    found: Found = {}
    for file in files:
        for name, tensor in file.tensors.items():
            found.setdefault(name, []).append(tensor)
    if location.format == "mindformers":
        return found
    problems = ProblemList(str(location.folder))
    for name, tensors in found.items():
        if len(tensors) > 1:
            problems.add("tensors in several files", f"{name} in {listed(t.file.label for t in tensors)}")
    if location.index is not None and location.weight_map is not None:
        _compare_with_index(location.index.name, location.weight_map, found, problems)
    problems.raise_if_any()
    return found


def _compare_with_index(index: str, weight_map: dict[str, str], found: Found, problems: ProblemList) -> None:
    for name, file in weight_map.items():
        holders = [tensor.file.label for tensor in found.get(name, [])]
        if not holders:
            problems.add(f"missing tensors that {index} lists", f"{name} in {file}")
        elif os.path.normpath(file) not in holders:
            problems.add(f"tensors in another file than {index} says", f"{name} in {holders[0]} instead of {file}")
    for name, tensors in found.items():
        if name not in weight_map:
            problems.add(f"tensors that {index} does not list", tensors[0].where)


def _match(
    location: Location, layout: WeightLayout, found: Found
) -> dict[str, tuple[WeightMapping, tuple[StoredTensor, ...]]]:
    """Pairs every parameter with its tensors, or raises one error with all that does not fit."""
    problems = ProblemList(str(location.folder))
    searched = location.index.name if location.index else listed((file.name for file in location.files), 3)
    plain = location.format == "mindformers"
    misfit = "wrong shapes"
    if plain and len(location.files) > 1:
        misfit = f"parameters in parts, saved on {len(location.files)} ranks, which is not supported yet"
    sources = {}
    used: set[str] = set()
    for mapping in layout.mappings:
        names = (mapping.name,) if plain else mapping.sources
        shapes = (mapping.shape,) if plain else mapping.source_shapes
        used.update(names)
        for name, shape in zip(names, shapes, strict=True):
            if name in found:
                _check_tensor(found[name], tuple(shape), misfit, problems)
            else:
                needed_for = "" if plain else f" (for {mapping.name})"
                problems.add(f"tensors missing from {searched}", f"{name}{needed_for}")
        sources[mapping.name] = (mapping, tuple(found[name][0] for name in names if name in found))
    for name, original in layout.copies:
        if name in found and original in found:
            _check_tensor(found[name], found[original][0].shape, misfit, problems)
    for name, tensors in found.items():
        if name not in used and _skip_reason(layout, name, found) is None:
            problems.add("left over tensors, which the model does not have", tensors[0].where)
    problems.raise_if_any()
    return sources


def _check_tensor(tensors: list[StoredTensor], shape: tuple[int, ...], misfit: str, problems: ProblemList) -> None:
    """Notes a wrong shape under ``misfit``, and wrong types, of one tensor in all files that hold it."""
    for tensor in tensors:
        if tensor.shape != shape:
            problems.add(misfit, f"{tensor.where} is {list(tensor.shape)}, expected {list(shape)}")
            break
    for tensor in tensors:
        if tensor.dtype not in WEIGHT_DTYPES:
            problems.add(f"types other than {', '.join(WEIGHT_DTYPES)}", f"{tensor.where} is {tensor.dtype}")
            break


def _skip_reason(layout: WeightLayout, name: str, found: Found) -> str | None:
    for copy, original in layout.copies:
        if name == copy and original in found:
            return f"a copy of {original}"
    return next((reason for pattern, reason in layout.skippable if re.fullmatch(pattern, name)), None)


def _report(
    location: Location,
    layout: WeightLayout,
    sources: dict[str, tuple[WeightMapping, tuple[StoredTensor, ...]]],
    found: Found,
) -> CheckReport:
    used = {tensor.name: tensor for _, tensors in sources.values() for tensor in tensors}
    skipped = tuple(
        (name, tensors[0].file.label, _skip_reason(layout, name, found) or "")
        for name, tensors in found.items()
        if name not in used
    )
    return CheckReport(
        format=location.format,
        folder=location.folder,
        files=location.files,
        step=location.step,
        num_parameters=len(layout.mappings),
        num_values=sum(int(np.prod(mapping.shape, dtype=np.int64)) for mapping in layout.mappings),
        stored_bytes=sum(tensor.nbytes for tensor in used.values()),
        dtypes=dict(Counter(tensor.dtype for tensor in used.values())),
        skipped=skipped,
    )

"""Check a checkpoint against the parameters of a model, and read it one parameter at a time."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mindformers_ext.checkpoint.errors import CheckpointError, listed
from mindformers_ext.checkpoint.locate import Location, locate_checkpoint
from mindformers_ext.checkpoint.match import AnyTensor, Found, Match, match_parameters, skip_reason, tensors_by_name
from mindformers_ext.checkpoint.metadata import read_metadata
from mindformers_ext.checkpoint.pieces import PiecedTensor, RankFiles
from mindformers_ext.checkpoint.quantized import QuantizedTensor
from mindformers_ext.checkpoint.regions import boxes_inside
from mindformers_ext.checkpoint.tensor_file import TensorFile
from mindformers_ext.models.weights import WeightLayout
from mindformers_ext.parallel.plan import Region, split_evenly

# Values of a stored copy and of its original that are in memory together.
_PIECE = 1 << 16
_ALONE = (0, 1)


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


@dataclass(frozen=True)
class LoadReport(CheckReport):
    """What a checkpoint consists of, and what this process read of it.

    Attributes:
        read_parameters: parameters of which something was read.
        read_values: values that were read for them.
        read_files: weight files that they came from.
    """

    read_parameters: int
    read_values: int
    read_files: int

    def summary(self) -> str:
        """One line for the log."""
        if self.read_values == self.num_values:
            return super().summary()
        return (
            f"{self.read_parameters} of {self.num_parameters} parameters, {self.read_values:,} of "
            f"{self.num_values:,} values from {self.read_files} of {len(self.files)} file(s) of {self.folder} "
            f"({self.format})"
        )


class WeightReader:
    """The parameters of one open checkpoint.

    Attributes:
        report: what was found when the checkpoint was checked.
    """

    def __init__(
        self, matches: dict[str, Match], report: CheckReport, used_files: Callable[[], int] = lambda: 0
    ) -> None:
        self._matches = matches
        self._used_files = used_files
        self._read: dict[str, int] = {}
        self.report = report

    def load_report(self) -> LoadReport:
        """Returns the report with what was read so far."""
        read = [count for count in self._read.values() if count]
        return LoadReport(
            **vars(self.report), read_parameters=len(read), read_values=sum(read), read_files=self._used_files()
        )

    def read(self, name: str, region: Region | None = None, as_bits: bool = False) -> np.ndarray:
        """Reads one parameter: of its type (float32 or int32), C-contiguous, writable, shared with nobody.

        Its memory is allocated once, and every tensor is read straight into its place. Of a part, only the values that
        it consists of are read (of quantized tensors, the rows that have some).

        Args:
            name: the parameter.
            region: the part of it that is wanted, which comes in ``region.shape``; None for all.
            as_bits: where all its tensors are stored in bfloat16, return their bits as uint16.

        Raises:
            CheckpointError: if a file changed since it was opened, or an id does not fit int32 or names nothing.
            RuntimeError: if the layout does not lay its sources over the whole parameter.
            ValueError: if the region is one of another shape.
        """
        match = self._matches[name]
        mapping = match.mapping
        as_bits = as_bits and all(not isinstance(t, QuantizedTensor) and t.dtype == "BF16" for t in match.tensors)
        parameter = np.empty(mapping.shape, np.uint16 if as_bits else mapping.dtype)
        views = match.parts(parameter)
        fits = [view.size for view in views] == [math.prod(shape) for shape in match.shapes]
        if not fits or not all(np.may_share_memory(view, parameter) for view in views if view.size):
            raise RuntimeError(f"the layout of {name} does not make views of its sources in {mapping.shape}")
        if sum(view.size for view in views) != parameter.size:
            raise RuntimeError(f"the layout of {name} leaves values of {mapping.shape} without a source")
        if region is None or region.is_whole:
            values = _read_whole(match, parameter, views)
        elif region.full != mapping.shape:
            raise ValueError(f"{name} has shape {mapping.shape}; the region is one of {region.full}")
        else:
            values = _read_part(match, parameter, views, region)
        self._read[name] = values.size
        if mapping.num_ids is not None:
            stored = listed(tensor.where for tensor in match.tensors if not isinstance(tensor, QuantizedTensor))
            _check_ids(stored, values, mapping.num_ids)
        return values


def _read_whole(match: Match, parameter: np.ndarray, views: list[np.ndarray]) -> np.ndarray:
    for view, tensor in zip(views, match.tensors, strict=True):
        tensor.read_into(view)
    return parameter


def _read_part(match: Match, parameter: np.ndarray, views: list[np.ndarray], region: Region) -> np.ndarray:
    """Reads a part into memory of its own; ``parameter`` only gives addresses, so none of its memory becomes real."""
    part = np.empty(region.shape, parameter.dtype)
    boxes = [boxes_inside(view, parameter, region, part) for view in views]
    if any(found is None for found in boxes):
        return np.array(region.take(_read_whole(match, parameter, views)), order="C")
    for view, tensor, found in zip(views, match.tensors, boxes, strict=True):
        for box, target in found or ():
            tensor.read_into(target, view.shape, box)
    return part


def _check_ids(where: str, ids: np.ndarray, count: int) -> None:
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < 0 or high >= count:
        raise CheckpointError(f"{where} holds {low if low < 0 else high}, but the model's ids are 0 to {count - 1}")


def check_weights(path: str | os.PathLike[str], layout: WeightLayout) -> CheckReport:
    """Checks that a checkpoint fills every parameter and that nothing is left over, from the headers of all files.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: with everything that does not fit, naming files and tensors.
    """
    with _open(path, layout, every_file=True) as (reader, _):
        return reader.report


def load_weights(
    path: str | os.PathLike[str],
    layout: WeightLayout,
    assign: Callable[[str, np.ndarray], None],
    regions: Mapping[str, Region] | None = None,
    share: tuple[int, int] = _ALONE,
    takes_bits: Callable[[str], bool] = lambda name: False,
) -> LoadReport:
    """Checks a checkpoint, then reads it and hands over each parameter once.

    Of a folder with a metadata.json only the files that hold something wanted are opened.

    Peak memory is the model and some MiB: each array (of the parameter's shape and type, C-contiguous, writable, shared
    with nobody) may become the parameter's memory without a copy.

    Args:
        path: folder of a HuggingFace model, root of MindFormers iterations, or one iteration folder.
        layout: names and shapes of the model.
        assign: called with parameter name and array, in the order of the layout.
        regions: the part of each parameter that this process holds; parameters without one are left out. None: all.
        share: number of this process and of all that load this checkpoint together; stored copies are compared with
            their originals once, each process its share of the rows.
        takes_bits: tells whether a parameter that is stored in bfloat16 may be handed over as its bits, uint16.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: with everything that does not fit, or a tensor that ought to be a copy of another one and is
            not; nothing was assigned then.
    """
    with open_weights(path, layout, share) as reader:
        for mapping in layout.mappings:
            if regions is None or mapping.name in regions:
                region = None if regions is None else regions[mapping.name]
                assign(mapping.name, reader.read(mapping.name, region, takes_bits(mapping.name)))
        return reader.load_report()


@contextmanager
def open_weights(
    path: str | os.PathLike[str], layout: WeightLayout, share: tuple[int, int] = _ALONE
) -> Iterator[WeightReader]:
    """Opens and checks a checkpoint, for reading parameters by name in any order.

    Args:
        path: see `load_weights`, as the rest.
        layout: see there.
        share: see there.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: see `load_weights`.
    """
    with _open(path, layout) as (reader, found):
        _compare_copies(reader.report.folder, layout, found, share)
        yield reader


@contextmanager
def _open(
    path: str | os.PathLike[str], layout: WeightLayout, every_file: bool = False
) -> Iterator[tuple[WeightReader, Found]]:
    """Opens a checkpoint and checks the headers; of the files that a metadata.json describes only if asked to."""
    location = locate_checkpoint(path)
    with ExitStack() as stack:
        if location.metadata is not None:
            cuts = read_metadata(location.metadata, [file.name for file in location.folder.iterdir()])
            names = {file.name for file in location.files}
            files = stack.enter_context(RankFiles(location.folder))
            model = [cut for cut in cuts.values() if cut.files <= names]
            if every_file:
                files.check(model)
            found: Found = {cut.name: [PiecedTensor(cut, files)] for cut in model}
            used_files: Callable[[], int] = partial(len, files.used)
        else:
            opened = open_files(location.folder, location.files, stack)
            found = tensors_by_name(location, layout, opened)
            used_files = partial(_num_read, opened)
        matches = match_parameters(location, layout, found)
        yield WeightReader(matches, _report(location, layout, matches, found), used_files), found


def _num_read(files: Iterable[TensorFile]) -> int:
    return sum(file.was_read for file in files)


def _compare_copies(folder: Path, layout: WeightLayout, found: Found, share: tuple[int, int]) -> None:
    """Refuses a stored copy with other values than its original, as the model would not be the one that was saved."""
    for name, original in layout.copies:
        for tensor in found.get(name, ()):
            source = found[original][0]
            if not _same_values(tensor, source, share):
                raise CheckpointError(
                    f"checkpoint {folder}: {tensor.where} differs from {source.where}, of which it is a copy in a "
                    "model with tied embeddings; set model.tie_word_embeddings: false if both are meant"
                )


def _same_values(tensor: AnyTensor, original: AnyTensor, share: tuple[int, int]) -> bool:
    """Compares a share of the rows of two float tensors of one shape."""
    begin, end = split_evenly(tensor.shape[0], share[1], share[0])
    step = max(1, _PIECE // math.prod(tensor.shape[1:]))
    for first in range(begin, end, step):
        box = (slice(first, min(first + step, end)), *(slice(0, length) for length in tensor.shape[1:]))
        copy, source = (np.empty([cut.stop - cut.start for cut in box], np.float32) for _ in range(2))
        tensor.read_into(copy, tensor.shape, box)
        original.read_into(source, original.shape, box)
        if not np.array_equal(copy, source, equal_nan=True):
            return False
    return True


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


def _report(location: Location, layout: WeightLayout, matches: dict[str, Match], found: Found) -> CheckReport:
    used = {tensor.name: tensor for match in matches.values() for tensor in match.stored}
    skipped = tuple(
        (tensors[0].name, tensors[0].label, skip_reason(layout, name, found) or "")
        for name, tensors in found.items()
        if tensors[0].name not in used
    )
    return CheckReport(
        format=location.format,
        folder=location.folder,
        files=location.files,
        step=location.step,
        num_parameters=len(layout.mappings),
        num_values=sum(math.prod(mapping.shape) for mapping in layout.mappings),
        stored_bytes=sum(tensor.nbytes for tensor in used.values()),
        dtypes=dict(Counter(tensor.dtype for tensor in used.values())),
        skipped=skipped,
    )

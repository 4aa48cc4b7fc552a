"""Read a tensor that lies in pieces in the files of several ranks, opening only the files that are needed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mindformers_ext.checkpoint.errors import CheckpointError
from mindformers_ext.checkpoint.locate import METADATA_FILE
from mindformers_ext.checkpoint.metadata import CutTensor, StoredPiece
from mindformers_ext.checkpoint.tensor_file import StoredTensor, TensorFile, stored_width

# Files that are open at a time: a process may have 1024 descriptors, and there are folders of more ranks.
_MAX_OPEN = 256


class RankFiles:
    """The files of a folder, each opened when something of it is wanted.

    Attributes:
        used: names of the files that were opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, TensorFile] = {}
        self.used: set[str] = set()

    def tensor(self, cut: CutTensor, piece: StoredPiece) -> StoredTensor:
        """Returns a piece of a tensor, from a file that is open already if there is one.

        Raises:
            CheckpointError: the file cannot be read, or holds something else than metadata.json says.
            OSError: the file cannot be opened.
        """
        name = next((name for name in piece.files if name in self._open), piece.files[0])
        tensor = self._file(name).tensors.get(cut.name)
        where = f"{self._folder / name}"
        if tensor is None:
            raise CheckpointError(f"{where} does not hold {cut.name}, which {METADATA_FILE} says it does")
        if tensor.shape != cut.piece_shape or tensor.dtype != cut.dtype:
            raise CheckpointError(
                f"{cut.name} in {where} is {tensor.dtype} {list(tensor.shape)}, but {METADATA_FILE} says {cut.dtype} "
                f"{list(cut.piece_shape)}"
            )
        return tensor

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = TensorFile(self._folder / name)
            self.used.add(name)
        return self._open[name]

    def check(self, tensors: Iterable[CutTensor]) -> None:
        """Opens every file and compares its header with metadata.json.

        Raises:
            CheckpointError: see `tensor`.
        """
        for cut in tensors:
            for piece in cut.pieces:
                for name in piece.files:
                    self.tensor(cut, StoredPiece(piece.box, (name,)))

    def close(self) -> None:
        """Closes the files."""
        with ExitStack() as stack:
            for file in self._open.values():
                stack.callback(file.close)
        self._open.clear()

    def __enter__(self) -> RankFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class PiecedTensor:
    """A tensor in pieces, read like one that lies in one file (`StoredTensor`)."""

    cut: CutTensor
    files: RankFiles = field(repr=False)
    label: str = METADATA_FILE

    @property
    def name(self) -> str:
        """Its name."""
        return self.cut.name

    @property
    def dtype(self) -> str:
        """safetensors' name of its type."""
        return self.cut.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.cut.shape

    @property
    def where(self) -> str:
        """Name of the tensor and of the file that describes it, for messages."""
        return f"{self.name} in {self.label}"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * stored_width(self.dtype)

    def read_into(
        self, target: np.ndarray, shape: tuple[int, ...] | None = None, box: tuple[slice, ...] | None = None
    ) -> None:
        """Writes values into an array, see `StoredTensor.read_into`; only what the box needs is opened and read.

        Raises:
            CheckpointError: a file is damaged or holds something else than metadata.json says.
            OSError: a file cannot be opened.
            ValueError: ``shape`` is another one than that of the tensor.
        """
        if (shape or target.shape) != self.shape:
            raise ValueError(f"{self.where} is {list(self.shape)} and cannot be read as {list(shape or target.shape)}")
        box = box or tuple(slice(0, length) for length in self.shape)
        for piece in self.cut.pieces:
            shared = [
                (max(begin, want.start), min(end, want.stop)) for (begin, end), want in zip(piece.box, box, strict=True)
            ]
            if any(begin >= end for begin, end in shared):
                continue
            both = list(zip(shared, piece.box, box, strict=True))
            inside = tuple(slice(begin - first, end - first) for (begin, end), (first, _), _ in both)
            there = [slice(begin - want.start, end - want.start) for (begin, end), _, want in both]
            part: tuple[Any, ...] = (..., *there)  # a view, also of an array without dimensions
            self.files.tensor(self.cut, piece).read_into(target[part], self.cut.piece_shape, inside)

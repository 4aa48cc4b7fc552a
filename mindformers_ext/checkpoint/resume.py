"""Open a training checkpoint to continue from it: where its weights are, optimizer state and counters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mindformers_ext.checkpoint.errors import CheckpointError
from mindformers_ext.checkpoint.load import open_files
from mindformers_ext.checkpoint.locate import (
    checkpoint_folder,
    complete_rank_files,
    iteration_step,
    locate_iteration,
)
from mindformers_ext.checkpoint.save import COMMON_FILE, read_common
from mindformers_ext.checkpoint.tensor_file import TensorFile

_WEIGHTS_ONLY = "checkpoint.no_load_optim: true starts a new run from its weights"


class TensorReader(Mapping[str, np.ndarray]):
    """The tensors of one file as a mapping that reads on access.

    Each access returns a new array of the stored type (BF16 becomes float32), which the caller owns.
    """

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file.tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __len__(self) -> int:
        return len(self._file.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._file.tensors


@dataclass
class TrainingState:
    """An open training checkpoint; a context manager that closes its files.

    Attributes:
        folder: the iteration folder; give it to `load_weights` so that both read the same step.
        step: the training step that was finished.
        optimizer_tensors: the optimizer's state, read on access, or None when it was not saved.
        common: what `save_checkpoint` was given as ``common``.
    """

    folder: Path
    step: int
    optimizer_tensors: TensorReader | None
    common: dict[str, Any]
    _files: ExitStack

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def __enter__(self) -> TrainingState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_training_state(path: str | os.PathLike[str]) -> TrainingState:
    """Opens the checkpoint to resume from: the tracked iteration of a root, or an iteration folder.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: if it holds no training checkpoint, a damaged one, or one saved on several ranks.
    """
    folder = locate_iteration(checkpoint_folder(path))
    model_files = complete_rank_files(folder, "model")
    if not model_files or not (folder / COMMON_FILE).exists():
        raise CheckpointError(
            f"{folder} holds no training checkpoint (model files and {COMMON_FILE}) to resume from; {_WEIGHTS_ONLY}"
        )
    optimizer_files = complete_rank_files(folder, "opt")
    if max(len(model_files), len(optimizer_files)) > 1:
        ranks = max(len(model_files), len(optimizer_files))
        raise CheckpointError(
            f"{folder} was saved on {ranks} ranks; resuming from it is not supported yet; {_WEIGHTS_ONLY}"
        )
    common = read_common(folder)
    step = common.get("global_step")
    if step is None:
        step = iteration_step(folder)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"{folder / COMMON_FILE}: global_step must be a step number, not {step!r}")
    with ExitStack() as stack:
        files = open_files(folder, optimizer_files, stack)
        return TrainingState(folder, step, TensorReader(files[0]) if files else None, common, stack.pop_all())

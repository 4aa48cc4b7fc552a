"""Save training checkpoints in the folder format of MindSpore Transformers, safe against interruption."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_ext.checkpoint.files import (
    json_text,
    publish_folder,
    read_json_object,
    remove_folder,
    replace_file,
    write_synced,
)
from mindformers_ext.checkpoint.locate import TRACKER, iteration_name, iterations_in, rank_file_name, rank_files
from mindformers_ext.checkpoint.tensor_writer import TensorSpec, write_tensors

logger = logging.getLogger(__name__)

COMMON_FILE = "common.json"
EXTRA_FILE = "trainer_state.json"
# MindSpore Transformers builds its record from exactly these keys and refuses any other.
COMMON_KEYS = (
    "epoch_num",
    "step_num",
    "global_step",
    "loss_scale",
    "global_batch_size",
    "consumed_samples",
    "ckpt_status",
)


def check_save_path(save_path: str | os.PathLike[str], prefix: str | None) -> None:
    """Tries whether `save_checkpoint` could write here; folders and files made for that are removed again.

    Raises:
        ValueError: the folder cannot be made or written to, or the prefix cannot start a file name.
    """
    _check_prefix(prefix)
    root = Path(save_path)
    made: list[Path] = []
    probe = root / f".{os.getpid()}-{rank_file_name('model', prefix)}"
    try:
        made = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"1")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"checkpoint.save_path: checkpoints cannot be written to {root} ({reason}); name a folder that can be "
            "made and written to"
        ) from None
    finally:
        with suppress(OSError, ValueError):
            probe.unlink(missing_ok=True)
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def check_no_other_run(save_path: str | os.PathLike[str], continued: str | os.PathLike[str] | None) -> None:
    """Refuses to save among the checkpoints of a run that is not continued: tracker and models would mix.

    Args:
        save_path: folder to save to; it need not exist.
        continued: checkpoint whose training goes on, a root or an iteration folder; None for a new run.

    Raises:
        ValueError: names what is there and what to do.
    """
    root = Path(save_path)
    found = iterations_in(root) if root.is_dir() else []
    if not found:
        return
    if continued is not None:
        source = Path(os.path.realpath(continued))
        if Path(os.path.realpath(root)) in (source, source.parent):
            return
    raise ValueError(
        f"checkpoint.save_path: {root} holds checkpoints of another run, up to {found[-1]}; set checkpoint.load_path "
        f"to {root} (without no_load_optim) to continue that run, choose another save_path, or remove the folder"
    )


def _check_prefix(prefix: str | None) -> None:
    # Only names that will be recognised again.
    name = rank_file_name("model", prefix)
    if prefix and (os.sep in prefix or prefix.startswith(".") or "\0" in prefix or not rank_files([name], "model")):
        raise ValueError(f"checkpoint.prefix must be the start of a file name, not {prefix!r}")


def save_checkpoint(
    save_path: str | os.PathLike[str],
    step: int,
    model_tensors: Mapping[str, np.ndarray],
    optimizer_tensors: Mapping[str, np.ndarray] | None,
    common: Mapping[str, Any],
    *,
    prefix: str | None = "checkpoint",
    save_max: int = 5,
    written: list[Path] | None = None,
) -> Path:
    """Saves one training step as ``<save_path>/iteration_<step>`` and points the tracker file to it.

    The folder is written under a temporary name, synced and renamed, and the tracker follows last: an interruption at
    any moment leaves the previous checkpoint and tracker as they were.

    Args:
        save_path: root folder; made when missing.
        step: training step, 0 or more.
        model_tensors: parameter name -> values. A lazy mapping is read one tensor at a time, each one twice.
        optimizer_tensors: the optimizer's state, or None to leave it out.
        common: JSON values. MindSpore Transformers' own keys go to common.json, all others to trainer_state.json.
        prefix: start of the file names.
        save_max: how many of the run's own checkpoints are kept.
        written: iteration folders that this run wrote, oldest first. The new one is appended, and the oldest are
            deleted and taken off; nothing else on the disk is ever deleted. None keeps everything.

    Returns:
        The iteration folder.

    Raises:
        ValueError: for a bad step, prefix, save_max, or values that cannot be stored.
        OSError: if writing fails; the temporary folder is removed.
    """
    check_arguments(step, prefix, save_max)
    final = Path(save_path) / iteration_name(step)
    temporary = begin_folder(final)
    try:
        write_common(temporary, common)
        for kind, tensors in (("model", model_tensors), ("opt", optimizer_tensors)):
            if tensors is not None:
                specs = [TensorSpec(name, array.dtype.name, array.shape) for name, array in tensors.items()]
                write_tensors(temporary / rank_file_name(kind, prefix), specs, tensors.__getitem__, {"format": "ms"})
        publish_iteration(temporary, final, step)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if written is not None:
        prune(final, save_max, written)
    return final


def check_arguments(step: int, prefix: str | None, save_max: int) -> None:
    """Refuses arguments of `save_checkpoint`.

    Raises:
        ValueError: says which.
    """
    if step < 0:
        raise ValueError(f"the step of a checkpoint must be 0 or more, not {step}")
    if save_max < 1:
        raise ValueError(f"checkpoint.save_max must be 1 or more, not {save_max}")
    _check_prefix(prefix)


def temporary_folder(final: Path) -> Path:
    """Returns where an iteration is written before it is complete."""
    return final.with_name(f".{final.name}.partial")


def begin_folder(final: Path) -> Path:
    """Makes the temporary folder of an iteration and returns it."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_folder(final)
    if temporary.exists():  # left by a run that was killed while it saved this step
        shutil.rmtree(temporary)
    temporary.mkdir()
    if final.exists():
        logger.warning("the checkpoint %s exists and will be replaced", final)
    return temporary


def publish_iteration(temporary: Path, final: Path, step: int) -> None:
    """Gives a complete iteration its name and points the tracker to it."""
    publish_folder(temporary, final)
    replace_file(final.parent / TRACKER, str(step).encode())


def write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """Writes what `read_common` reads."""
    known = {key: common.get(key) for key in COMMON_KEYS}
    extra = {key: value for key, value in common.items() if key not in COMMON_KEYS}
    write_synced(folder / COMMON_FILE, json_text(known, COMMON_FILE).encode())
    if extra:
        write_synced(folder / EXTRA_FILE, json_text(extra, EXTRA_FILE).encode())


def prune(newest: Path, save_max: int, written: list[Path]) -> None:
    """Notes the newest iteration of a run and deletes its oldest ones, see `save_checkpoint`."""
    if newest in written:
        written.remove(newest)
    written.append(newest)
    while len(written) > save_max:
        _remove_old(written.pop(0))


def keep_only(iteration: Path) -> None:
    """Removes the other iterations of a root; one that cannot be removed is told in the log."""
    for name in iterations_in(iteration.parent):
        if name != iteration.name:
            _remove_old(iteration.parent / name)


def _remove_old(iteration: Path) -> None:
    try:
        remove_folder(iteration)
    except OSError as error:
        logger.warning("could not delete the old checkpoint %s: %s", iteration, error)


def read_common(folder: Path) -> dict[str, Any]:
    """Reads what `save_checkpoint` was given as ``common``; keys that were left out are None.

    Raises:
        CheckpointError: if common.json is missing or unreadable.
    """
    common = read_json_object(folder / COMMON_FILE)
    if (folder / EXTRA_FILE).exists():
        common.update(read_json_object(folder / EXTRA_FILE))
    return common

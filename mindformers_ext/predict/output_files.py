"""The files of a run's output: their names, what an output must not be, and how they are opened and replaced."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mindformers_ext.predict.sources import input_files

logger = logging.getLogger(__name__)

OUTPUT_SUFFIXES = (".jsonl", ".json", ".txt", "")
OUTPUT_MODE = 0o640


def journal_path(output: Path) -> Path:
    """Where finished records are until the output is complete."""
    return output.with_name(f"{output.name}.journal")


def manifest_path(output: Path) -> Path:
    """Where it is said what made the output."""
    return output.with_name(f"{output.name}.manifest.json")


def draft_path(path: Path) -> Path:
    """Where a file is built that then takes the place of ``path``."""
    return path.with_name(f".{path.name}.draft")


def check_output(
    path: str | os.PathLike[str],
    input_data: Any = None,
    protected: Mapping[str, str | os.PathLike[str]] | None = None,
) -> None:
    """Refuses an output that could not be written at the end of a run, or would harm another file; creates nothing.

    Args:
        path: the output file.
        input_data: as `normalize_input` takes it; the output must not be one of its files, nor match its patterns.
        protected: files, and folders with all that is in them, that the output must not be; by their names in messages.

    Raises:
        ValueError: no name, an unknown suffix, a directory, link or device, the input file, something protected, or a
            parent that is a file.
        PermissionError: the folder is not writable.
        FileNotFoundError: `input_data` names a file that does not exist.
    """
    if not os.fspath(path):
        raise ValueError("the output path is empty; give a file name")
    target = Path(os.path.abspath(path))
    if target.suffix.lower() not in OUTPUT_SUFFIXES or os.fspath(path).endswith(os.sep):
        raise ValueError(f"output {str(path)!r} must end in .jsonl, .json or .txt, or have no suffix")
    sources = input_files(input_data)
    for file in _written(target):
        if file.is_symlink():
            raise ValueError(f"output {str(file)!r} is a symbolic link; give the path of the file itself")
        if file.is_dir():
            raise ValueError(f"output {str(file)!r} is a directory; give a file name")
        if file.exists() and not file.is_file():
            raise ValueError(f"output {str(file)!r} is not a regular file")
        if sources is not None and sources.takes(file):
            raise ValueError(f"output {str(file)!r} is the input file, or one that input_data matches; give another")
        for name, place in (protected or {}).items():
            _check_apart(file, name, Path(place))
    folder = next(parent for parent in target.parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(f"output {str(path)!r}: {str(folder)!r} is a file, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"output {str(path)!r}: the folder {str(folder)!r} is not writable")


def _check_apart(file: Path, name: str, place: Path) -> None:
    resolved, forbidden = Path(os.path.realpath(file)), Path(os.path.realpath(place))
    if forbidden.is_dir() and forbidden in resolved.parents:
        raise ValueError(f"output {str(file)!r} is inside {name} {str(place)!r}; give a path outside that folder")
    if file.exists() and forbidden.exists() and os.path.samefile(file, forbidden):
        raise ValueError(f"output {str(file)!r} is {name} {str(place)!r}; give another name")


def _written(target: Path) -> list[Path]:
    """Every file that a run with this output makes or replaces."""
    finals = (target, manifest_path(target))
    return [*finals, journal_path(target), *map(draft_path, finals)]


def open_locked(path: Path) -> int:
    """Opens a file, which is made if need be, for this process alone; returns the descriptor, whose end is the lock's.

    What is in the file stays. Its mode becomes 0o640.

    Raises:
        ValueError: another run holds it.
        OSError: it cannot be opened, or is a symbolic link.
    """
    while True:
        # Not O_TRUNC: what is in it may be that of a run that is still writing.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, OUTPUT_MODE)
        try:
            _lock(descriptor, path)
            if _is_at(path, descriptor):
                os.fchmod(descriptor, OUTPUT_MODE)  # whatever the umask or the mode of a file that was left
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another run came to its end between open and lock, and removed this file


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Puts what ``write`` writes in place of ``path``, at once and on disk; after an error ``path`` is as it was.

    Raises:
        OSError: the disk is full or gone; names the file.
    """
    draft = draft_path(path)
    draft.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, OUTPUT_MODE), "wb", buffering=1 << 20) as file:
            os.fchmod(file.fileno(), OUTPUT_MODE)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise named_error(error, path) from error
        raise
    sync_folder(path.parent)


def named_error(error: OSError, path: Path) -> OSError:
    """The error of a write with the file's name in it."""
    return OSError(error.errno, f"cannot write: {error.strerror}", str(path))


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder, and the end of old ones, outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems refuse this; the files themselves are safe by then.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{path} is being written by another run; wait until it ends, or give another output"
        ) from None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): no other run may use this output", path, error.strerror)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False

"""Writes rows as .jsonl, .json or text; the output file appears, or changes, only when a run is complete."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mindformers_ext.predict.sources import input_files

logger = logging.getLogger(__name__)

OUTPUT_SUFFIXES = (".jsonl", ".json", ".txt", "")
OUTPUT_MODE = 0o640
PARTIAL_SUFFIX = ".partial"

# What str.splitlines takes for the end of a line. JSON itself escapes those below U+0020.
_LINE_ENDS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_JSON_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
_TEXT_ESCAPES = str.maketrans(
    {"\\": r"\\", "\n": r"\n", "\r": r"\r"} | {character: f"\\u{ord(character):04x}" for character in _LINE_ENDS}
)


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
    for file in (target, _partial_path(target)):
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


def open_writer(path: str | os.PathLike[str]) -> Writer:
    """Opens `<path>.partial`, making the parent folders; see `Writer`.

    Raises:
        ValueError: as `check_output`, or another run is writing to the partial file.
        PermissionError: as `check_output`.
        OSError: the file cannot be made.
    """
    check_output(path)
    return Writer(Path(os.path.abspath(path)))


class Writer:
    """Context manager that takes rows one by one, each on disk (in `<path>.partial`) before the next.

    The partial file is locked until it has become `path` or the process ends: a run has it for itself, and one that
    was killed is in nobody's way.

    Leaving it without an exception puts the complete file in place of `path`; with one, `path` is untouched and the
    rows so far stay in the partial file. Text is UTF-8, file mode 0o640.

    - `.jsonl`: one object a line;
    - `.json`: an array, one element a line;
    - `.txt` or no suffix: the generated text of one row a line, a row without one (an error) as JSON. Backslash,
      newline and other ends of lines are escaped as in a JSON string.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = _partial_path(path)
        self._format = _FORMATS.get(path.suffix.lower(), _TEXT)
        self._rows = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(_open_locked(self.partial), "wb")  # noqa: SIM115 - closed by __exit__

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row.

        Raises:
            OSError: the disk is full or gone; the message names the file.
        """
        before = self._format.start if self._rows == 0 else self._format.between
        # The one thing UTF-8 cannot hold is half of a surrogate pair, and \udXXX is how JSON writes that.
        self._put((before + self._format.render(row)).encode("utf-8", "backslashreplace"))
        self._rows += 1

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, f"cannot write: {error.strerror}", str(self.partial)) from error

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                logger.error("the run did not finish; %d rows are in %s", self._rows, self.partial)
                return
            self._put(((self._format.start if self._rows == 0 else "") + self._format.end).encode())
            os.fsync(self._file.fileno())
            os.replace(self.partial, self.path)
        finally:
            with suppress(OSError):  # the disk may be what failed
                self._file.close()  # this gives up the lock, so the file must have its final name by now
        _sync_folder(self.path.parent)


@dataclass(frozen=True)
class _Format:
    """How rows become a file: `start` row `between` row ... `end`."""

    render: Callable[[dict[str, Any]], str]
    start: str = ""
    between: str = ""
    end: str = ""


def _json_row(row: dict[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return _JSON_LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _json_line(row: dict[str, Any]) -> str:
    return _json_row(row) + "\n"


def _text_line(row: dict[str, Any]) -> str:
    text = row.get("generated_text")
    return (text.translate(_TEXT_ESCAPES) if text is not None else _json_row(row)) + "\n"


_TEXT = _Format(_text_line)
_FORMATS = {
    ".jsonl": _Format(_json_line),
    ".json": _Format(_json_row, start="[\n", between=",\n", end="\n]\n"),
}


def _partial_path(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _open_locked(partial: Path) -> int:
    """Opens the partial file for this run alone, empty; returns the descriptor, whose end is that of the lock."""
    while True:
        # Not O_TRUNC: the rows in it may be those of a run that is still writing.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, OUTPUT_MODE)
        try:
            _lock(descriptor, partial)
            if _is_at(partial, descriptor):
                os.fchmod(descriptor, OUTPUT_MODE)  # whatever the umask or the mode of a file that was left
                os.ftruncate(descriptor, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another run finished between open and lock: this has become its output


def _lock(descriptor: int, partial: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{partial} is being written by another run; wait until it ends, or give another output"
        ) from None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): no other run may use this output", partial, error.strerror)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems refuse this; the file itself is safe by then.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

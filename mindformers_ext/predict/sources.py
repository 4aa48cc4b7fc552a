"""The files of the user's records: which they are, and their lines and elements, read as they are needed."""

from __future__ import annotations

import codecs
import glob
import gzip
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO, cast

INPUT_SUFFIXES = (".jsonl", ".json", ".txt")
STDIN = "-"
STDIN_NAME = "standard input"
MAX_LINE_BYTES = 64 * 1024**2

_GZIP_SUFFIX = ".gz"
_FILES_KEY = "files"
_DAMAGED_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)


class DamagedFileError(Exception):
    """The rest of a compressed file cannot be read; the message says why."""


@dataclass(frozen=True)
class InputFiles:
    """The files that an input names, in the order in which they are read, and the patterns that found some of them."""

    paths: tuple[str, ...]
    patterns: tuple[str, ...] = ()

    def takes(self, path: str | os.PathLike[str]) -> bool:
        """Tells whether `path` is one of the files, by whatever name, or would be found by a pattern if it existed."""
        if os.path.exists(path) and any(os.path.samefile(path, source) for source in self.paths):
            return True
        target = PurePath(os.path.abspath(path))
        return any(target.match(os.path.abspath(pattern)) for pattern in self.patterns)


def reads_stdin(input_data: Any) -> bool:
    """Tells whether `input_data` asks for standard input."""
    return isinstance(input_data, str) and input_data == STDIN


def input_files(input_data: Any) -> InputFiles | None:
    """Returns the files that `input_data` names, None when it is the data itself or standard input.

    A string is a file, or a pattern with `*`, `?` or `[...]` that has the form of a path. A mapping with the one key
    `files` holds a file or pattern, or a list of them. The files of a pattern are sorted by name.

    Raises:
        FileNotFoundError: it looks like a path, or is an `os.PathLike`, and there is no such file.
        TypeError: `files` holds something else than names.
        ValueError: `files` is empty or names a file twice.
    """
    if isinstance(input_data, Mapping) and set(input_data) == {_FILES_KEY}:
        return _named_files(input_data[_FILES_KEY])
    if isinstance(input_data, os.PathLike):
        return InputFiles((_existing(os.fsdecode(input_data), ""),))
    if not isinstance(input_data, str) or reads_stdin(input_data):
        return None
    if not os.path.isfile(input_data) and not _looks_like_path(input_data):
        return None
    return _found(input_data, "; to use it as a prompt, put it in a list")


def _named_files(names: Any) -> InputFiles:
    names = [names] if isinstance(names, str | os.PathLike) else names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str | os.PathLike) for name in names):
        raise TypeError("input_data: files must be a path, a pattern, or a list of them")
    if not names:
        raise ValueError("input_data: files is empty; name at least one file")
    found = [_found(os.fsdecode(name), "") for name in names]
    paths = tuple(path for files in found for path in files.paths)
    seen: set[str] = set()
    for path in paths:
        if os.path.realpath(path) in seen:
            raise ValueError(f"input_data: files names {path!r} twice; every record would be answered twice")
        seen.add(os.path.realpath(path))
    return InputFiles(paths, tuple(pattern for files in found for pattern in files.patterns))


def _found(name: str, hint: str) -> InputFiles:
    """The file of that name, or else the files that it matches as a pattern."""
    if os.path.isfile(name) or not glob.has_magic(name) or "\0" in name:
        return InputFiles((_existing(name, hint),))
    paths = tuple(sorted(path for path in glob.glob(name) if os.path.isfile(path)))
    if not paths:
        raise FileNotFoundError(f"input_data {name!r} matches no file{hint}")
    return InputFiles(paths, (name,))


def _existing(path: str, hint: str) -> str:
    if os.path.isfile(path):
        return path
    kind = "is a directory, not a file" if os.path.isdir(path) else "does not exist"
    if kind == "does not exist" and os.path.exists(path):
        kind = "is not a regular file"
    raise FileNotFoundError(f"input_data {path!r} {kind}{hint}")


def _looks_like_path(text: str) -> bool:
    stripped = text.strip()
    if len(stripped.splitlines()) > 1:
        return False
    name = stripped.lower()
    if name.removesuffix(_GZIP_SUFFIX).endswith(INPUT_SUFFIXES):
        return True
    return len(stripped.split()) == 1 and (os.sep in stripped or name.endswith(_GZIP_SUFFIX))


def suffix_of(path: str) -> str:
    """Returns the suffix that tells the form of a file, in lower case and without that of compression."""
    name = path.lower()
    return os.path.splitext(name.removesuffix(_GZIP_SUFFIX))[1]


@contextmanager
def open_source(path: str) -> Iterator[BinaryIO]:
    """Opens an input file, `STDIN` or a `.gz` file for reading its content as bytes.

    Raises:
        OSError: it cannot be opened, or read on.
        DamagedFileError: the compressed data is damaged or cut off.
    """
    if path == STDIN:
        if sys.stdin is None:
            raise ValueError("input_data '-': this process has no standard input")
        yield sys.stdin.buffer
    elif path.lower().endswith(_GZIP_SUFFIX):
        try:
            if not os.path.getsize(path):
                raise EOFError("the file is empty")
            with gzip.open(path, "rb") as file:
                yield cast(BinaryIO, file)
        except _DAMAGED_GZIP as error:
            raise DamagedFileError(str(error) or type(error).__name__) from error
    else:
        with open(path, "rb") as file:
            yield file


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yields (line number from 1, line without its ending), None for a line that is too long; skips blank lines."""
    number = 0
    # Only \n ends a line: U+2028 and its kind may stand inside a string.
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        # Files glued together have a byte order mark in the middle too.
        line = line.removesuffix(b"\n").removesuffix(b"\r").removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line

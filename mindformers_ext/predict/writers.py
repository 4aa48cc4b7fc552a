"""The formats of an output: rows as .jsonl, .json or text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mindformers_ext.predict.output_files import replace_file
from mindformers_ext.predict.summary import is_score

# What str.splitlines takes for the end of a line. JSON itself escapes those below U+0020.
_LINE_ENDS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_JSON_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
# json.dumps would make one for each row. Rows are made of what JSON held, so they have no circles.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)
_TEXT_ESCAPES = str.maketrans(
    {"\\": r"\\", "\n": r"\n", "\r": r"\r"} | {character: f"\\u{ord(character):04x}" for character in _LINE_ENDS}
)


@dataclass(frozen=True)
class WrittenFile:
    """Size in bytes and SHA-256 (hex) of a file that was written, and the number of its rows."""

    size: int
    sha256: str
    rows: int


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> WrittenFile:
    """Puts a file of rows in place of `path`, at once: `path` is the old file or the complete new one.

    Text is UTF-8, file mode 0o640.

    - `.jsonl`: one object a line;
    - `.json`: an array, one element a line;
    - `.txt` or no suffix: the generated text of one row a line, a row without one (an error) as JSON. Backslash,
      newline and other ends of lines are escaped as in a JSON string.

    Raises:
        OSError: the disk is full or gone; names the file.
    """
    form = _FORMATS.get(path.suffix.lower(), _TEXT)
    checksum = hashlib.sha256()
    size = count = 0

    def write(file: BinaryIO) -> None:
        nonlocal size, count

        def put(text: str) -> None:
            nonlocal size
            data = encoded(text)
            checksum.update(data)
            size += len(data)
            file.write(data)

        for row in rows:
            put((form.between if count else form.start) + form.render(row))
            count += 1
        put(("" if count else form.start) + form.end)

    replace_file(path, write)
    return WrittenFile(size, checksum.hexdigest(), count)


def json_row(row: dict[str, Any]) -> str:
    """A row as JSON on one line, whatever takes which character for the end of a line."""
    text = _ENCODER.encode(row)
    return text if text.isascii() else _JSON_LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def encoded(text: str) -> bytes:
    """Text as UTF-8. The one thing that cannot hold is half of a surrogate pair, and \\udXXX is how JSON writes it."""
    return text.encode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class _Format:
    """How rows become a file: `start` row `between` row ... `end`."""

    render: Callable[[dict[str, Any]], str]
    start: str = ""
    between: str = ""
    end: str = ""


def _json_line(row: dict[str, Any]) -> str:
    return json_row(row) + "\n"


def _text_line(row: dict[str, Any]) -> str:
    text = None if is_score(row) else row.get("generated_text")
    return (text.translate(_TEXT_ESCAPES) if text is not None else json_row(row)) + "\n"


_TEXT = _Format(_text_line)
_FORMATS = {
    ".jsonl": _Format(_json_line),
    ".json": _Format(json_row, start="[\n", between=",\n", end="\n]\n"),
}


def keeps_ids(path: Path) -> bool:
    """Whether the format of `path` holds whole rows, so that `read_rows` can give them back."""
    return path.suffix.lower() in _FORMATS


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file that `write_rows` wrote and whose format keeps them."""
    with open(path, "rb") as file:
        for line in file:
            text = line.strip().removesuffix(b",")
            if text not in (b"[", b"]", b""):
                yield json.loads(text)

"""The journal of a run: every finished record, on disk before the run goes on, in the order in which they finished.

First line: `{"journal": 1, "identity": {...}, "facts": {...}}`. Every other line is one record:
`{"index": 7, "record": "<hash of its content, 16 hex digits>", "rows": [...]}`, its rows being those of the output.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mindformers_ext.predict.finished import FinishedRecords
from mindformers_ext.predict.output_files import named_error, open_locked, sync_folder
from mindformers_ext.predict.summary import is_row
from mindformers_ext.predict.writers import encoded, json_row

logger = logging.getLogger(__name__)

SCHEMA = 1
# Errors that another attempt may not meet: a resumed run makes it.
TRANSIENT_ERRORS = frozenset({"forward", "oom"})

_SYNC_SECONDS = 5.0  # what a power cut may cost; a process that is killed loses nothing that was written
_START = b'{"journal":'
_HASH_DIGITS = 16
_HASH = re.compile(rf"[0-9a-f]{{{_HASH_DIGITS}}}")
# What a record in a journal is to the run that reads it.
_ANSWER, _ERROR, _TRANSIENT = 1, 2, 3


@dataclass(frozen=True)
class Header:
    """What a journal belongs to.

    Attributes:
        schema: version of the journal's form.
        identity: everything that rows depend on, by name; values that JSON can hold.
        facts: what the run that began the journal chose, and the ones that go on must keep.
    """

    schema: int
    identity: dict[str, Any]
    facts: dict[str, Any]


class Journal:
    """An open journal, which no other run can open.

    Attributes:
        path: the file.
        header: its first line; None in a new or empty one.
        finished: the records that are in it and need not be done again. Those whose error another attempt may not
            meet (`TRANSIENT_ERRORS`) are not among them after the journal was read.
        num_finished: how many these were when the journal was read.
        num_errors: how many of them have an error instead of an answer.
    """

    def __init__(self, path: Path) -> None:
        """Opens and locks the file, reads it, and cuts off what a dying run left behind its last whole line.

        Of a journal of another form (`header.schema`) nothing but the first line is read, and nothing is cut off.

        Raises:
            ValueError: another run has it, or it is not a journal.
            OSError: it cannot be opened or read.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._descriptor = open_locked(path)
        self._forget()
        try:
            self._load()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _forget(self) -> None:
        self.header: Header | None = None
        self.finished = FinishedRecords()
        self.num_finished = self.num_errors = 0
        self._offsets = array("q")  # where the newest line of each record begins, -1 where there is none
        self._end = 0
        self._has_unknown = False
        self._synced = time.monotonic()

    @property
    def has_records(self) -> bool:
        """Whether any record was written to it; of another form, whether anything follows the first line."""
        return len(self._offsets) > 0 or self._has_unknown

    def start(self, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Empties the journal and writes its first line.

        Raises:
            OSError: the disk is full or gone.
        """
        os.ftruncate(self._descriptor, 0)
        self._forget()
        self.header = Header(SCHEMA, dict(identity), dict(facts))
        first = {"journal": SCHEMA, "identity": self.header.identity, "facts": self.header.facts}
        self._write(encoded(json_row(first) + "\n"))
        self.sync()
        sync_folder(self.path.parent)

    def append(self, index: int, content: int, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of a finished record; they outlast this process when the call returns.

        Args:
            index: of the record.
            content: its hash, see `record_hash`.
            rows: as they will be in the output.

        Raises:
            OSError: the disk is full or gone; the journal is as it was before.
        """
        offset = self._end
        inner = ", ".join(map(json_row, rows))
        self._write(encoded(f'{{"index": {index}, "record": "{content:0{_HASH_DIGITS}x}", "rows": [{inner}]}}\n'))
        self._note(index, content, offset)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Returns once everything that was written outlasts a power cut.

        Raises:
            OSError: the disk is full or gone.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise named_error(error, self.path) from error
        self._synced = time.monotonic()

    def rows(self, num_records: int) -> Iterator[dict[str, Any]]:
        """Yields the rows of records 0 to `num_records` - 1, in order.

        Raises:
            RuntimeError: one of them is not in the journal.
        """
        with open(self._descriptor, "rb", buffering=1 << 16, closefd=False) as file:
            for index in range(num_records):
                offset = self._offsets[index] if index < len(self._offsets) else -1
                if offset < 0:
                    raise RuntimeError(f"{self.path}: record {index} is missing")
                if file.tell() != offset:
                    file.seek(offset)
                yield from json.loads(file.readline().decode())["rows"]

    def remove(self) -> None:
        """Deletes the file and gives it up."""
        self.path.unlink(missing_ok=True)  # before the lock ends: another run must not find it
        self.close()
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Gives the journal up; it stays on disk."""
        with suppress(OSError):  # the disk may be what failed
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):  # a disk that is almost full takes a part
                rest = line[written:] if written else line
                written += os.pwrite(self._descriptor, rest, self._end + written)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise named_error(error, self.path) from error
        self._end += len(line)

    def _note(self, index: int, content: int, offset: int) -> None:
        missing = index + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.extend([-1] * missing)
        self._offsets[index] = offset
        self.finished.add(index, content)

    def _load(self) -> None:
        size = os.fstat(self._descriptor).st_size
        with open(self._descriptor, "rb", buffering=1 << 20, closefd=False) as file:
            first = file.readline()
            self.header = _header(first)
            if self.header is None and not _is_torn_header(first):
                raise ValueError(
                    f"{self.path} is not the journal of a run, but that is the name that this output's journal needs; "
                    "move the file away, or give another output"
                )
            if self.header is not None:
                self._end = len(first)
                if self.header.schema != SCHEMA:
                    self._has_unknown = size > len(first)
                    return
                self._load_records(file)
        if self._end < size:
            logger.warning("%s: dropped the last %d bytes, which are no whole record", self.path, size - self._end)
            os.ftruncate(self._descriptor, self._end)

    def _load_records(self, file: BinaryIO) -> None:
        kinds = bytearray()
        offset, skipped, damaged = self._end, 0, 0
        for line in file:
            entry = _entry(line)
            if entry is None:
                skipped += 1
            else:
                index, content, rows = entry
                kind = _kind(rows[0])
                self._note(index, 0 if kind == _TRANSIENT else content, offset)
                kinds.extend(bytes(max(index + 1 - len(kinds), 0)))
                kinds[index] = kind
                self._end = offset + len(line)
                damaged, skipped = damaged + skipped, 0
            offset += len(line)
        self.num_errors = kinds.count(_ERROR)
        self.num_finished = kinds.count(_ANSWER) + self.num_errors
        if damaged:
            logger.warning("%s: passed over %d damaged lines; their records are done again", self.path, damaged)
        if transient := kinds.count(_TRANSIENT):
            logger.info("%s: %d records that failed in the model are tried again", self.path, transient)


def _kind(row: Mapping[str, Any]) -> int:
    if "error" not in row:
        return _ANSWER
    return _TRANSIENT if row["error_type"] in TRANSIENT_ERRORS else _ERROR


def _header(line: bytes) -> Header | None:
    value = _object(line)
    if value is None or type(value.get("journal")) is not int:
        return None
    if value["journal"] != SCHEMA:
        return Header(value["journal"], {}, {})
    if value.keys() != {"journal", "identity", "facts"}:
        return None
    if not isinstance(value["identity"], dict) or not isinstance(value["facts"], dict):
        return None
    return Header(value["journal"], value["identity"], value["facts"])


def _is_torn_header(line: bytes) -> bool:
    """Whether a run died while it wrote its first line, or before."""
    return not line.endswith(b"\n") and (line.startswith(_START) or _START.startswith(line) or not line.strip(b"\0"))


def _entry(line: bytes) -> tuple[int, int, list[dict[str, Any]]] | None:
    """The index, hash and rows of a record's line, None if it is not whole."""
    value = _object(line)
    if value is None or value.keys() != {"index", "record", "rows"}:
        return None
    index, content, rows = value["index"], value["record"], value["rows"]
    if type(index) is not int or index < 0 or not isinstance(content, str) or not isinstance(rows, list) or not rows:
        return None
    if not _HASH.fullmatch(content) or not all(is_row(row) and row["sample_idx"] == index for row in rows):
        return None
    return index, int(content, 16), rows


def _object(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

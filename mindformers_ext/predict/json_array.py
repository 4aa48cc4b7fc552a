"""Cuts a JSON array into its elements while it is read, so that a file of any size needs the memory of one element."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

CHUNK_BYTES = 1 << 16

# What changes the scanner's state: outside of a string and inside of one.
_OUTSIDE = re.compile(rb'["{}\[\],]')
_INSIDE = re.compile(rb'["\\]')
_SPACE = b" \t\r\n"


@dataclass(frozen=True)
class Fault:
    """What stands where an element should, as a sentence without its place."""

    message: str


Element: TypeAlias = "bytes | Fault"


def split_elements(file: BinaryIO, limit: int) -> Iterator[Element]:
    """Yields the text of each element of the array that `file` holds, not parsed, or what is wrong in its place.

    Brackets and strings alone are followed: what is wrong inside an element stays inside it. A file that holds no
    array is one element.

    Args:
        file: is read once, from where it stands.
        limit: bytes that an element may have; what is longer becomes a fault and is not kept.
    """
    scanner = _Scanner(limit)
    is_array: bool | None = None
    while chunk := file.read(CHUNK_BYTES):
        if is_array is None:
            chunk = chunk.removeprefix(codecs.BOM_UTF8).lstrip(_SPACE)
            if not chunk:
                continue
            is_array = chunk.startswith(b"[")
            chunk = chunk[1:] if is_array else chunk
        if not is_array:
            scanner.keep(chunk)
            continue
        yield from scanner.scan(chunk)
        if scanner.closed:
            if scanner.rest.strip(_SPACE) or any(
                chunk.strip(_SPACE) for chunk in iter(lambda: file.read(CHUNK_BYTES), b"")
            ):
                yield Fault("there is more text after the end of the array")
            return
    if is_array:
        yield from scanner.cut_off()
    else:
        yield Fault("is missing: the file is empty") if is_array is None else scanner.take()


class _Scanner:
    """Where in the array the reading is, and the pieces of the element that has begun."""

    def __init__(self, limit: int) -> None:
        self.closed = False
        self.rest = b""  # what follows the array in its last chunk
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._count = 0

    def scan(self, chunk: bytes) -> Iterator[Element]:
        """Yields the elements that end in `chunk`."""
        start = position = 0
        while position < len(chunk):
            if self._escaped:
                self._escaped, position = False, position + 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(chunk, position)
            if match is None:
                break
            position, mark = match.end(), match[0]
            if mark == b'"':
                self._in_string = not self._in_string
            elif mark == b"\\":
                self._escaped = True
            elif mark in b"{[":
                self._depth += 1
            elif mark != b"," and self._depth:
                self._depth -= 1
            elif self._depth == 0 and mark != b"}":
                self.keep(chunk[start : match.start()])
                self.closed = mark == b"]"
                element = self.take()
                # Only the array that is empty may have nothing before its end.
                if element or not self.closed or self._count:
                    self._count += 1
                    yield element or Fault("is empty: a comma too many")
                if self.closed:
                    self.rest = chunk[position:]
                    return
                start = position
        self.keep(chunk[start:])

    def keep(self, piece: bytes) -> None:
        """Adds to the element that has begun; what is beyond the limit is only counted."""
        self._size += len(piece)
        if self._size > self._limit:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def take(self) -> Element:
        """Returns the element that has begun and starts the next one."""
        element: Element = b"".join(self._pieces).strip(_SPACE)
        if self._size > self._limit:
            element = Fault(f"has more than {self._limit} bytes")
        self._pieces.clear()
        self._size = 0
        return element

    def cut_off(self) -> Iterator[Element]:
        """Yields what a file that ends before its array leaves: the last element if it is whole, and the fault."""
        element = self.take()
        whole = self._depth == 0 and not self._in_string
        if whole and isinstance(element, bytes) and element.endswith((b"}", b'"')):
            yield element
        yield Fault("is missing: the file ends before the array does")

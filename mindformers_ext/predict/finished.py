"""Which records are finished, and that they are still the same."""

from __future__ import annotations

import hashlib
import json
from array import array

from mindformers_ext.predict.records import Record

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
_WORD = "Q"  # 64 bits a record; 0 means not finished


def record_hash(record: Record) -> int:
    """Returns 64 bits, never all zero, that are equal for records of equal content."""
    error = None if record.error is None else [record.error.type, record.error.message]
    content = _ENCODER.encode([record.prompt, record.fields, error])
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big") or 1


class FinishedRecords:
    """The hashes of finished records by index, 8 bytes each."""

    def __init__(self, words: bytes = b"") -> None:
        """Takes what `to_bytes` gave."""
        self._hashes = array(_WORD)
        self._hashes.frombytes(words)

    def add(self, index: int, content: int) -> None:
        """Notes that record `index` is finished; its content has the hash `content`."""
        missing = index + 1 - len(self._hashes)
        if missing > 0:
            self._hashes.frombytes(bytes(missing * self._hashes.itemsize))
        self._hashes[index] = content

    def has(self, index: int, content: int) -> bool:
        """Whether record `index` is finished and has this content."""
        return self.at(index) == content

    def at(self, index: int) -> int:
        """The hash of finished record `index`, 0 if it is not finished."""
        return self._hashes[index] if index < len(self._hashes) else 0

    def to_bytes(self) -> bytes:
        """Returns the hashes as bytes, for another process of the job."""
        return self._hashes.tobytes()

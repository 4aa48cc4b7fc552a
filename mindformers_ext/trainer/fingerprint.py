"""Short texts that are equal where the things they stand for are."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from mindformers_ext.predict import input_files

_SAMPLED = 1 << 20  # bytes of a file's beginning and end that are looked at


def fingerprint(value: Any) -> str:
    """Returns the start of the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def input_fingerprint(input_data: Any) -> str:
    """Returns what tells one input from another: of each of its files the size, the beginning and the end."""
    files = input_files(input_data)
    if files is None:
        return fingerprint(input_data)
    found = [_file_fingerprint(path) for path in files.paths]
    return found[0] if len(found) == 1 else f"{len(found)} files, {fingerprint(found)}"


def _file_fingerprint(path: str) -> str:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        begin = file.read(_SAMPLED)
        file.seek(max(0, size - _SAMPLED))
        return f"{size} bytes, {hashlib.sha256(begin + file.read()).hexdigest()[:16]}"

"""A short text that is equal where inputs are, found without reading all of them."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from mindformers_ext.predict import input_files
from mindformers_ext.predict.identity import digest

_SAMPLED = 1 << 20  # bytes of a file's beginning and end that are looked at


def input_fingerprint(input_data: Any) -> str:
    """Returns what tells one input from another: of each of its files the size, the beginning and the end."""
    files = input_files(input_data)
    if files is None:
        return digest(input_data)
    found = [_file_fingerprint(path) for path in files.paths]
    return found[0] if len(found) == 1 else f"{len(found)} files, {digest(found)}"


def _file_fingerprint(path: str) -> str:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        begin = file.read(_SAMPLED)
        file.seek(max(0, size - _SAMPLED))
        return f"{size} bytes, {hashlib.sha256(begin + file.read()).hexdigest()[:16]}"

"""Short texts that are equal where the things they stand for are."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

_SAMPLED = 1 << 20  # bytes of a file's beginning and end that are looked at


def fingerprint(value: Any) -> str:
    """Returns the start of the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def input_fingerprint(input_data: Any) -> str:
    """Returns what tells one input from another: of a file its size, its beginning and its end."""
    if isinstance(input_data, str | os.PathLike) and os.path.isfile(input_data):
        size = os.path.getsize(input_data)
        with open(input_data, "rb") as file:
            begin = file.read(_SAMPLED)
            file.seek(max(0, size - _SAMPLED))
            return f"{size} bytes, {hashlib.sha256(begin + file.read()).hexdigest()[:16]}"
    return fingerprint(input_data)

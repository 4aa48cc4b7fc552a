"""What a run's rows depend on: two runs of one identity write the same rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindformers_ext.predict.manifest import file_hash
from mindformers_ext.predict.sources import input_files

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)

_HASH_DIGITS = 16
_SHOWN = 60
_MISSING = "not there"


def digest(value: Any) -> str:
    """Returns the start of the SHA-256 of a value that JSON can hold, hex."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Returns the versions of packages by name; None for one that is not installed as a package."""
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def input_identity(input_data: Any) -> dict[str, Any]:
    """Returns what tells an input from every other: of files the hash of all of them, but not their places.

    Raises:
        OSError: a file cannot be read.
    """
    files = input_files(input_data)
    if files is None:
        return {"data": digest(input_data)}
    found = [
        {"file": os.path.basename(path), "bytes": os.path.getsize(path), "sha256": file_hash(Path(path))}
        for path in files.paths
    ]
    return found[0] if len(found) == 1 else {str(number): file for number, file in enumerate(found)}


def tokenizer_identity(folder: Path) -> dict[str, str]:
    """Returns the hashes of the files that a tokenizer is read from, by name."""
    return {name: file_hash(folder / name)[:_HASH_DIGITS] for name in TOKENIZER_FILES if (folder / name).is_file()}


def identity_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each value that differs, e.g. `generation.seed was 7, is 8`."""
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        f"{name} was {_shown(old.get(name, _MISSING))}, is {_shown(new.get(name, _MISSING))}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name, _MISSING) != new.get(name, _MISSING)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    text = value if value is _MISSING else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

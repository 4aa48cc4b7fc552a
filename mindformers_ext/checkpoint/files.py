"""Small files and folders: read JSON strictly, write so that a crash leaves either the old or the new content."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindformers_ext.checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 256 * 1024 * 1024


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice")
            seen.add(key)
    return result


def parse_json_object(data: bytes, label: str) -> dict[str, Any]:
    """Parses a JSON object; ``label`` names the source in errors.

    Raises:
        CheckpointError: if it is not valid JSON, not an object, or repeats a key.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{label} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        CheckpointError: if the file is missing, too large, or its content is not one JSON object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or not a regular file")
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; a JSON file of a checkpoint has at most {MAX_JSON_BYTES}")
    return parse_json_object(path.read_bytes(), str(path))


def read_model_json(folder: str | os.PathLike[str] | None, name: str) -> dict[str, Any] | None:
    """Reads ``config.json``, ``generation_config.json`` or the like from a model's folder; None where there is none.

    Raises:
        CheckpointError: if the file's content is not one JSON object.
    """
    path = None if folder is None else Path(folder) / name
    return read_json_object(path) if path is not None and path.is_file() else None


def json_text(value: Mapping[str, Any], what: str) -> str:
    """Formats a JSON object for a file.

    Raises:
        ValueError: if a value cannot be written as JSON.
    """
    try:
        return json.dumps(dict(value), ensure_ascii=False, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from error


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and waits until its content is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replaces the content of ``path`` at once: a reader, or a crash, sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside ``folder`` durable, where the file system knows how to."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse to sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def find_folder(folder: Path) -> Path | None:
    """Returns ``folder``, or the complete one that an interrupted `publish_folder` left aside, or None."""
    for candidate in (folder, _set_aside(folder)):
        if candidate.is_dir():
            return candidate
    return None


def publish_folder(temporary: Path, final: Path) -> None:
    """Renames a finished folder to its final name, in place of an older one.

    The older folder stays complete under another name, known to `find_folder`, until the new one is in place.
    """
    sync_folder(temporary)
    aside = _set_aside(final)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except BaseException:
        if aside.exists() and not final.exists():
            os.rename(aside, final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Deletes a folder; an interruption leaves no half of it under its own name."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)

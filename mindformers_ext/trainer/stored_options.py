"""The options of decoding that lie beside the weights. Never imports mindspore."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindformers_ext.checkpoint.files import read_json_object
from mindformers_ext.config.errors import show
from mindformers_ext.runtime import logger

FILE = "generation_config.json"
_MODEL_FILE = "config.json"
SPECIAL_KEYS = ("eos_token_id", "pad_token_id")


def read_stored(folder: Path | None) -> tuple[dict[str, Any], Path | None]:
    """Options beside the weights and their file: without generation_config.json, special tokens of config.json."""
    if folder is None:
        return {}, None
    for path in (folder / FILE, folder / _MODEL_FILE):
        if path.is_file():
            stored = {name: value for name, value in read_json_object(path).items() if value is not None}
            if path.name == _MODEL_FILE:
                stored = {name: stored[name] for name in SPECIAL_KEYS if name in stored}
            return stored, path
    return {}, None


def stored_ids(name: str, stored: Mapping[str, Any], path: Path | None) -> tuple[int, ...]:
    """The ids that a file lists; those below 0, which some files hold for none, are left out with a warning.

    Raises:
        ValueError: it is neither an integer nor a list of integers.
    """
    value = stored.get(name)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(type(token) is int and token < 2**31 for token in ids):
        raise ValueError(f"{path}: {name}: expected an integer, or a list of integers, got {show(value)}")
    negative = [token for token in ids if token < 0]
    if negative:
        logger.warning("%s: %s %s: no token has an id below 0; it has no effect", path, name, value)
    return tuple(token for token in ids if token >= 0)

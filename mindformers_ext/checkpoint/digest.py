"""What tells one checkpoint from another, without reading all of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mindformers_ext.checkpoint.locate import locate_checkpoint

# Blocks of a file that are looked at, evenly spaced, and their bytes. A training step changes all of them.
_BLOCKS = 64
_BLOCK_BYTES = 1 << 14
_MAX_HEADER = 100 * 1024**2
_LENGTH_BYTES = 8
_HASH_DIGITS = 16


def weights_digest(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns, for each weight file by name, its size and a hash of its header and of samples of its values.

    The header holds names, shapes and types of all tensors. Place and times of the files do not count.

    Raises:
        FileNotFoundError: the path does not exist.
        CheckpointError: it holds no safetensors weights.
    """
    return {file.name: _digest(file) for file in locate_checkpoint(path).files}


def _digest(path: Path) -> str:
    size = path.stat().st_size
    checksum = hashlib.sha256()
    with open(path, "rb") as file:
        length = file.read(_LENGTH_BYTES)
        checksum.update(length)
        checksum.update(file.read(min(int.from_bytes(length, "little"), _MAX_HEADER)))
        begin = file.tell()
        step = max((size - begin) // _BLOCKS, _BLOCK_BYTES)
        for start in range(begin, size, step):
            file.seek(start)
            checksum.update(file.read(_BLOCK_BYTES))
    return f"{size} bytes, {checksum.hexdigest()[:_HASH_DIGITS]}"

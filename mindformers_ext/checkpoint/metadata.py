"""metadata.json of MindSpore Transformers: how the tensors of a checkpoint are cut, and which file holds which piece.

A tensor is cut as MindSpore's ``Layout`` says: ranks form a matrix of devices, each dimension of the tensor is split
evenly along some of its axes, and a piece is known by its number in C order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindformers_ext.checkpoint.errors import CheckpointError, ProblemList, listed
from mindformers_ext.checkpoint.files import read_json_object
from mindformers_ext.checkpoint.locate import rank_files
from mindformers_ext.checkpoint.sharing import Box, SharedTensor

# MindSpore's name of a type -> safetensors' and numpy's.
_TYPES = {
    "Float64": ("F64", "float64"),
    "Float32": ("F32", "float32"),
    "Float16": ("F16", "float16"),
    "BFloat16": ("BF16", "bfloat16"),
    "Int64": ("I64", "int64"),
    "UInt64": ("U64", "uint64"),
    "Int32": ("I32", "int32"),
    "UInt32": ("U32", "uint32"),
    "Int16": ("I16", "int16"),
    "UInt16": ("U16", "uint16"),
    "Int8": ("I8", "int8"),
    "UInt8": ("U8", "uint8"),
    "Bool": ("BOOL", "bool"),
}
_MINDSPORE_NAMES = {numpy_name: name for name, (_, numpy_name) in _TYPES.items()}


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a tensor and the files that hold it, all with the same values."""

    box: Box
    files: tuple[str, ...]


@dataclass(frozen=True)
class CutTensor:
    """A tensor of a checkpoint that lies in pieces: together they are the tensor, once.

    Attributes:
        name: of the tensor, and of its piece in every file.
        dtype: safetensors' name of the type.
        shape: of the whole.
        piece_shape: of every piece.
        pieces: the pieces.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    piece_shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def files(self) -> set[str]:
        """Every file that holds some of it."""
        return {file for piece in self.pieces for file in piece.files}


def metadata_of(tensors: Iterable[tuple[SharedTensor, Mapping[int, str]]]) -> dict[str, Any]:
    """Returns the content of metadata.json.

    Args:
        tensors: each tensor with the name of the file that it goes to on every rank.
    """
    described: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    for tensor, file_of in tensors:
        described[tensor.name] = {
            "properties": {
                "dtype": _MINDSPORE_NAMES[tensor.dtype],
                "replica_id": 0,
                "allow_shape_mismatch": False,
                "allow_to_save": True,
            },
            "global_shape": list(tensor.shape),
            "axis_fragmentations": list(tensor.cuts),
            "layout": _layout_of(tensor),
            "chunk": [
                {"global_offset": [piece], "local_shape": list(tensor.piece_shape)}
                for piece in range(len(tensor.writers))
            ],
        }
        for piece, (writers, holders) in enumerate(zip(tensor.writers, tensor.holders, strict=True)):
            stored[_storage_key(tensor.name, [piece])] = [
                {"file_name": file_of[rank], "storage_rank": rank, "rank_group": list(holders)} for rank in writers
            ]
    return {"state_dict_metadata": described, "storage_data": stored}


def _layout_of(tensor: SharedTensor) -> dict[str, Any] | None:
    """One device axis for each dimension that is cut; the ranks are the first writers, piece by piece."""
    if not tensor.shape:
        return None
    axes = [dim for dim, count in enumerate(tensor.cuts) if count > 1]
    # MindSpore counts the axes of the matrix from the right.
    numbers = {dim: len(axes) - 1 - position for position, dim in enumerate(axes)}
    # Readers take these five by their order.
    return {
        "device_matrix": [tensor.cuts[dim] for dim in axes] or [1],
        "tensor_map": [numbers.get(dim, -1) for dim in range(len(tensor.shape))],
        "interleaved_parallel": False,
        "alias_name": [f"dim{dim}" for dim in axes] or ["whole"],
        "rank_list": [writers[0] for writers in tensor.writers],
    }


def _storage_key(name: str, offset: Sequence[int]) -> str:
    return str((name, tuple(offset)))


def read_metadata(path: Path, present: Sequence[str]) -> dict[str, CutTensor]:
    """Reads a metadata.json, of this package or of MindSpore Transformers.

    Args:
        path: the file.
        present: names of the files beside it.

    Raises:
        CheckpointError: the file is damaged, or pieces of a tensor are missing, overlap or are said to lie in files
            that are not there; names tensors and files.
    """
    content = read_json_object(path)
    described, stored = (_object(content.get(key), path, key) for key in ("state_dict_metadata", "storage_data"))
    problems = ProblemList(str(path))
    tensors = {}
    for name, entry in described.items():
        try:
            tensors[name] = _cut_tensor(name, _object(entry, path, name), stored)
        except CheckpointError as error:
            problems.add("tensors whose pieces do not fit together", str(error))
            continue
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path}: the description of {name} is damaged ({error!r})") from error
        for file in sorted(tensors[name].files):
            if not rank_files([file], "model") and not rank_files([file], "opt"):
                problems.add("files that are no rank files", f"{file!r} (for {name})")
            elif file not in present:
                problems.add("missing files", f"{file} (for {name})")
    problems.raise_if_any()
    return tensors


def _object(value: object, path: Path, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what} must be an object, not {type(value).__name__}")
    return value


def _cut_tensor(name: str, entry: Mapping[str, Any], stored: Mapping[str, Any]) -> CutTensor:
    dtype = _TYPES.get(entry["properties"]["dtype"])
    if dtype is None:
        raise CheckpointError(f"{name} has the unknown type {entry['properties']['dtype']!r}")
    shape = tuple(int(length) for length in entry["global_shape"])
    chunks = {tuple(chunk["global_offset"]): tuple(chunk["local_shape"]) for chunk in entry["chunk"]}
    places = [place for offset in chunks for place in stored.get(_storage_key(name, offset), ())]
    layout = entry["layout"]
    if layout is None:
        boxes: dict[Box, dict[str, None]] = {tuple((0, length) for length in shape): dict.fromkeys(_names(places))}
    else:
        boxes = _boxes_of_layout(name, shape, layout, places)
    lost = next((box for box, files in boxes.items() if not files), None)
    if lost is not None:
        raise CheckpointError(f"no file holds {shown_box(lost)} of {name} {list(shape)}")
    piece_shape = tuple(end - begin for begin, end in next(iter(boxes)))
    said = set(chunks.values())
    if said != {piece_shape}:
        texts = listed(str(list(one)) for one in sorted(said))
        raise CheckpointError(
            f"{name} {list(shape)} is said to lie in pieces of {texts}, but its layout makes pieces of "
            f"{list(piece_shape)}"
        )
    pieces = tuple(StoredPiece(box, tuple(files)) for box, files in boxes.items())
    return CutTensor(name, dtype[0], shape, piece_shape, pieces)


def _names(places: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(place["file_name"]) for place in places]


def _boxes_of_layout(
    name: str, shape: tuple[int, ...], layout: Mapping[str, Any], places: Sequence[Mapping[str, Any]]
) -> dict[Box, dict[str, None]]:
    """The boxes of a layout, each with the files that hold it: those of the ranks that have the box."""
    matrix, ranks = tuple(int(size) for size in layout["device_matrix"]), layout["rank_list"]
    if math.prod(matrix) != len(ranks):
        raise CheckpointError(f"{name} is laid out over {len(ranks)} ranks in a matrix of {list(matrix)}")
    entries = [entry if isinstance(entry, list) else [entry] for entry in layout["tensor_map"]]
    axes = tuple(tuple(int(axis) for axis in entry if axis != -1) for entry in entries)
    files_of: dict[int, dict[str, None]] = {}
    for place in places:
        for rank in (place["storage_rank"], *place.get("rank_group", ())):
            files_of.setdefault(rank, {})[str(place["file_name"])] = None
    try:
        cut = _cut_evenly(shape, matrix, axes)
    except CheckpointError as error:
        raise CheckpointError(f"{name} {list(shape)}: {error}") from error
    boxes: dict[Box, dict[str, None]] = {}
    for box, rank in zip(cut, ranks, strict=True):
        boxes.setdefault(box, {}).update(files_of.get(rank, {}))
    return boxes


@lru_cache(maxsize=256)
def _cut_evenly(shape: tuple[int, ...], matrix: tuple[int, ...], axes: tuple[tuple[int, ...], ...]) -> tuple[Box, ...]:
    """Returns the box of every position in a matrix of devices.

    Args:
        shape: of the tensor.
        matrix: sizes of the axes of devices.
        axes: for each dimension of the tensor the axes that split it, counted from the right, the slowest first.

    Raises:
        CheckpointError: a dimension does not divide, or the boxes are not the tensor.
    """
    if len(axes) != len(shape):
        raise CheckpointError(f"its layout has {len(axes)} dimensions")
    boxes = []
    for position in range(math.prod(matrix)):
        box = []
        for length, along in zip(shape, axes, strict=True):
            number, count = 0, 1
            for axis in along:
                size = matrix[-1 - axis]
                number = number * size + position // math.prod(matrix[len(matrix) - axis :]) % size
                count *= size
            if length % count:
                raise CheckpointError(f"its layout cuts {length} into {count} equal pieces")
            box.append((length // count * number, length // count * (number + 1)))
        boxes.append(tuple(box))
    # Equal pieces of one grid do not overlap, so counting them tells whether one is missing.
    pieces = math.prod(
        length // (end - begin) if length else 1 for length, (begin, end) in zip(shape, boxes[0], strict=True)
    )
    if len(set(boxes)) != pieces:
        raise CheckpointError(f"its layout makes {len(set(boxes))} of {pieces} pieces")
    return tuple(boxes)


def shown_box(box: Box) -> str:
    """Returns a box as numpy would index it."""
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in box) + "]"

"""Which format a checkpoint path has, and which files belong to it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from mindformers_ext.checkpoint.errors import CheckpointError, ProblemList, listed
from mindformers_ext.checkpoint.files import find_folder, read_json_object

TRACKER = "latest_checkpointed_iteration.txt"
HF_FILE = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"
METADATA_FILE = "metadata.json"
ADAPTER_FILES = ("mindformers_adapter_config.json", "adapter_config.json")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_ITERATION = re.compile(r"iteration_(\d+)")
_HF_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_RANK_FILE = re.compile(r"(?:(?P<prefix>.+)-)?(?P<kind>model|opt)-(?P<rank>\d+)-(?P<total>\d+)\.safetensors")


@dataclass(frozen=True)
class Location:
    """The files of one checkpoint.

    Attributes:
        format: ``huggingface`` or ``mindformers``.
        folder: the folder that holds the weight files.
        files: the weight files, in the order of shards or ranks.
        index: the HuggingFace index, when there is one.
        weight_map: tensor name -> file name as the index says; empty without an index.
        step: training step of a MindFormers iteration folder.
        metadata: the metadata.json that says which rank file holds which piece, when there is one.
    """

    format: str
    folder: Path
    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: dict[str, str] | None = None
    step: int | None = None
    metadata: Path | None = None


def iteration_name(step: int) -> str:
    """Name of the folder of a training step."""
    return f"iteration_{step:08d}"


def rank_file_name(kind: str, prefix: str | None, rank: int = 0, total: int = 1) -> str:
    """Name of one rank's file; ``kind`` is ``model`` or ``opt``."""
    return f"{prefix + '-' if prefix else ''}{kind}-{rank:07d}-{total:07d}.safetensors"


def checkpoint_folder(path: str | os.PathLike[str]) -> Path:
    """Returns ``path`` as an existing folder.

    Raises:
        FileNotFoundError: if it does not exist.
        CheckpointError: if it is not a folder.
    """
    if not os.fspath(path):
        raise CheckpointError("the checkpoint path is empty; name the folder that holds the weights")
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; the checkpoint path must be its folder, {folder.parent}")
    return folder


def model_files_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the folder that holds config.json and the tokenizer of a checkpoint.

    That is ``path`` itself, or its parent when ``path`` is an iteration folder without a config.json of its own.
    """
    folder = Path(os.path.abspath(path))
    if _ITERATION.fullmatch(folder.name) and not (folder / "config.json").is_file():
        return folder.parent
    return folder


def locate_checkpoint(path: str | os.PathLike[str]) -> Location:
    """Finds out what lies at ``path``: HuggingFace weights, MindFormers iterations, or one MindFormers folder.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: if it holds no safetensors weights, two kinds of them, or files are missing.
    """
    folder = checkpoint_folder(path)
    names = sorted(entry.name for entry in folder.iterdir())
    kinds = {}
    if HF_FILE in names or any(name.endswith(HF_INDEX) for name in names) or _shard_names(names):
        kinds["HuggingFace weights"] = lambda: _locate_hf(folder, names)
    if TRACKER in names or any(_ITERATION.fullmatch(name) for name in names):
        kinds["MindFormers iterations"] = lambda: _locate_iteration(locate_iteration(folder))
    if rank_files(names, "model"):
        kinds["MindFormers rank files"] = lambda: _locate_iteration(folder)
    if not kinds:
        raise CheckpointError(f"checkpoint {folder}: {_why_nothing(folder, names)}")
    if len(kinds) > 1:
        raise CheckpointError(f"{folder} holds {' and '.join(kinds)}; keep one kind in a folder, or name the subfolder")
    return next(iter(kinds.values()))()


def _why_nothing(folder: Path, names: list[str]) -> str:
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    others = [name for name in names if name.endswith(".safetensors")]
    if any(name in names for name in ADAPTER_FILES):
        return "this is an adapter (LoRA) without the model's own weights, which is not supported yet"
    if pickles and not others:
        return f"only safetensors is read, and the weights here are in another format ({listed(pickles, 3)})"
    expected = f"expected {HF_FILE}, {HF_INDEX}, {TRACKER} or *model-<rank>-<total>.safetensors"
    return f"no weights found; {expected}" + (f", found {listed(others, 3)}" if others else "")


# HuggingFace


def _shard_names(names: Iterable[str]) -> dict[tuple[str, int], dict[int, str]]:
    """Groups ``x-00001-of-00003.safetensors`` names: (x, 3) -> {1: name, ...}."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        match = _HF_SHARD.fullmatch(name)
        if match:
            groups.setdefault((match[1], int(match[3])), {})[int(match[2])] = name
    return groups


def _locate_hf(folder: Path, names: list[str]) -> Location:
    indexes = [name for name in names if name.endswith(HF_INDEX)]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} holds several indexes ({listed(indexes, 3)}); keep the one to load")
    if indexes:
        index = folder / indexes[0]
        weight_map = read_index(index)
        files = shard_paths(index, weight_map)
        if HF_FILE in names and folder / HF_FILE not in files:
            raise CheckpointError(f"{folder} holds both {HF_FILE} and {index.name}, which does not list it; keep one")
        return Location("huggingface", folder, tuple(files), index, weight_map)
    if HF_FILE in names:
        return Location("huggingface", folder, (folder / HF_FILE,))
    groups = _shard_names(names)
    if len(groups) > 1:
        found = listed(next(iter(group.values())) for group in groups.values())
        raise CheckpointError(f"{folder} holds shards of several checkpoints ({found}) and no {HF_INDEX}")
    (stem, total), shards = next(iter(groups.items()))
    expected = [f"{stem}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    _refuse_other_files(folder, expected, shards.values())
    return Location("huggingface", folder, tuple(folder / name for name in expected))


def _refuse_other_files(folder: Path, expected: list[str], found: Iterable[str]) -> None:
    problems = ProblemList(str(folder))
    present = set(found)
    for name in expected:
        if name not in present:
            problems.add("missing files", name)
    for name in sorted(present - set(expected)):
        problems.add("files whose number is out of range", name)
    problems.raise_if_any()


def read_index(index: Path) -> dict[str, str]:
    """Reads the ``weight_map`` of a HuggingFace index: tensor name -> file name.

    Raises:
        CheckpointError: if the file is not such an index.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{index} has no "weight_map" object that says which file holds which tensor')
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(f"{index}: the file of {name} must be a name, not {file!r}")
    return weight_map


def shard_paths(index: Path, weight_map: dict[str, str]) -> list[Path]:
    """Returns the files that an index names, each inside the index's folder and present.

    The index is data that somebody else wrote, so a name that leads out of the folder is refused, whether by its
    text or through a link. Links of the HuggingFace cache, from ``snapshots/<revision>`` to ``blobs``, are allowed.

    Raises:
        CheckpointError: with the tensors and files that cannot be used.
    """
    first_tensor: dict[str, str] = {}
    for tensor, file in weight_map.items():
        first_tensor.setdefault(file, tensor)
    problems = ProblemList(f"{index.parent}: {index.name}")
    for file, tensor in sorted(first_tensor.items()):
        if _leaves_by_text(file):
            problems.add("files outside the checkpoint folder", f"{file!r} (for {tensor})")
        elif not file.endswith(".safetensors"):
            problems.add("files that are not safetensors, and only safetensors is read", f"{file} (for {tensor})")
        elif _leaves_by_link(index.parent, file):
            problems.add("files outside the checkpoint folder through a link", f"{file} (for {tensor})")
        elif not (index.parent / file).is_file():
            problems.add("missing files", f"{file} (for {tensor})")
    problems.raise_if_any()
    return [index.parent / file for file in sorted(first_tensor)]


def _leaves_by_text(file: str) -> bool:
    parts = PureWindowsPath(file)  # knows both separators and drive letters
    return bool(parts.drive or parts.root or ".." in parts.parts or "\0" in file)


def _leaves_by_link(folder: Path, file: str) -> bool:
    home = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(folder / file))
    in_cache = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return not in_cache and not target.is_relative_to(home)


# MindFormers


def locate_iteration(folder: Path) -> Path:
    """Returns the iteration folder of a checkpoint path: the tracked one of a root, or ``folder`` itself.

    Raises:
        CheckpointError: if the tracker is unreadable or absent, or points to a missing iteration.
    """
    tracker = folder / TRACKER
    iterations = iterations_in(folder)
    if not tracker.is_file():
        if iterations:
            raise CheckpointError(f"{folder} has no {TRACKER}; name one of its folders: {listed(iterations)}")
        return folder
    with open(tracker, "rb") as file:
        text = file.read(64).decode("utf-8", "replace").strip()
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{tracker} must hold the number of an iteration, not {text!r}")
    found = find_folder(folder / iteration_name(int(text)))
    if found is None:
        there = f"there are {listed(iterations)}" if iterations else "there is no iteration folder"
        raise CheckpointError(f"{tracker} points to {iteration_name(int(text))}, which is missing; {there}")
    return found


def iterations_in(folder: Path) -> list[str]:
    """Returns the names of the iteration folders of a root, in the order of their steps."""
    names = [entry.name for entry in folder.iterdir() if _ITERATION.fullmatch(entry.name)]
    return sorted(names, key=lambda name: (int(name.rpartition("_")[2]), name))


def has_iterations(folder: str | os.PathLike[str]) -> bool:
    """Whether a root, which need not exist, holds checkpoints of training."""
    return os.path.isdir(folder) and bool(iterations_in(Path(folder)))


def rank_files(names: Iterable[str], kind: str) -> dict[str, re.Match[str]]:
    """Picks the MindFormers files of one kind, ``model`` or ``opt``: name -> match with prefix, rank and total."""
    matches = {name: _RANK_FILE.fullmatch(name) for name in names}
    return {name: match for name, match in matches.items() if match and match["kind"] == kind}


def complete_rank_files(folder: Path, kind: str) -> list[Path]:
    """Returns the files of one kind in an iteration folder, by rank; empty when there are none.

    Raises:
        CheckpointError: if ranks are missing or the files belong to different saves.
    """
    found = rank_files(sorted(entry.name for entry in folder.iterdir()), kind)
    if not found:
        return []
    saves = {(match["prefix"], int(match["total"])) for match in found.values()}
    if len(saves) > 1:
        raise CheckpointError(f"{folder} holds {kind} files of several saves: {listed(found)}")
    prefix, total = saves.pop()
    expected = [rank_file_name(kind, prefix, rank, total) for rank in range(total)]
    _refuse_other_files(folder, expected, found)
    return [folder / name for name in expected]


def iteration_step(folder: Path) -> int | None:
    """Returns the step in an iteration folder's name, or None for another name."""
    match = _ITERATION.match(folder.name.lstrip("."))
    return int(match[1]) if match else None


def saved_step(path: str | os.PathLike[str]) -> int:
    """Returns the training step of the checkpoint at ``path``, 0 where its folder does not tell.

    Raises:
        FileNotFoundError: if the path does not exist.
        CheckpointError: see `locate_checkpoint`.
    """
    return locate_checkpoint(path).step or 0


def _locate_iteration(folder: Path) -> Location:
    files = complete_rank_files(folder, "model")
    if not files:
        names = sorted(entry.name for entry in folder.iterdir())
        raise CheckpointError(f"checkpoint {folder}: {_why_nothing(folder, names)}")
    step = iteration_step(folder)
    adapter_of = [folder] if step is None else [folder, folder.parent]
    if any((place / ADAPTER_FILES[0]).exists() for place in adapter_of):
        raise CheckpointError(f"{folder} holds adapter (LoRA) weights only, which are not supported yet")
    metadata = folder / METADATA_FILE
    return Location("mindformers", folder, tuple(files), step=step, metadata=metadata if metadata.exists() else None)

"""Write HuggingFace model folders, and the config and tokenizer files that make a checkpoint usable on its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_ext.checkpoint.files import json_text, publish_folder, replace_file, write_synced
from mindformers_ext.checkpoint.locate import HF_FILE, HF_INDEX
from mindformers_ext.checkpoint.tensor_writer import TensorSpec, write_tensors
from mindformers_ext.models.weights import WeightLayout, WeightMapping

EXPORT_DTYPES = ("bfloat16", "float16", "float32")
# Keys of config.json about weights in 8 or 4 bits; DeepSeek-V4 names the type of its experts apart.
_QUANTIZATION_KEYS = ("quantization_config", "expert_dtype")
# Data files only: nothing that somebody could execute is copied.
MODEL_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def write_model_files(
    save_path: str | os.PathLike[str],
    hf_config: Mapping[str, Any] | None,
    tokenizer_folder: str | os.PathLike[str] | None,
) -> None:
    """Writes config.json and copies the tokenizer files, so that prediction can start from ``save_path``.

    Args:
        save_path: the folder; made when missing.
        hf_config: the model's configuration in HuggingFace form, or None to leave config.json alone.
        tokenizer_folder: where the tokenizer (and generation_config.json) is, or None to copy nothing.

    Raises:
        FileNotFoundError: if the tokenizer folder does not exist.
        ValueError: if the configuration cannot be written as JSON.
    """
    target = Path(save_path)
    target.mkdir(parents=True, exist_ok=True)
    if hf_config is not None:
        replace_file(target / "config.json", json_text(hf_config, "config.json").encode())
    if tokenizer_folder is None:
        return
    source = Path(tokenizer_folder)
    if not source.is_dir():
        raise FileNotFoundError(f"tokenizer folder {source} does not exist")
    if os.path.realpath(source) == os.path.realpath(target):
        return
    for name in MODEL_FILES:
        if (source / name).is_file():
            replace_file(target / name, (source / name).read_bytes())


def save_hf_checkpoint(
    folder: str | os.PathLike[str],
    layout: WeightLayout,
    read: Callable[[str], np.ndarray],
    hf_config: Mapping[str, Any],
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
    tokenizer_folder: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Writes a HuggingFace model folder, one parameter at a time; it appears only when it is complete.

    Args:
        folder: the folder to make; it must not exist or be empty.
        layout: names and shapes of the model.
        read: returns a parameter by name, in its shape and type (float32 or int32).
        hf_config: written as config.json, with ``dtype`` as its type and without a quantization.
        dtype: ``bfloat16``, ``float16`` or ``float32``; values are rounded to nearest even. Parameters with
            ``keep_float32`` stay float32, tables of ids become int64.
        max_shard_bytes: a new file is begun before this size is passed; the sources of one parameter stay together.
        tokenizer_folder: where tokenizer files are copied from, or None.

    Returns:
        The weight files.

    Raises:
        FileExistsError: if the folder holds something.
        ValueError: for a bad dtype or shard size, or values too large for float16.
    """
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(EXPORT_DTYPES)}, not {dtype!r}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be 1 or more, not {max_shard_bytes}")
    final = Path(os.path.abspath(folder))
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise FileExistsError(f"{final} exists already; the output must be a new or empty folder")
    temporary = final.with_name(f".{final.name}.partial")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        names = _write_shards(temporary, layout, read, dtype, max_shard_bytes)
        write_model_files(temporary, _with_dtype(hf_config, dtype), tokenizer_folder)
        publish_folder(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return [final / name for name in names]


def _with_dtype(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Names the stored type under the key that the config has (both are in use), and drops what quantized ones say."""
    config = {key: value for key, value in hf_config.items() if key not in _QUANTIZATION_KEYS}
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]:
        config[key] = dtype
    return config


def _specs(mapping: WeightMapping, dtype: str) -> list[TensorSpec]:
    stored = "int64" if mapping.dtype == "int32" else "float32" if mapping.keep_float32 else dtype
    pairs = zip(mapping.sources, mapping.source_shapes, strict=True)
    return [TensorSpec(name, stored, tuple(shape)) for name, shape in pairs]


def _write_shards(
    folder: Path, layout: WeightLayout, read: Callable[[str], np.ndarray], dtype: str, max_shard_bytes: int
) -> list[str]:
    shards: list[list[WeightMapping]] = [[]]
    filled = 0
    for mapping in layout.mappings:
        size = sum(spec.nbytes for spec in _specs(mapping, dtype))
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(mapping)
        filled += size
    total = len(shards)
    names = [HF_FILE] if total == 1 else [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    for name, mappings in zip(names, shards, strict=True):
        _write_shard(folder / name, mappings, read, dtype)
    if total > 1:
        weight_map = {s: name for name, shard in zip(names, shards, strict=True) for m in shard for s in m.sources}
        size = sum(spec.nbytes for mapping in layout.mappings for spec in _specs(mapping, dtype))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_synced(folder / HF_INDEX, json_text(index, HF_INDEX).encode())
    return names


def _write_shard(path: Path, mappings: Sequence[WeightMapping], read: Callable[[str], np.ndarray], dtype: str) -> None:
    owner = {source: mapping for mapping in mappings for source in mapping.sources}
    views: dict[str, np.ndarray] = {}  # the sources in the parameter that was read last

    def read_source(name: str) -> np.ndarray:
        if name not in views:
            views.clear()
            mapping = owner[name]
            values = read(mapping.name)
            if values.shape != mapping.shape or values.dtype.name != mapping.dtype:
                raise ValueError(
                    f"{mapping.name} is {values.dtype.name} {values.shape}, expected {mapping.dtype} {mapping.shape}"
                )
            views.update(zip(mapping.sources, mapping.parts(values), strict=True))
        return views.pop(name)

    specs = [spec for mapping in mappings for spec in _specs(mapping, dtype)]
    write_tensors(path, specs, read_source, {"format": "pt"})

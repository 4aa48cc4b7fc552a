"""A model of three parameters kinds (plain, fused qkv, interleaved gate/up), its weights, and files made by hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_ext.models.weights import WeightLayout, WeightMapping

HIDDEN, VOCAB, FFN = 4, 6, 5
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
QKV = tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
GATE_UP = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
HEAD = "lm_head.weight"
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "?"}
NUMPY_TYPES |= {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
# Stored as the codes that are given.
CODES = ("U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")


def plain(name: str, source: str, shape: tuple[int, ...], **options: Any) -> WeightMapping:
    """A parameter that is one tensor as it is."""
    return WeightMapping(name, shape, (source,), (shape,), lambda parameter: [parameter], **options)


def make_layout(tied: bool = False) -> WeightLayout:
    qkv_shapes = ((HIDDEN, HIDDEN), (2, HIDDEN), (2, HIDDEN))
    mappings = [
        plain("embedding.word_embeddings.weight", EMBEDDING, (VOCAB, HIDDEN)),
        WeightMapping(
            "decoder.layers.0.self_attention.linear_qkv.weight",
            (HIDDEN + 4, HIDDEN),
            QKV,
            qkv_shapes,
            lambda parameter: np.split(parameter, [HIDDEN, HIDDEN + 2]),
        ),
        WeightMapping(
            "decoder.layers.0.mlp.linear_fc1.weight",
            (2 * FFN, HIDDEN),
            GATE_UP,
            ((FFN, HIDDEN), (FFN, HIDDEN)),
            lambda parameter: [parameter[0::2], parameter[1::2]],
        ),
        plain("decoder.final_layernorm.weight", NORM, (HIDDEN,)),
    ]
    if tied:
        copies = ((HEAD, EMBEDDING), ("output_layer.weight", "embedding.word_embeddings.weight"))
        return WeightLayout(tuple(mappings), copies=copies)
    mappings.append(plain("output_layer.weight", HEAD, (VOCAB, HIDDEN)))
    return WeightLayout(tuple(mappings), ((r"model\.layers\.\d+\.rotary_emb\.inv_freq", "computed"),))


def hf_weights() -> dict[str, np.ndarray]:
    """Random HuggingFace tensors of the untied model; the values survive bfloat16 and float16 unchanged."""
    generator = np.random.default_rng(0)
    shapes = {
        name: shape
        for mapping in make_layout().mappings
        for name, shape in zip(mapping.sources, mapping.source_shapes, strict=True)
    }
    return {name: generator.integers(-128, 128, shape).astype(np.float32) / 64 for name, shape in shapes.items()}


def parameters(hf: Mapping[str, np.ndarray], layout: WeightLayout) -> dict[str, np.ndarray]:
    """What a model must hold after loading ``hf``, joined here and not by the layout's views."""
    joined = {}
    for mapping in layout.mappings:
        tensors = [hf[source] for source in mapping.sources]
        if mapping.sources == GATE_UP:
            joined[mapping.name] = np.stack(tensors, axis=1).reshape(mapping.shape)
        else:
            joined[mapping.name] = np.concatenate(tensors)
    return joined


def to_bytes(array: np.ndarray, dtype: str) -> bytes:
    """Values in a stored type; bfloat16 by cutting, which is exact for `hf_weights`."""
    if dtype == "BF16":
        return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return array.astype("u1" if dtype in CODES else NUMPY_TYPES[dtype]).tobytes()


def file_bytes(tensors: Mapping[str, np.ndarray], dtype: str | Mapping[str, str] = "F32") -> bytes:
    """A safetensors file, built here byte by byte and not by the code under test."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        stored = dtype if isinstance(dtype, str) else dtype.get(name, "F32")
        raw = to_bytes(array, stored)
        offsets = [len(data), len(data) + len(raw)]
        shape = [*array.shape[:-1], 2 * array.shape[-1]] if stored == "F4" else list(array.shape)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_single(folder: Path, tensors: Mapping[str, np.ndarray], dtype: str | Mapping[str, str] = "F32") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    path.write_bytes(file_bytes(tensors, dtype))
    return path


def shard_name(number: int, total: int = 3) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def split(tensors: Mapping[str, np.ndarray], total: int = 3) -> dict[str, dict[str, np.ndarray]]:
    """Deals tensors out to shards in turn, so that the parts of a fused parameter lie in different files."""
    shards: dict[str, dict[str, np.ndarray]] = {shard_name(number, total): {} for number in range(1, total + 1)}
    for position, (name, array) in enumerate(tensors.items()):
        shards[shard_name(position % total + 1, total)][name] = array
    return shards


def write_sharded(folder: Path, tensors: Mapping[str, np.ndarray], index: bool = True, dtype: str = "F32") -> Path:
    """Writes three shards; returns the path of the index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = split(tensors)
    for name, shard in shards.items():
        (folder / name).write_bytes(file_bytes(shard, dtype))
    path = folder / "model.safetensors.index.json"
    if index:
        write_index(path, {tensor: name for name, shard in shards.items() for tensor in shard})
    return path


def write_index(path: Path, weight_map: Mapping[str, object]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def edit_index(path: Path, changes: Mapping[str, object]) -> None:
    """Changes entries of an index; None removes one."""
    weight_map = json.loads(path.read_text())["weight_map"]
    weight_map.update(changes)
    write_index(path, {name: file for name, file in weight_map.items() if file is not None})


def rank_file(kind: str = "model", rank: int = 0, total: int = 1, prefix: str = "checkpoint-") -> str:
    return f"{prefix}{kind}-{rank:07d}-{total:07d}.safetensors"


class Model:
    """Collects what is assigned."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def assign(self, name: str, array: np.ndarray) -> None:
        assert name not in self.arrays, f"{name} was assigned twice"
        self.arrays[name] = array


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, err_msg=name)

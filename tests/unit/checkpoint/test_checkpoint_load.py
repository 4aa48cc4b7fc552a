"""Weights arrive bit by bit, in memory of their own, from every kind of folder that is sound."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mindformers_ext.checkpoint import (
    CheckpointError,
    check_weights,
    load,
    load_weights,
    locate_checkpoint,
    model_files_folder,
    open_weights,
    read_model_json,
)
from mindformers_ext.checkpoint.convert import widen_bfloat16
from mindformers_ext.models.weights import WeightLayout, WeightMapping
from mindformers_ext.parallel.plan import Region
from tests.unit.checkpoint import toy

LAYOUT = toy.make_layout()
HF = toy.hf_weights()
EXPECTED = toy.parameters(HF, LAYOUT)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("form", ["single", "index", "shards"])
def test_huggingface_weights_load_exactly(tmp_path: Path, form: str, dtype: str) -> None:
    if form == "single":
        toy.write_single(tmp_path, HF, dtype)
    else:
        toy.write_sharded(tmp_path, HF, index=form == "index", dtype=dtype)
    model = toy.Model()
    report = load_weights(tmp_path, LAYOUT, model.assign)
    toy.assert_same(model.arrays, EXPECTED)
    assert report.format == "huggingface"
    assert report.dtypes == {dtype: len(HF)}
    assert report.num_values == sum(array.size for array in EXPECTED.values())
    assert report.read_values == report.num_values
    checked = asdict(check_weights(tmp_path, LAYOUT))
    assert {name: value for name, value in asdict(report).items() if name in checked} == checked


def test_bits_of_bfloat16_are_handed_over_where_they_are_taken_whole_and_in_parts(tmp_path: Path) -> None:
    toy.write_single(tmp_path, HF, "BF16")
    qkv, head = "decoder.layers.0.self_attention.linear_qkv.weight", "output_layer.weight"
    regions: dict[str, Region | None] = {
        qkv: Region(EXPECTED[qkv].shape, (((1, 3), (6, 7)), ((0, toy.HIDDEN),))),
        head: None,
        "embedding.word_embeddings.weight": None,
    }
    with open_weights(tmp_path, LAYOUT) as reader:
        for name, region in regions.items():
            bits, values = reader.read(name, region, as_bits=True), reader.read(name, region)
            assert bits.dtype == np.uint16 and values.dtype == np.float32
            np.testing.assert_array_equal(widen_bfloat16(bits), values)
    model = toy.Model()
    load_weights(tmp_path, LAYOUT, model.assign, takes_bits=lambda name: name == head)
    assert {name for name, array in model.arrays.items() if array.dtype == np.uint16} == {head}
    np.testing.assert_array_equal(widen_bfloat16(model.arrays[head]), EXPECTED[head])


def test_weights_that_are_not_all_bfloat16_never_come_as_bits(tmp_path: Path) -> None:
    toy.write_single(tmp_path, HF, "F32")
    model = toy.Model()
    load_weights(tmp_path, LAYOUT, model.assign, takes_bits=lambda name: True)
    toy.assert_same(model.arrays, EXPECTED)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("prefix", ["checkpoint-", "my-opt-7b-", ""])
def test_mindformers_weights_load_exactly_from_root_and_iteration(tmp_path: Path, prefix: str, dtype: str) -> None:
    for step in (4, 12):
        folder = tmp_path / f"iteration_{step:08d}"
        folder.mkdir()
        values = EXPECTED if step == 12 else {name: array + 1 for name, array in EXPECTED.items()}
        (folder / toy.rank_file(prefix=prefix)).write_bytes(toy.file_bytes(values, dtype))
        (folder / toy.rank_file("opt", prefix=prefix)).write_bytes(b"the optimizer's file is not opened here")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    for path, step in (
        (tmp_path, 12),
        (tmp_path / "iteration_00000012", 12),
        (str(tmp_path / "iteration_00000004"), 4),
    ):
        model = toy.Model()
        report = load_weights(path, LAYOUT, model.assign)
        assert (report.format, report.step) == ("mindformers", step)
        offset = 0 if step == 12 else 1
        for name, array in EXPECTED.items():
            np.testing.assert_allclose(model.arrays[name], array + offset, atol=0.02 if dtype == "BF16" else 0)


def test_a_plain_folder_of_rank_files_loads(tmp_path: Path) -> None:
    (tmp_path / toy.rank_file(prefix="")).write_bytes(toy.file_bytes(EXPECTED))
    model = toy.Model()
    assert load_weights(tmp_path, LAYOUT, model.assign).step is None
    toy.assert_same(model.arrays, EXPECTED)


def test_ranks_that_hold_whole_parameters_load(tmp_path: Path) -> None:
    names = list(EXPECTED)
    replicated = {names[0]: EXPECTED[names[0]]}
    for rank, part in enumerate((names[:2], names[2:])):
        tensors = {**replicated, **{name: EXPECTED[name] for name in part}}
        (tmp_path / toy.rank_file(rank=rank, total=2)).write_bytes(toy.file_bytes(tensors))
    model = toy.Model()
    load_weights(tmp_path, LAYOUT, model.assign)
    toy.assert_same(model.arrays, EXPECTED)


def test_a_mixture_of_types_joins_in_float32(tmp_path: Path) -> None:
    toy.write_single(tmp_path, HF, {toy.QKV[0]: "BF16", toy.QKV[1]: "F16", toy.NORM: "BF16"})
    model = toy.Model()
    assert load_weights(tmp_path, LAYOUT, model.assign).dtypes == {"F32": len(HF) - 3, "BF16": 2, "F16": 1}
    toy.assert_same(model.arrays, EXPECTED)


@pytest.mark.parametrize("with_head", [True, False])
def test_a_tied_head_may_be_stored_or_not(tmp_path: Path, with_head: bool) -> None:
    layout = toy.make_layout(tied=True)
    tensors = {name: HF[name] for name in HF if name != toy.HEAD}
    toy.write_single(tmp_path, tensors | ({toy.HEAD: HF[toy.EMBEDDING]} if with_head else {}))
    model = toy.Model()
    report = load_weights(tmp_path, layout, model.assign)
    toy.assert_same(model.arrays, toy.parameters(HF, layout))
    reason = f"a copy of {toy.EMBEDDING}"
    assert report.skipped == (((toy.HEAD, "model.safetensors", reason),) if with_head else ())
    assert (reason in report.summary()) == with_head


@pytest.mark.parametrize("types", [("F32", "BF16"), ("BF16", "F32"), ("BF16", "BF16"), ("F16", "BF16")])
def test_the_copy_of_a_tied_head_is_compared_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types) -> None:
    monkeypatch.setattr(load, "_PIECE", 5)
    layout = toy.make_layout(tied=True)
    stored = dict(zip((toy.HEAD, toy.EMBEDDING), types, strict=True))
    head = HF[toy.EMBEDDING].copy()
    toy.write_single(tmp_path, HF | {toy.HEAD: head}, stored)
    load_weights(tmp_path, layout, toy.Model().assign)
    head[-1, -1] += 1
    path = toy.write_single(tmp_path, HF | {toy.HEAD: head}, stored)
    model = toy.Model()
    with pytest.raises(CheckpointError, match=r"differs.*model\.tie_word_embeddings: false") as caught:
        load_weights(tmp_path, layout, model.assign)
    assert f"{toy.HEAD} in {path.name}" in str(caught.value)
    assert f"{toy.EMBEDDING} in {path.name}" in str(caught.value)
    assert not model.arrays


def test_a_copy_of_another_shape_is_refused_from_the_headers(tmp_path: Path) -> None:
    toy.write_single(tmp_path, HF | {toy.HEAD: HF[toy.HEAD][1:]})
    with pytest.raises(CheckpointError, match=r"wrong shapes \(1\): lm_head\.weight"):
        check_weights(tmp_path, toy.make_layout(tied=True))


def test_the_head_of_a_tied_mindformers_checkpoint_is_compared_on_every_rank(tmp_path: Path) -> None:
    layout = toy.make_layout(tied=True)
    values = toy.parameters(HF, layout)
    head = values["embedding.word_embeddings.weight"].copy()
    for offset in (0, 1):
        for rank, tensors in enumerate((values, {"output_layer.weight": head + offset})):
            (tmp_path / toy.rank_file(rank=rank, total=2)).write_bytes(toy.file_bytes(tensors))
        if offset:
            with pytest.raises(CheckpointError, match=r"output_layer\.weight in .* differs from embedding\.word"):
                load_weights(tmp_path, layout, toy.Model().assign)
        else:
            load_weights(tmp_path, layout, toy.Model().assign)


def test_comparing_a_copy_takes_no_memory(tmp_path: Path) -> None:
    shape = (2048, 1024)
    mapping = toy.plain("e", "e", shape)
    for dtype in ("F32", "BF16"):
        toy.write_single(tmp_path, {"e": np.ones(shape), "head": np.ones(shape)}, dtype)
        tracemalloc.start()
        try:
            with open_weights(tmp_path, WeightLayout((mapping,), copies=(("head", "e"),))):
                peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 << 20  # the tensors have 8 MiB as float32


def test_every_bfloat16_widens_to_the_same_value() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = widen_bfloat16(bits.reshape(256, 256)).reshape(-1)
    np.testing.assert_array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)
    assert widen_bfloat16(np.array(0x3F80, np.uint16)) == 1.0


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_assigned_arrays_can_become_parameter_memory(tmp_path: Path, dtype: str) -> None:
    path = toy.write_single(tmp_path, HF, dtype)
    before = path.read_bytes()
    model = toy.Model()
    load_weights(tmp_path, LAYOUT, model.assign)
    for array in model.arrays.values():
        assert array.dtype == np.float32 and array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
        array += 1
    assert path.read_bytes() == before, "writing to a parameter must not reach the file"
    for name, array in EXPECTED.items():
        np.testing.assert_array_equal(model.arrays[name], array + 1, err_msg=f"{name} shares memory with another")


def test_loaded_arrays_outlive_the_file(tmp_path: Path) -> None:
    path = toy.write_single(tmp_path, HF)
    model = toy.Model()
    load_weights(tmp_path, LAYOUT, model.assign)
    path.write_bytes(b"")
    toy.assert_same(model.arrays, EXPECTED)


def test_a_tensor_at_an_odd_position_loads(tmp_path: Path) -> None:
    tensors = {"model.layers.0.rotary_emb.inv_freq": np.zeros(3), **HF}
    toy.write_single(tmp_path, tensors, {"model.layers.0.rotary_emb.inv_freq": "I8"})
    model = toy.Model()
    load_weights(tmp_path, LAYOUT, model.assign)
    toy.assert_same(model.arrays, EXPECTED)


def test_empty_and_scalar_tensors_load(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"empty": (0, 3), "scalar": ()}
    layout = WeightLayout(tuple(toy.plain(name, name, shape) for name, shape in shapes.items()))
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    for dtype in ("F32", "BF16"):
        toy.write_single(tmp_path, tensors, dtype)
        model = toy.Model()
        load_weights(tmp_path, layout, model.assign)
        toy.assert_same(model.arrays, tensors)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("num_sources", [1, 2])
def test_loading_needs_no_memory_beside_the_model(tmp_path: Path, dtype: str, num_sources: int) -> None:
    count, rows, columns = 6, 512, 256
    mappings = []
    tensors = {}
    for number in range(count):
        sources = tuple(f"p{number}.{part}" for part in range(num_sources))
        shape = (rows // num_sources, columns)
        tensors.update({source: np.ones(shape, np.float32) for source in sources})
        parts = partial(np.split, indices_or_sections=num_sources)
        mappings.append(WeightMapping(f"p{number}", (rows, columns), sources, (shape,) * num_sources, parts))
    toy.write_single(tmp_path, tensors, dtype)
    del tensors
    one = rows * columns * 4
    model = toy.Model()
    tracemalloc.start()
    try:
        load_weights(tmp_path, WeightLayout(tuple(mappings)), model.assign)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count * one <= peak < count * one + one // 3


# Loads tensors of 32, 16 and 16 MiB and prints the rise of the resident memory over the memory of the parameters.
RESIDENT = """
import re, sys
import numpy as np
from mindformers_ext.checkpoint import load_weights
from mindformers_ext.models.weights import WeightLayout, WeightMapping
def resident(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
shapes = {"big": (8192, 2048), "small.0": (4096, 2048), "small.1": (4096, 2048)}
names = sorted(shapes, reverse=sys.argv[2] == "last")
if sys.argv[2] == "transposed":
    mappings = [WeightMapping(n, shapes[n][::-1], (n,), (shapes[n],), lambda p: [p.T]) for n in names]
else:
    mappings = [WeightMapping(n, shapes[n], (n,), (shapes[n],), lambda p: [p]) for n in names]
kept, before = {}, resident("VmRSS")
load_weights(sys.argv[1], WeightLayout(tuple(mappings)), kept.__setitem__)
print((resident("VmHWM") - before) / sum(array.nbytes for array in kept.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("order", ["first", "last", "transposed"])
def test_the_pages_of_the_file_do_not_stay_in_memory(tmp_path: Path, order: str) -> None:
    shapes = {"big": (8192, 2048), "small.0": (4096, 2048), "small.1": (4096, 2048)}
    toy.write_single(tmp_path, {name: np.ones(shape, np.float32) for name, shape in shapes.items()}, "BF16")
    command = [sys.executable, "-c", RESIDENT, str(tmp_path), order]
    found = subprocess.run(command, check=True, cwd=Path(__file__).parents[3], timeout=120, capture_output=True)
    assert 0.95 < float(found.stdout) < 1.15  # 1.5 if the whole file stayed mapped


def test_checking_reads_headers_only(tmp_path: Path) -> None:
    layout = WeightLayout((toy.plain("p", "p", (1024, 1024)),))
    toy.write_single(tmp_path, {"p": np.zeros((1024, 1024), np.float32)})
    tracemalloc.start()
    try:
        report = check_weights(tmp_path, layout)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.stored_bytes == 4 * report.num_values == 4 << 20
    assert peak < 1 << 20


def test_links_of_the_huggingface_cache_load(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123abc"
    toy.write_sharded(snapshot, HF)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    model = toy.Model()
    load_weights(snapshot, LAYOUT, model.assign)
    toy.assert_same(model.arrays, EXPECTED)


def test_shards_in_a_subfolder_and_links_that_stay_inside_load(tmp_path: Path) -> None:
    index = toy.write_sharded(tmp_path, HF)
    (tmp_path / "parts").mkdir()
    (tmp_path / toy.shard_name(1)).rename(tmp_path / "parts" / "one.safetensors")
    (tmp_path / toy.shard_name(2)).rename(tmp_path / "parts" / "two.safetensors")
    (tmp_path / toy.shard_name(2)).symlink_to("parts/two.safetensors")
    toy.edit_index(index, {name: "parts/one.safetensors" for name in toy.split(HF)[toy.shard_name(1)]})
    model = toy.Model()
    load_weights(tmp_path, LAYOUT, model.assign)
    toy.assert_same(model.arrays, EXPECTED)


def test_a_relative_path_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write_single(tmp_path / "weights", HF)
    monkeypatch.chdir(tmp_path)
    assert check_weights("weights", LAYOUT).num_parameters == len(EXPECTED)


def test_config_and_tokenizer_are_found_beside_an_iteration(tmp_path: Path) -> None:
    iteration = tmp_path / "iteration_00000002"
    iteration.mkdir()
    assert model_files_folder(tmp_path) == tmp_path
    assert model_files_folder(iteration) == tmp_path
    (iteration / "config.json").write_text("{}")
    assert model_files_folder(iteration) == iteration


def test_an_index_may_list_the_single_file(tmp_path: Path) -> None:
    toy.write_single(tmp_path, HF)
    toy.write_index(tmp_path / "model.safetensors.index.json", {name: "model.safetensors" for name in HF})
    assert locate_checkpoint(tmp_path).index is not None
    assert check_weights(tmp_path, LAYOUT).files == (tmp_path / "model.safetensors",)


def test_a_json_file_beside_the_weights_is_a_dict_or_none_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "generation_config.json").write_text("[1]")
    assert read_model_json(tmp_path, "config.json") == {"a": 1}
    assert read_model_json(str(tmp_path), "other.json") is None
    assert read_model_json(tmp_path / "nowhere", "config.json") is None
    assert read_model_json(None, "config.json") is None
    with pytest.raises(CheckpointError, match="generation_config.json must hold a JSON object"):
        read_model_json(tmp_path, "generation_config.json")


def test_importing_the_package_does_not_import_mindspore() -> None:
    code = "import sys, mindformers_ext.checkpoint.export; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""A process reads its part of every parameter, and little else."""

import itertools
import json
import math
import pathlib

import numpy as np
import pytest

from mindformers_ext.checkpoint import convert, load_weights, quantized, save_checkpoint, tensor_file
from mindformers_ext.checkpoint.load import open_weights
from mindformers_ext.checkpoint.tensor_file import StoredTensor
from mindformers_ext.models import transformer_config, weight_layout
from mindformers_ext.models.sharding import EXPERT_PLAN, tensor_parallel_sizes, tensor_plan
from mindformers_ext.models.transforms import copied, expert_down, expert_gate_up, fused_qkv
from mindformers_ext.models.weights import WeightLayout, WeightMapping
from mindformers_ext.parallel.plan import Block, Region, Shard, plan_regions
from tests.unit.checkpoint import toy
from tests.unit.checkpoint.codes import random_codes

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())
ROWS = [("*", Shard(0))]


def described(family):
    config = transformer_config({}, json.loads((CHECKPOINTS / family / "config.json").read_text()))
    layout = weight_layout(config)
    return config, layout, {mapping.name: mapping.shape for mapping in layout.mappings}


def splits(config):
    """Plans with their degree and index, in the order in which the processes of a job apply them."""
    tensor = tensor_plan(config)
    sizes = tensor_parallel_sizes(config)[1:]
    assert 2 in sizes
    for size in sizes:
        yield from ([(tensor, size, index)] for index in range(size))
    yield from ([(ROWS, 3, index)] for index in range(3))
    yield from ([(tensor, 2, 1), (ROWS, 3, index)] for index in range(3))
    if config.moe is not None:
        yield from ([(EXPERT_PLAN, 2, index)] for index in range(2))
        # Experts are whole where they are dealt out; where they are not, tensor parallelism splits them.
        others = [(name, rule) for name, rule in tensor if ".experts.weight" not in name]
        yield from ([(others, 2, index % 2), (EXPERT_PLAN, 2, index // 2)] for index in range(4))
        yield from ([(tensor, 2, index % 2), (EXPERT_PLAN, 2, index // 2)] for index in range(4))


def assert_parts_of_the_whole(reader, shapes, plans):
    whole = {name: reader.read(name) for name in shapes}
    for axes in plans:
        for name, region in plan_regions(shapes, axes).items():
            part = reader.read(name, region)
            assert part.flags.c_contiguous and part.flags.owndata and part.flags.writeable
            assert part.shape == region.shape and part.dtype == whole[name].dtype
            assert part.tobytes() == region.take(whole[name]).tobytes(), f"{name} {[axis[1:] for axis in axes]}"


@pytest.mark.parametrize("form", ["huggingface", "mindformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_those_of_the_whole_bit_by_bit(family, form, tmp_path):
    config, layout, shapes = described(family)
    folder = CHECKPOINTS / family
    if form == "mindformers":
        whole = {}
        load_weights(folder, layout, whole.__setitem__)
        save_checkpoint(tmp_path, 1, whole, None, {})
        folder = tmp_path
    with open_weights(folder, layout) as reader:
        assert_parts_of_the_whole(reader, shapes, splits(config))


EXPERTS = WeightLayout(
    (
        expert_gate_up("up", ("e.{e}.gate.weight", "e.{e}.up.weight"), "gate_up.weight", 4, 10, 6),
        expert_down("down", "e.{e}.down.weight", "down.weight", 4, 10, 6),
    )
)
EXPERT_SHAPES = {mapping.name: mapping.shape for mapping in EXPERTS.mappings}
EXPERT_SPLITS = [
    [([("up", Shard(2, blocks=(Block(6), Block(6)))), ("down", Shard(1))], 2, index), (ROWS, 2, 1)]
    for index in range(2)
]


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
def test_experts_in_one_tensor_come_in_parts(tmp_path, stored):
    generator = np.random.default_rng(3)
    shapes = {form.names[0]: form.shapes[0] for mapping in EXPERTS.mappings for form in mapping.alternatives}
    tensors = {name: generator.integers(-99, 99, shape).astype(np.float32) for name, shape in shapes.items()}
    toy.write_single(tmp_path, tensors, stored)
    with open_weights(tmp_path, EXPERTS) as reader:
        assert_parts_of_the_whole(reader, EXPERT_SHAPES, EXPERT_SPLITS)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F4"])
@pytest.mark.parametrize("piece", [quantized._PIECE, 30])
def test_quantized_tensors_come_in_parts(tmp_path, monkeypatch, kind, piece):
    monkeypatch.setattr(quantized, "_PIECE", piece)
    layout = WeightLayout((*EXPERTS.mappings, copied("plain", "p.weight", 12, 10)))
    tensors, types = {}, {}
    for mapping in layout.mappings:
        for name, (rows, columns) in zip(mapping.sources, mapping.source_shapes, strict=True):
            packed = kind == "F4"
            scales = (rows, -(-columns // 32)) if packed else (-(-rows // 4), -(-columns // 4))
            tensors[name] = random_codes(rows, columns // 2 if packed else columns)
            tensors[f"{name}_scale_inv"] = np.random.default_rng(rows).integers(1, 128, scales).astype(np.float32)
            types |= {name: kind, f"{name}_scale_inv": "F32"}
    toy.write_single(tmp_path, tensors, types)
    with open_weights(tmp_path, layout) as reader:
        assert_parts_of_the_whole(reader, EXPERT_SHAPES, EXPERT_SPLITS)
        columns = [[([("plain", Shard(1))], 2, index)] for index in range(2)]
        assert_parts_of_the_whole(reader, {"plain": (12, 10)}, [*columns, [(ROWS, 3, 1)]])


def test_a_view_whose_axis_runs_over_two_dimensions_is_read_whole_and_cut(tmp_path):
    mapping = WeightMapping("p", (3, 4, 5), ("p.weight",), ((12, 5),), lambda parameter: [parameter.reshape(12, 5)])
    toy.write_single(tmp_path, {"p.weight": np.arange(60, dtype=np.float32).reshape(12, 5)})
    with open_weights(tmp_path, WeightLayout((mapping,))) as reader:
        assert_parts_of_the_whole(reader, {"p": (3, 4, 5)}, [[([("p", Shard(dim))], 2, 1)] for dim in range(3)])


def test_ranges_that_cut_through_heads_are_covered_exactly(tmp_path):
    mapping = fused_qkv("p", ("q.weight", "k.weight", "v.weight"), 3, 2, 4, (5,), gated=True)
    generator = np.random.default_rng(4)
    shapes = zip(mapping.sources, mapping.source_shapes, strict=True)
    toy.write_single(tmp_path, {name: generator.random(shape).astype(np.float32) for name, shape in shapes})
    rows = mapping.shape[0]
    with open_weights(tmp_path, WeightLayout((mapping,))) as reader:
        whole = reader.read("p")
        for first, stop in itertools.combinations(range(0, rows + 1, 3), 2):
            pieces = ((first, stop),) if stop - first < 20 else ((first, first + 7), (stop - 5, stop))
            region = Region(mapping.shape, (pieces, ((1, 2), (3, 5))))
            np.testing.assert_array_equal(reader.read("p", region), region.take(whole))


@pytest.mark.parametrize("limit", [1, 4, 11, 24, 1000])
@pytest.mark.parametrize("run", [1, 6, 1000])
def test_a_box_is_cut_into_stretches_of_limited_size(monkeypatch, limit, run):
    monkeypatch.setattr(convert, "_RUN", run)
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    ranges = [[slice(*cut) for cut in itertools.combinations(range(size + 1), 2)] for size in array.shape]
    for box in itertools.product(*ranges):
        target = np.full([cut.stop - cut.start for cut in box], -1)
        for index, first, count in convert.stretches(array.shape, box, limit):
            assert count <= limit
            part = target[index]
            part[...] = convert.part_of(array.reshape(-1)[first : first + count], part.shape, array.shape, box)
        np.testing.assert_array_equal(target, array[box])


def test_a_region_of_another_shape_is_refused():
    _, layout, _ = described("llama")
    region = Region.whole((320, 65)).narrowed(0, [(0, 10)])
    with open_weights(CHECKPOINTS / "llama", layout) as reader, pytest.raises(ValueError, match=r"one of \(320, 65\)"):
        reader.read("embedding.word_embeddings.weight", region)


def test_parameters_without_a_region_are_left_out():
    _, layout, shapes = described("llama")
    regions = plan_regions({name: shape for name, shape in shapes.items() if "layers.1." in name}, [])
    found = {}
    load_weights(CHECKPOINTS / "llama", layout, found.__setitem__, regions)
    assert found.keys() == regions.keys()


def counted(monkeypatch, folder, layout, regions):
    """Values that are taken out of the files."""
    found = []
    scatter = tensor_file.scatter

    def counting(source, target, write):
        found.append(source.size)
        scatter(source, target, write)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "scatter", counting)
        load_weights(folder, layout, lambda name, array: None, regions)
    return sum(found)


@pytest.mark.parametrize("form", ["huggingface", "mindformers"])
def test_a_process_of_two_reads_half_of_what_is_split(monkeypatch, form, tmp_path):
    config, layout, shapes = described("llama")
    folder = CHECKPOINTS / "llama"
    if form == "mindformers":
        weights = {}
        load_weights(folder, layout, weights.__setitem__)
        save_checkpoint(tmp_path, 1, weights, None, {})
        folder = tmp_path
    everything = sum(math.prod(shape) for shape in shapes.values())
    assert counted(monkeypatch, folder, layout, None) == everything
    for index in range(2):
        regions = plan_regions(shapes, [(tensor_plan(config), 2, index)])
        read = counted(monkeypatch, folder, layout, regions)
        assert read == sum(region.size for region in regions.values())
        assert read < 0.51 * everything


def test_rows_that_a_process_does_not_need_are_not_mapped(monkeypatch):
    mapped = []
    window = StoredTensor.window

    def counting(self, first, count, ahead=True):
        mapped.append(count)
        return window(self, first, count, ahead)

    monkeypatch.setattr(StoredTensor, "window", counting)
    config, layout, shapes = described("llama")
    split = {name: shape for name, shape in shapes.items() if any(part in name for part in ("embed", "qkv", "fc1"))}
    regions = plan_regions(split, [(tensor_plan(config), 2, 1)])
    load_weights(CHECKPOINTS / "llama", layout, lambda name, array: None, regions)
    assert sum(mapped) == sum(region.size for region in regions.values()) == sum(map(math.prod, split.values())) / 2

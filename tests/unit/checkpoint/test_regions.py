"""A process reads its part of every parameter, and little else."""

import json
import pathlib

import numpy as np
import pytest

from mindformers_ext.checkpoint import load_weights, save_checkpoint
from mindformers_ext.checkpoint.load import open_weights
from mindformers_ext.checkpoint.tensor_file import StoredTensor
from mindformers_ext.models import transformer_config, weight_layout
from mindformers_ext.models.sharding import EXPERT_PLAN, tensor_parallel_sizes, tensor_plan
from mindformers_ext.parallel.plan import Shard, plan_regions

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())
ROWS = [("*", Shard(0))]


def described(family):
    config = transformer_config({}, json.loads((CHECKPOINTS / family / "config.json").read_text()))
    layout = weight_layout(config)
    return config, layout, {mapping.name: mapping.shape for mapping in layout.mappings}


def splits(config):
    """Plans with their degree and index."""
    tensor = tensor_plan(config)
    for size in tensor_parallel_sizes(config)[1:]:
        yield from ([(tensor, size, index)] for index in range(size))
    yield from ([(tensor, 2, 1), (ROWS, 3, index)] for index in range(3))
    yield from ([(EXPERT_PLAN, 4, index)] for index in range(4))


@pytest.mark.parametrize("form", ["huggingface", "mindformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_those_of_the_whole(family, form, tmp_path):
    config, layout, shapes = described(family)
    folder = CHECKPOINTS / family
    whole = {}
    load_weights(folder, layout, whole.__setitem__)
    if form == "mindformers":
        save_checkpoint(tmp_path, 1, whole, None, {})
        folder = tmp_path
    with open_weights(folder, layout) as reader:
        for axes in splits(config):
            for name, region in plan_regions(shapes, axes).items():
                part = reader.read(name, region)
                assert part.flags.c_contiguous and part.flags.owndata
                np.testing.assert_array_equal(part, region.take(whole[name]), err_msg=f"{name} {axes[0][1:]}")


def test_parameters_without_a_region_are_left_out():
    _, layout, shapes = described("llama")
    regions = plan_regions({name: shape for name, shape in shapes.items() if "layers.1." in name}, [])
    found = {}
    load_weights(CHECKPOINTS / "llama", layout, found.__setitem__, regions)
    assert found.keys() == regions.keys()


def test_a_process_reads_its_share_of_the_rows(monkeypatch):
    read = []
    window = StoredTensor.window
    monkeypatch.setattr(
        StoredTensor, "window", lambda self, first, count: (read.append(count), window(self, first, count))[1]
    )
    config, layout, shapes = described("llama")
    split = {name: shape for name, shape in shapes.items() if any(part in name for part in ("embed", "qkv", "fc1"))}
    regions = plan_regions(split, [(tensor_plan(config), 2, 1)])
    load_weights(CHECKPOINTS / "llama", layout, lambda name, array: None, regions)
    assert sum(read) == sum(region.size for region in regions.values()) == sum(map(np.prod, split.values())) / 2

"""What tensor parallelism leaves of a parameter is what the blocks on that process are made of."""

import json
import pathlib
from dataclasses import replace

import pytest

from mindformers_ext.models import transformer_config, weight_layout
from mindformers_ext.models.sharding import (
    EXPERT_PLAN,
    check_expert_parallel,
    check_tensor_parallel,
    local_config,
    tensor_parallel_sizes,
    tensor_plan,
)
from mindformers_ext.parallel.plan import plan_regions

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def config_of(family, **changes):
    return transformer_config(changes, json.loads((CHECKPOINTS / family / "config.json").read_text()))


def shapes(config):
    return {mapping.name: mapping.shape for mapping in weight_layout(config).mappings}


@pytest.mark.parametrize("family", FAMILIES)
def test_regions_have_the_shapes_of_the_local_blocks(family):
    config = config_of(family)
    sizes = tensor_parallel_sizes(config)
    assert 2 in sizes
    for size in sizes:
        for index in range(size):
            regions = plan_regions(shapes(config), [(tensor_plan(config), size, index)])
            local = shapes(local_config(config, size, index))
            assert regions.keys() == local.keys()
            for name in local.keys() - set(VOCABULARY):
                assert regions[name].shape == local[name], (name, size, index)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_process_shrink_with_the_degree(family):
    config = config_of(family)
    whole = sum(region.size for region in plan_regions(shapes(config), []).values())
    parts = [plan_regions(shapes(config), [(tensor_plan(config), 2, index)]) for index in range(2)]
    for part in parts:
        assert sum(region.size for region in part.values()) < 0.7 * whole


def test_experts_are_split_by_number_and_keep_their_width():
    config = config_of("qwen3_moe")
    regions = plan_regions(shapes(config), [(EXPERT_PLAN, 4, 1)])
    assert regions["decoder.layers.0.mlp.experts.weight1"].ranges[0] == ((2, 4),)
    assert regions["decoder.layers.0.mlp.experts.weight1"].shape == (2, 64, 96)


def test_degrees_that_do_not_fit_are_refused_with_those_that_do():
    config = config_of("qwen3")
    with pytest.raises(
        ValueError, match="tensor_parallel 3 does not divide the 4 heads of this qwen3; possible are 1, 2, 4$"
    ):
        check_tensor_parallel(config, 3)
    with pytest.raises(ValueError, match="expert_parallel 2: a qwen3 has no experts; set it to 1"):
        check_expert_parallel(config, 2)
    with pytest.raises(ValueError, match="expert_parallel 3 does not divide the 8 experts; possible are 1, 2, 4, 8$"):
        check_expert_parallel(config_of("qwen3_moe"), 3)
    for size in (5, 8):
        with pytest.raises(ValueError, match="the 12 heads of this qwen3; possible are 1, 2, 3, 4, 6, 12$"):
            check_tensor_parallel(replace(config, num_attention_heads=12, num_query_groups=12), size)
    check_tensor_parallel(config, 4)
    check_expert_parallel(config_of("qwen3_moe"), 8)

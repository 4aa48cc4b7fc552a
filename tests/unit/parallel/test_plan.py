"""Regions cover every parameter once, whatever splits it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_ext.parallel.plan import Block, FirstOnly, Region, Shard, plan_regions, split_region

PARTS = st.integers(1, 9)


@st.composite
def shards(draw):
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    blocks = tuple(
        Block(draw(st.integers(1, 4)) * unit, unit) for unit in draw(st.lists(st.integers(1, 3), max_size=3))
    )
    length = groups * sum(block.size for block in blocks) if blocks else groups * draw(st.integers(1, 12))
    return Shard(0, blocks=blocks, groups=groups), length


@given(shards(), PARTS)
def test_the_parts_of_all_processes_are_the_whole(shard, parts):
    rule, length = shard
    if rule.groups > 1 and rule.groups % parts and parts % rule.groups:
        return
    held = [
        np.concatenate([np.arange(begin, end) for begin, end in rule.ranges(length, parts, index)])
        for index in range(parts)
    ]
    assert sorted(np.concatenate(held).tolist()) == list(range(length))


def test_groups_are_split_first_and_then_shared_with_a_copy_of_their_key_and_value():
    fused = Shard(0, blocks=(Block(4, 2), Block(2, 0)), groups=2)
    assert fused.ranges(12, 2, 1) == ((6, 12),)
    assert fused.ranges(12, 4, 0) == ((0, 2), (4, 6))
    assert fused.ranges(12, 4, 3) == ((8, 10), (10, 12))


def test_more_processes_than_keys_have_copies_of_them():
    block = Block(6, unit=3, copied=True)
    assert [block.range(4, index) for index in range(4)] == [(0, 3), (0, 3), (3, 6), (3, 6)]


def test_a_bias_of_a_sum_is_held_once():
    region = Region.whole((3,))
    assert split_region(region, FirstOnly(), 2, 0) == region
    assert split_region(region, FirstOnly(), 2, 1) is None


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_boxes_and_take_agree_with_indexing(shape, data):
    region = Region.whole(tuple(shape))
    array = np.arange(np.prod(shape)).reshape(shape)
    for _ in range(2):
        dim = data.draw(st.integers(0, len(shape) - 1))
        length = region.shape[dim]
        cuts = sorted(data.draw(st.lists(st.integers(0, length), min_size=4, max_size=4)))
        region = region.narrowed(dim, ((cuts[0], cuts[1]), (cuts[2], cuts[3])))
        expected = np.take(array, [*range(cuts[0], cuts[1]), *range(cuts[2], cuts[3])], axis=dim) if _ == 0 else None
        if expected is not None:
            first = expected
            np.testing.assert_array_equal(region.take(array), first)
    part = np.full(region.shape, -1)
    for whole, here in region.boxes():
        part[here] = array[whole]
    np.testing.assert_array_equal(part, region.take(array))
    assert region.size == part.size


def test_axes_are_applied_one_after_the_other():
    regions = plan_regions({"a.weight": (4, 6), "b": (2,)}, [([("a.*", Shard(1))], 2, 1), ([("*", Shard(0))], 2, 0)])
    assert regions["a.weight"].ranges == (((0, 2),), ((3, 6),))
    assert regions["b"].ranges == (((0, 1),),)
    assert not regions["b"].is_whole


@pytest.mark.parametrize("index", range(3))
def test_a_dimension_that_does_not_divide_is_split_unevenly(index):
    assert Shard(0, unit=2).ranges(10, 3, index) == (((0, 2), (2, 6), (6, 10))[index],)

"""Degrees of parallelism: what is derived, what is refused, and that every process has one place."""

import itertools
from types import SimpleNamespace

import pytest

from mindformers_ext.parallel import AXES, Coordinates, ParallelDims


def dims(world_size, shard=-1, tp=1, cp=1, pp=1, ep=1, method="colossal", ulysses=None):
    degrees = SimpleNamespace(
        data_parallel_shard=shard,
        tensor_parallel=tp,
        context_parallel=cp,
        context_parallel_method=method,
        ulysses_degree_in_cp=ulysses,
        pipeline_parallel=pp,
        expert_parallel=ep,
    )
    return ParallelDims.from_config(degrees, world_size)


@pytest.mark.parametrize(
    ("world_size", "options", "replicate", "shard"),
    [
        (1, {}, 1, 1),
        (8, {}, 1, 8),
        (8, {"shard": 8}, 1, 8),
        (8, {"shard": 4}, 2, 4),
        (8, {"shard": 1}, 8, 1),
        (16, {"tp": 2, "pp": 2}, 1, 4),
        (16, {"tp": 2, "cp": 2, "shard": 2}, 2, 2),
        (6, {"pp": 2, "shard": 3}, 1, 3),
    ],
)
def test_data_parallel_degrees_are_what_the_others_leave(world_size, options, replicate, shard, log):
    result = dims(world_size, **options)
    assert (result.dp_replicate, result.dp_shard, result.world_size) == (replicate, shard, world_size)
    assert (result.tp, result.cp, result.pp) == tuple(options.get(name, 1) for name in ("tp", "cp", "pp"))
    assert not log.records


def test_every_layout_that_is_accepted_has_as_many_places_as_processes():
    accepted = 0
    for world_size, shard, tp, cp, pp, ep in itertools.product(
        (1, 2, 6, 8), (-1, 1, 2, 3, 4), (1, 2), (1, 3), (1, 2), (1, 2)
    ):
        try:
            result = dims(world_size, shard, tp, cp, pp, ep)
        except ValueError:
            continue
        accepted += 1
        assert result.dp_replicate * result.dp_shard * result.cp * result.tp * result.pp == world_size
        assert (result.dp_shard * result.cp * result.tp) % result.ep == 0
        assert shard < 0 or result.dp_shard == min(shard, world_size // (tp * cp * pp))
    assert accepted > 50


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (4, {"tp": 3}, r"tensor_parallel \(3\) x .* = 3 must divide the number of processes, which is 4"),
        (2, {"tp": 2, "pp": 2}, "= 4 must divide the number of processes, which is 2"),
        (4, {"shard": 3}, r"data_parallel_shard \(3\) must divide the data-parallel size, 4"),
        (7, {"shard": 2}, r"data_parallel_shard \(2\) must divide the data-parallel size, 7"),
        (12, {"tp": 2, "shard": 4}, r"data_parallel_shard \(4\) must divide the data-parallel size, 6"),
        (4, {"ep": 3}, r"expert_parallel \(3\) must divide .* 4"),
        (4, {"shard": 2, "ep": 4}, r"expert_parallel \(4\) must divide .* 2"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(world_size, options, message):
    with pytest.raises(ValueError, match=message):
        dims(world_size, **options)


def test_a_shard_degree_for_a_larger_job_is_lowered_and_the_log_says_so(log):
    assert dims(4, shard=8) == dims(4)
    assert [record.getMessage() for record in log.records] == [
        "parallelism: data_parallel_shard (8) exceeds the data-parallel size and is lowered to it, 4"
    ]


LAYOUTS = [
    ParallelDims(1, 1, 1, 1, 1, 1, 1),
    ParallelDims(2, 2, 1, 2, 1, 4, 8),
    ParallelDims(1, 2, 2, 2, 2, 4, 16),
    ParallelDims(2, 1, 3, 2, 2, 3, 24),
    ParallelDims(1, 8, 1, 1, 1, 8, 8),
    ParallelDims(1, 1, 1, 8, 1, 1, 8),
    ParallelDims(1, 2, 6, 2, 1, 1, 24, 2),
    ParallelDims(2, 1, 4, 1, 1, 1, 8, 4),
]


def brute_force(layout):
    """Every rank's place, from nested loops in the rank order of MindSpore Transformers."""
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    return [Coordinates(*place) for place in itertools.product(*map(range, sizes))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_coordinates_follow_the_rank_order_and_back(layout):
    for rank, place in enumerate(brute_force(layout)):
        assert layout.coordinates(rank) == place
        assert layout.rank_at(place) == rank
        by_formula = (place.pp * layout.dp_replicate + place.dp_replicate) * layout.dp_shard + place.dp_shard
        assert by_formula * layout.cp * layout.tp + place.cp * layout.tp + place.tp == rank
    with pytest.raises(ValueError, match=f"rank {layout.world_size} is not one of"):
        layout.coordinates(layout.world_size)


KEPT = {
    "pp": ("dp_replicate", "dp_shard", "cp", "tp"),
    "dp_replicate": ("pp", "dp_shard", "cp", "tp"),
    "dp_shard": ("pp", "dp_replicate", "cp", "tp"),
    "dp": ("pp", "cp", "tp"),
    "cp": ("pp", "dp_replicate", "dp_shard", "tp"),
    "tp": ("pp", "dp_replicate", "dp_shard", "cp"),
    "fsdp": ("pp", "dp_replicate", "tp"),
    "unit": ("dp_replicate", "dp_shard"),
    "replica": ("dp_replicate",),
    "world": (),
}

PARTS_OF_CP = {"ulysses": lambda cp, degree: cp // degree, "colossal": lambda cp, degree: cp % degree}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_of_an_axis_are_those_of_brute_force(layout, axis):
    places = brute_force(layout)
    block = layout.dp_shard * layout.cp * layout.tp
    for rank, place in enumerate(places):
        if axis == "ep":
            expected = [o for o in range(layout.world_size) if o // layout.ep == rank // layout.ep]
        elif axis == "efsdp":
            expected = [
                o for o in range(layout.world_size) if o // block == rank // block and o % layout.ep == rank % layout.ep
            ]
        else:
            kept = KEPT["cp" if axis in PARTS_OF_CP else axis]
            part = PARTS_OF_CP.get(axis, lambda cp, degree: 0)
            expected = [
                o
                for o, other in enumerate(places)
                if all(getattr(other, n) == getattr(place, n) for n in kept)
                and part(other.cp, layout.ulysses) == part(place.cp, layout.ulysses)
            ]
        assert layout.ranks_of(axis, rank) == tuple(expected)
        assert layout.degree(axis) == len(expected)


def test_an_unknown_axis_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown parallel axis 'etp': one of pp, dp_replicate, .*, world"):
        LAYOUTS[0].ranks_of("etp", 0)


@pytest.mark.parametrize(
    ("world_size", "options", "possible"),
    [
        (6, {"tp": 4}, "possible products: 1, 2, 3, 6"),
        (12, {"tp": 2, "shard": 4}, "possible: 1, 2, 3, 6, or -1"),
        (8, {"tp": 2, "shard": 2, "ep": 3}, "possible: 1, 2, 4$"),
    ],
)
def test_a_refusal_lists_the_degrees_that_would_fit(world_size, options, possible):
    with pytest.raises(ValueError, match=possible):
        dims(world_size, **options)


@pytest.mark.parametrize(
    ("method", "degree", "ulysses"), [("colossal", 2, 1), ("ulysses", None, 4), ("hybrid", 2, 2), ("hybrid", 4, 4)]
)
def test_the_method_says_how_many_processes_exchange_heads(method, degree, ulysses):
    layout = dims(8, cp=4, method=method, ulysses=degree)
    assert (layout.ulysses, layout.degree("colossal")) == (ulysses, 4 // ulysses)


@pytest.mark.parametrize("degree", [None, 3, 8])
def test_a_hybrid_method_needs_a_degree_that_divides_context_parallelism(degree):
    with pytest.raises(ValueError, match=rf"ulysses_degree_in_cp \({degree}\) must divide .*, 4; possible: 1, 2, 4$"):
        dims(8, cp=4, method="hybrid", ulysses=degree)

"""Every layout of up to 8 ranks fits a family, or is refused with the sentence that says what would fit."""

import re

import pytest

from mindformers_ext.config.schema import ParallelismSection
from mindformers_ext.models import transformer_config
from mindformers_ext.models.shard import shard_of
from mindformers_ext.parallel import ParallelDims, groups
from mindformers_ext.parallel.schedule import split_layers
from scripts.check_layouts import CASE, FAMILIES, cases, layouts, parallelism

SPLIT = (
    r"layers cannot be split into {pp} stages of one size; (name them, for example \[\"0\"|use pipeline_parallel: \d)"
)
# Which degrees a family refuses, with its reason.
REFUSED = {
    "qwen3": {"pp": {8: SPLIT}, "ep": "expert_parallel {ep}: a qwen3 has no experts; set it to 1"},
    "qwen3_moe": {"pp": {8: SPLIT}},
    "qwen3_5": {"pp": {8: SPLIT}, "ep": "expert_parallel {ep}: a qwen3_5_text has no experts; set it to 1"},
    "deepseek_v3": {
        "pp": {8: SPLIT},
        "ulysses": "heads of this deepseek_v3 share latents and cannot be exchanged; use colossal",
    },
    "deepseek_v4": {
        "pp": {4: SPLIT, 8: SPLIT},
        "cp": "context_parallel {cp}: the compressed blocks of deepseek_v4 cannot be shared .* set it to 1",
    },
}


@pytest.fixture(autouse=True)
def _no_communicators(monkeypatch):
    monkeypatch.setattr(groups, "_communicator", lambda ranks: "")


def build(family, layout, ranks, **changes):
    """Makes the part of every rank as a job does."""
    config = transformer_config({}, cases(family)[CASE]["config"] | changes)
    section = ParallelismSection(**parallelism(layout, config.num_layers))
    dims = ParallelDims.from_config(section, ranks)
    for rank in range(ranks):
        context = groups._context(dims, rank)
        stages = split_layers(config.num_layers, dims.pp, section.pipeline_parallel_layers_per_stage)
        shard_of(config, context, stages[context.coordinates.pp])


def reasons(family, layout):
    degrees = {name: int(size) for name, size in re.findall("(pp|tp|cp|ep|fsdp)([0-9]+)", layout)}
    kinds = dict(degrees)
    if layout.endswith(("ulysses", "hybrid")):
        kinds["ulysses"] = degrees["cp"]
    if layout.endswith("uneven"):
        del kinds["pp"]
    for kind, size in kinds.items():
        reason = REFUSED[family].get(kind)
        if isinstance(reason, dict):
            reason = reason.get(size)
        if reason is not None:
            yield reason.format(**degrees)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_fit_or_are_refused_for_the_reason_of_the_family(family, ranks):
    fitting = 0
    for layout in layouts(ranks):
        expected = list(reasons(family, layout))
        if expected:
            with pytest.raises(ValueError, match="|".join(expected)):
                build(family, layout, ranks)
        else:
            build(family, layout, ranks)
            fitting += 1
    assert fitting >= {2: 5, 4: 10, 8: 16}[ranks]


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        ("deepseek_v4", "pp4", r'6 layers .* 4 stages of one size; name them, for example \["0", "1-2", "3", "4-5"\]'),
        ("qwen3", "pp8", "4 layers .* use pipeline_parallel: 4 or less"),
    ],
)
def test_layers_that_do_not_divide_are_refused_with_a_split_that_would_do(family, layout, message):
    with pytest.raises(ValueError, match=message):
        build(family, layout, 8)


def test_four_experts_cannot_be_shared_by_eight_ranks():
    with pytest.raises(ValueError, match="expert_parallel 8 does not divide the 4 experts; possible are 1, 2, 4$"):
        build("qwen3_moe", "fsdp8ep8", 8, num_experts=4, num_local_experts=4)


def test_heads_that_cannot_be_exchanged_are_refused_with_the_degrees_that_can():
    with pytest.raises(
        ValueError, match="4 processes cannot exchange the 6 heads, with 2 .* ulysses_degree_in_cp out of 1, 2, or col"
    ):
        build("qwen3", "cp4ulysses", 4, num_attention_heads=6)

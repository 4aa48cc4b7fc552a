import math

import pytest

from mindformers_ext.trainer.lr_scheduler import build_schedule


def test_constant_warms_up_linearly_and_stays():
    rate = build_schedule({"type": "ConstantWarmUpLR", "learning_rate": 0.005, "warmup_steps": 10}, 20)
    assert [rate(step) for step in (0, 1, 5, 10, 15, 1000)] == [0.0, 0.0005, 0.0025, 0.005, 0.005, 0.005]


def test_cosine_follows_the_closed_form_and_ends_at_lr_end():
    options = {
        "type": "CosineWithWarmUpLR",
        "learning_rate": 1.0,
        "warmup_steps": 4,
        "warmup_lr_init": 0.2,
        "lr_end": 0.1,
    }
    rate = build_schedule(options | {"total_steps": 24}, 99)
    assert rate(0) == 0.2
    assert rate(2) == pytest.approx(0.6)
    assert rate(4) == 1.0
    assert rate(9) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rate(14) == pytest.approx(0.55)
    assert rate(24) == rate(500) == pytest.approx(0.1)


def test_linear_falls_in_a_straight_line():
    rate = build_schedule({"type": "LinearWithWarmUpLR", "learning_rate": 0.005, "warmup_steps": 10}, 20)
    assert [rate(step) for step in (1, 15, 20, 30)] == pytest.approx([0.0005, 0.0025, 0.0, 0.0])


@pytest.mark.parametrize("total", [None, -1])
def test_total_steps_defaults_to_the_training_steps(total):
    options = {"type": "CosineWithWarmUpLR", "learning_rate": 1.0, "total_steps": total, "warmup_ratio": 0.1}
    rate = build_schedule(options, 100)
    assert rate(9) == pytest.approx(0.9)
    assert rate(10) == 1.0
    assert rate(100) == 0.0


def test_no_division_by_zero_when_warmup_fills_the_run():
    rate = build_schedule({"type": "CosineWithWarmUpLR", "learning_rate": 1.0, "warmup_steps": 10}, 10)
    assert rate(9) == 0.9
    assert rate(10) == 1.0
    assert rate(11) == 0.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "lr_scheduler.type"),
        ({"type": "CosineLR"}, "CosineLR"),
        ({"type": "ConstantWarmUpLR", "warm_up": 1}, "lr_scheduler.warm_up"),
        ({"type": "ConstantWarmUpLR", "learning_rate": -1.0}, "lr_scheduler.learning_rate"),
        ({"type": "ConstantWarmUpLR", "learning_rate": math.nan}, "lr_scheduler.learning_rate"),
        ({"type": "ConstantWarmUpLR", "warmup_steps": -1}, "lr_scheduler.warmup_steps"),
        ({"type": "ConstantWarmUpLR", "warmup_ratio": 1.5}, "lr_scheduler.warmup_ratio"),
        ({"type": "ConstantWarmUpLR", "warmup_steps": 1, "warmup_ratio": 0.5}, "exclude each other"),
        ({"type": "LinearWithWarmUpLR", "total_steps": 0}, "lr_scheduler.total_steps"),
    ],
)
def test_refusals_name_the_key(options, named):
    with pytest.raises(ValueError, match=named):
        build_schedule(options, 10)

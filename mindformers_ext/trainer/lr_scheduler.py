"""Learning rate schedules: plain functions from the number of finished steps to a float.

A schedule keeps no state, so a resumed run sees the rates that the uninterrupted one would have seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mindformers_ext.config import LR_SCHEDULERS

Schedule = Callable[[int], float]


def constant_with_warmup(learning_rate: float, warmup_steps: int = 0, warmup_lr_init: float = 0.0) -> Schedule:
    """Linear warm-up from ``warmup_lr_init``, then ``learning_rate`` for ever."""
    return _with_warmup(learning_rate, warmup_steps, warmup_lr_init, lambda step: learning_rate)


def linear_with_warmup(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, warmup_lr_init: float = 0.0, lr_end: float = 0.0
) -> Schedule:
    """Linear warm-up, then a straight line down to ``lr_end`` at ``total_steps``, where it stays."""

    def decay(step: int) -> float:
        return lr_end + (learning_rate - lr_end) * (1.0 - _progress(step, warmup_steps, total_steps))

    return _with_warmup(learning_rate, warmup_steps, warmup_lr_init, decay)


def cosine_with_warmup(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, warmup_lr_init: float = 0.0, lr_end: float = 0.0
) -> Schedule:
    """Linear warm-up, then half a cosine down to ``lr_end`` at ``total_steps``, where it stays.

    ``lr_end + (learning_rate - lr_end) * (1 + cos(pi * progress)) / 2`` (Loshchilov and Hutter, arXiv:1608.03983).
    """

    def decay(step: int) -> float:
        progress = _progress(step, warmup_steps, total_steps)
        return lr_end + (learning_rate - lr_end) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return _with_warmup(learning_rate, warmup_steps, warmup_lr_init, decay)


_COMMON_OPTIONS = {"learning_rate", "warmup_steps", "warmup_ratio", "warmup_lr_init", "total_steps", "lr_end"}


def build_schedule(options: Mapping[str, Any], training_steps: int) -> Schedule:
    """Builds the schedule that the ``lr_scheduler`` section describes.

    Args:
        options: ``type`` and the keys of the section. ``total_steps`` that is absent, None or -1 means
            ``training_steps``; ``warmup_ratio`` is a share of ``total_steps``. ``lr_end`` is accepted and has no
            meaning for ConstantWarmUpLR.
        training_steps: ``training.steps``.

    Raises:
        ValueError: unknown type or key, or a value out of range; the key is named.
    """
    options = {key: value for key, value in options.items() if value is not None}
    kind = options.pop("type", None)
    if kind not in LR_SCHEDULERS:
        raise ValueError(f"lr_scheduler.type {kind!r} is not supported; use one of {', '.join(LR_SCHEDULERS)}")
    unknown = sorted(set(options) - _COMMON_OPTIONS)
    if unknown:
        raise ValueError(
            f"lr_scheduler.{unknown[0]} is not supported; {kind} knows {', '.join(sorted(_COMMON_OPTIONS))}"
        )

    total_steps = options.get("total_steps", -1)
    total_steps = training_steps if total_steps == -1 else total_steps
    if total_steps < 1:
        raise ValueError(f"lr_scheduler.total_steps {total_steps} must be at least 1, or -1 for training.steps")
    learning_rate = float(options.get("learning_rate", 1e-5))
    warmup_steps = _warmup_steps(options, total_steps)
    warmup_lr_init, lr_end = float(options.get("warmup_lr_init", 0.0)), float(options.get("lr_end", 0.0))
    for key, value in (("learning_rate", learning_rate), ("warmup_lr_init", warmup_lr_init), ("lr_end", lr_end)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"lr_scheduler.{key} {value} must be a finite number of at least 0")

    if kind == "ConstantWarmUpLR":
        return constant_with_warmup(learning_rate, warmup_steps, warmup_lr_init)
    decaying = linear_with_warmup if kind == "LinearWithWarmUpLR" else cosine_with_warmup
    return decaying(learning_rate, total_steps, warmup_steps, warmup_lr_init, lr_end)


def _warmup_steps(options: Mapping[str, Any], total_steps: int) -> int:
    steps, ratio = options.get("warmup_steps", 0), options.get("warmup_ratio")
    if steps < 0:
        raise ValueError(f"lr_scheduler.warmup_steps {steps} must be at least 0")
    if ratio is None:
        return int(steps)
    if not 0 <= ratio <= 1:
        raise ValueError(f"lr_scheduler.warmup_ratio {ratio} must be between 0 and 1")
    if steps and ratio:
        raise ValueError("lr_scheduler.warmup_steps and lr_scheduler.warmup_ratio exclude each other; give one")
    return int(steps or total_steps * ratio)


def _with_warmup(learning_rate: float, warmup_steps: int, warmup_lr_init: float, after: Schedule) -> Schedule:
    def schedule(step: int) -> float:
        if step < warmup_steps:
            return warmup_lr_init + (learning_rate - warmup_lr_init) * (step / warmup_steps)
        return after(step)

    return schedule


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """Share of the decay that lies behind ``step``, 0 to 1."""
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))

"""What each stage of a pipeline does, step by step. Knows no devices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "forward"]

# Durations in the plan of the transfers; a backward is about two forwards.
_FORWARD_TIME, _BACKWARD_TIME = 1, 2


class MetaStepType(Enum):
    """Kinds of steps: compute forward or backward, and the transfers between neighbours."""

    FWD = "FWD"
    BWD = "BWD"
    FWD_RECV = "FWD_RECV"
    FWD_SEND = "FWD_SEND"
    BWD_RECV = "BWD_RECV"
    BWD_SEND = "BWD_SEND"


@dataclass(frozen=True)
class MetaStep:
    """One step of stage ``stage_index`` for micro-batch ``micro_index``."""

    micro_index: int
    meta_type: MetaStepType
    stage_index: int


def build_steps(schedule: Schedule, stage_num: int, micro_batch_num: int) -> list[list[MetaStep]]:
    """Returns the steps of every stage.

    ``gpipe`` runs all forwards, then all backwards (Huang et al. 2019, GPipe). ``1f1b`` runs ``stage_num - stage``
    forwards, then alternates, so that no stage holds more micro-batches than that (Narayanan et al. 2019, PipeDream).
    ``forward`` has no backwards.

    A transfer may block both of its ends until they meet. So all transfers are placed by one clock: the steps of each
    stage are a part of one order of the whole pipeline, in which a transfer is one event. The earliest event that is
    not done yet can always be done, and the pipeline never deadlocks.

    Raises:
        ValueError: unknown schedule, no stage or no micro-batch.
    """
    if stage_num < 1 or micro_batch_num < 1:
        raise ValueError(f"a pipeline of {stage_num} stages and {micro_batch_num} micro-batches: both must be positive")
    orders = [_compute_order(schedule, stage, stage_num, micro_batch_num) for stage in range(stage_num)]
    events: list[tuple[tuple[int, ...], tuple[MetaStep, ...]]] = []
    finished: dict[MetaStep, int] = {}
    clocks = [0] * stage_num
    done = [0] * stage_num
    while any(done[stage] < len(orders[stage]) for stage in range(stage_num)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                step = order[done[stage]]
                source = _source(step, stage_num)
                if source is not None and source not in finished:
                    break
                start = max(clocks[stage], 0 if source is None else finished[source])
                events.append(((start, 1, 0, 0), (step,)))
                forward = step.meta_type is MetaStepType.FWD
                clocks[stage] = finished[step] = start + (_FORWARD_TIME if forward else _BACKWARD_TIME)
                done[stage] += 1
                if transfer := _transfer(step, stage_num):
                    # Before what starts at that time; and a stage passes on before it takes more.
                    events.append(((clocks[stage], 0, int(forward), -stage if forward else stage), transfer))
    events.sort(key=lambda event: event[0])
    steps: list[list[MetaStep]] = [[] for _ in range(stage_num)]
    for _, together in events:
        for step in together:
            steps[step.stage_index].append(step)
    return steps


def _compute_order(schedule: str, stage: int, stage_num: int, micro_batch_num: int) -> list[MetaStep]:
    forwards = [MetaStep(micro, MetaStepType.FWD, stage) for micro in range(micro_batch_num)]
    if schedule == "forward":
        return forwards
    backwards = [MetaStep(micro, MetaStepType.BWD, stage) for micro in range(micro_batch_num)]
    if schedule == "gpipe":
        return forwards + backwards
    if schedule != "1f1b":
        raise ValueError(f"unknown pipeline schedule {schedule!r}: one of gpipe, 1f1b, forward")
    ahead = min(stage_num - stage, micro_batch_num)
    order = forwards[:ahead]
    for micro, backward in enumerate(backwards):
        order.append(backward)
        order.extend(forwards[ahead + micro : ahead + micro + 1])
    return order


def _source(step: MetaStep, stage_num: int) -> MetaStep | None:
    """Returns the step of the neighbour whose result ``step`` needs."""
    if step.meta_type is MetaStepType.FWD:
        return MetaStep(step.micro_index, step.meta_type, step.stage_index - 1) if step.stage_index else None
    last = step.stage_index == stage_num - 1
    return None if last else MetaStep(step.micro_index, step.meta_type, step.stage_index + 1)


def _transfer(step: MetaStep, stage_num: int) -> tuple[MetaStep, ...]:
    """Returns send and receive of what ``step`` made, none at the end of the line."""
    forward = step.meta_type is MetaStepType.FWD
    target = step.stage_index + (1 if forward else -1)
    if not 0 <= target < stage_num:
        return ()
    send, receive = (
        (MetaStepType.FWD_SEND, MetaStepType.FWD_RECV) if forward else (MetaStepType.BWD_SEND, MetaStepType.BWD_RECV)
    )
    return (
        MetaStep(step.micro_index, send, step.stage_index),
        MetaStep(step.micro_index, receive, target),
    )


def split_rows(rows: int, parts: int) -> list[slice]:
    """Splits rows into at most ``parts`` contiguous, non-empty parts whose sizes differ by one at most."""
    parts = max(min(rows, parts), 1)
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]


def split_layers(num_layers: int, stage_num: int, layers_per_stage: object = "auto") -> list[range]:
    """Returns the layers of each stage.

    Args:
        num_layers: layers of the model.
        stage_num: stages of the pipeline.
        layers_per_stage: ``parallelism.pipeline_parallel_layers_per_stage``: ``auto`` or None for equal blocks, or one
            text a stage, ``"first-last"`` (both included) or ``"layer"``.

    Raises:
        ValueError: the layers do not divide, or the list does not give every layer to one stage, in order.
    """
    key = "parallelism.pipeline_parallel_layers_per_stage"
    if layers_per_stage is None or layers_per_stage == "auto":
        if num_layers % stage_num:
            bounds = [num_layers * stage // stage_num for stage in range(stage_num + 1)]
            example = [_layers_text(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
            advice = f"name them, for example {example}".replace("'", '"')
            if num_layers < stage_num:
                advice = f"use pipeline_parallel: {num_layers} or less"
            raise ValueError(
                f"{key}: {num_layers} layers cannot be split into {stage_num} stages of one size; {advice}"
            )
        size = num_layers // stage_num
        return [range(stage * size, (stage + 1) * size) for stage in range(stage_num)]
    if not isinstance(layers_per_stage, list) or not all(isinstance(text, str) for text in layers_per_stage):
        raise ValueError(f'{key}: {layers_per_stage!r} must be "auto" or a list of texts like ["0-9", "10-15"]')
    if len(layers_per_stage) != stage_num:
        raise ValueError(f"{key}: {len(layers_per_stage)} entries for {stage_num} stages: give one a stage")
    stages = [_parse_layers(key, text) for text in layers_per_stage]
    expected = 0
    for text, layers in zip(layers_per_stage, stages, strict=True):
        if layers.start != expected:
            problem = "is in two stages" if layers.start < expected else "is in no stage, or stages are out of order"
            layer = layers.start if layers.start < expected else expected
            raise ValueError(f"{key}: layer {layer} {problem}: {text!r} should start at {expected}")
        expected = layers.stop
    if expected != num_layers:
        raise ValueError(f"{key}: the stages end at layer {expected - 1}, the model at layer {num_layers - 1}")
    return stages


def _parse_layers(key: str, text: str) -> range:
    if "," in text:
        raise ValueError(f"{key}: {text!r} gives a stage several chunks, which is not supported: give it one")
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    if match is None:
        raise ValueError(f'{key}: {text!r} must be like "10-15" or "3"')
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ValueError(f"{key}: {text!r} ends before it starts")
    return range(first, last + 1)


def _layers_text(layers: range) -> str:
    return str(layers.start) if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"

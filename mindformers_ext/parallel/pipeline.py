"""A model cut into stages of layers, and the runtime that moves micro-batches through them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.parallel.schedule import (
    MetaStep,
    MetaStepType,
    Schedule,
    build_steps,
    split_layers,
    split_rows,
)

__all__ = [
    "MetaStep",
    "MetaStepType",
    "PerMicroBatch",
    "PipelineScheduleRuntime",
    "ScaledLossPipelineStage",
    "SendSpec",
    "StageModelBuilder",
    "build_steps",
    "split_layers",
    "split_rows",
]

ActivationShape = Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[int]]

# With dyn_shape: number of dimensions, then the dimensions.
_SHAPE_WORDS = 8


class PerMicroBatch(tuple[Any, ...]):
    """An argument of `PipelineScheduleRuntime.run` with one value a micro-batch: caches, contexts."""


@dataclass(frozen=True)
class SendSpec:
    """A tensor that a stage owes a neighbour."""

    stage_index: int
    tensor: Tensor


class ScaledLossPipelineStage:
    """The layers of one stage, and what it keeps of each micro-batch between its steps.

    The first stage calls ``submodule(*args, **kwargs)``, the others ``submodule(activation, **kwargs)``. The last
    stage's output is the result; with a backward it is the loss, a scalar.

    MindSpore 2.10 keeps one recorded forward at a time. So a backward runs the forward again, and between the two a
    micro-batch holds its input alone (activation recomputation, Chen et al. 2016). The last stage runs its forward
    only once, as a part of its backward.

    Attributes:
        gradients: sums over the micro-batches of the run, one a trainable parameter of the submodule, scaled so that
            they are the gradients of the loss of the whole batch.
    """

    def __init__(
        self,
        submodule: Callable[..., Tensor],
        stage_index: int,
        stage_num: int,
        previous: Group | None = None,
        following: Group | None = None,
        *,
        has_backward: bool = False,
        activation_shape: ActivationShape | None = None,
        dyn_shape: bool = False,
    ) -> None:
        """Wraps the layers of a stage.

        Args:
            submodule: a Cell, or with ``has_backward=False`` any callable.
            stage_index: number of the stage.
            stage_num: stages of the pipeline.
            previous: group with the stage before, ``ParallelContext.previous_stage``.
            following: group with the stage after, ``ParallelContext.next_stage``.
            has_backward: whether gradients are wanted.
            activation_shape: gives the shape of what this stage receives from the arguments of a micro-batch.
            dyn_shape: the shape of an activation travels before it, as integers, and ``activation_shape`` is not used.

        Raises:
            ValueError: a neighbour is missing, or the shape of an activation cannot be known.
        """
        if not 0 <= stage_index < stage_num:
            raise ValueError(f"stage {stage_index} is not one of the {stage_num} stages, 0 to {stage_num - 1}")
        if (previous is None) != (stage_index == 0) or (following is None) != (stage_index == stage_num - 1):
            raise ValueError(f"stage {stage_index} of {stage_num} needs a group with each of its neighbours, no other")
        if previous is not None and activation_shape is None and not dyn_shape:
            raise ValueError(f"stage {stage_index} needs activation_shape, or dyn_shape=True on all stages")
        self.submodule = submodule
        self.stage_index = stage_index
        self.stage_num = stage_num
        self.previous = previous
        self.following = following
        self.has_backward = has_backward
        self.activation_shape = activation_shape
        self.dyn_shape = dyn_shape
        self.gradients: list[Tensor] = []
        self._arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._scales: Sequence[float] = ()
        self._activations: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._output_shapes: dict[int, tuple[int, ...]] = {}
        self._seeds: dict[int, Tensor] = {}
        self._returned: dict[int, Tensor] = {}
        self._current = 0
        if has_backward:
            self.parameters = list(submodule.trainable_params())  # type: ignore[attr-defined]
            self._gradient = self._gradient_function()

    @property
    def is_first(self) -> bool:
        """Whether this stage takes the arguments of the run."""
        return self.previous is None

    @property
    def is_last(self) -> bool:
        """Whether this stage gives the result."""
        return self.following is None

    def begin(self, arguments: list[tuple[tuple[Any, ...], dict[str, Any]]], scales: Sequence[float]) -> None:
        """Starts a run: arguments of each micro-batch, and the factor of its loss in the loss of the batch."""
        self.clear()
        self._arguments, self._scales = arguments, scales
        self.gradients = []

    def clear(self) -> None:
        """Lets go of everything but the gradients."""
        self._arguments = []
        for kept in (self._activations, self._outputs, self._output_shapes, self._seeds, self._returned):
            kept.clear()

    def receive_forward(self, micro_index: int) -> None:
        """Receives the input of a micro-batch from the stage before."""
        assert self.previous is not None
        if self.dyn_shape:
            words = self.previous.receive((_SHAPE_WORDS,), np.int32, 0)
            shape = tuple(int(length) for length in words[1 : 1 + words[0]])
        else:
            assert self.activation_shape is not None
            shape = tuple(self.activation_shape(*self._arguments[micro_index]))
        self._activations[micro_index] = self.previous.receive(shape, ms.float32, 0)

    def forward(self, micro_index: int) -> None:
        """Runs the layers on a micro-batch."""
        if self.is_last and self.has_backward:
            return
        output = self._call(micro_index, *([] if self.is_first else [self._activations[micro_index]]))
        self._outputs[micro_index] = output
        self._output_shapes[micro_index] = tuple(output.shape) if not self.is_last else ()
        if not self.has_backward:
            self._activations.pop(micro_index, None)

    def send_forward(self, micro_index: int) -> None:
        """Sends the output of a micro-batch to the stage after."""
        assert self.following is not None
        output = self._outputs.pop(micro_index)
        if self.dyn_shape:
            words = np.zeros(_SHAPE_WORDS, np.int32)
            words[: 1 + output.ndim] = (output.ndim, *output.shape)
            self.following.send(words, 1)
        self.following.send(output, 1)

    def receive_backward(self, micro_index: int) -> None:
        """Receives the gradient of a micro-batch's output from the stage after."""
        if self.has_backward:
            assert self.following is not None
            self._seeds[micro_index] = self.following.receive(self._output_shapes.pop(micro_index), ms.float32, 1)

    def backward(self, micro_index: int) -> None:
        """Adds the gradients of a micro-batch to `gradients`. Does nothing without ``has_backward``."""
        if not self.has_backward:
            return
        self._current = micro_index
        inputs = [] if self.is_first else [self._activations.pop(micro_index)]
        if self.is_last:
            (_, self._outputs[micro_index]), gradients = self._gradient(*inputs)
        else:
            gradients = self._gradient(*inputs, self._seeds.pop(micro_index))
        if not self.is_first:
            by_input, gradients = gradients
            self._returned[micro_index] = by_input[0] if isinstance(by_input, tuple) else by_input
        if self.gradients:
            gradients = [total + gradient for total, gradient in zip(self.gradients, gradients, strict=True)]
        self.gradients = list(gradients)

    def bwd_send_specs(self, micro_index: int) -> list[SendSpec]:
        """Returns what a backward owes the stage before: nothing in the first stage, or without ``has_backward``."""
        if self.is_first or not self.has_backward:
            return []
        return [SendSpec(self.stage_index - 1, self._returned.pop(micro_index))]

    def send_backward(self, micro_index: int) -> None:
        """Sends what `bwd_send_specs` gives."""
        for spec in self.bwd_send_specs(micro_index):
            assert self.previous is not None
            self.previous.send(spec.tensor, 0)

    def take_outputs(self) -> list[Tensor]:
        """Returns the results of the run in the order of the micro-batches and forgets them."""
        outputs = [self._outputs[micro] for micro in sorted(self._outputs)] if self.is_last else []
        self._outputs.clear()
        return outputs

    def _call(self, micro_index: int, *activation: Tensor) -> Tensor:
        args, kwargs = self._arguments[micro_index]
        return self.submodule(*(args if self.is_first else activation), **kwargs)

    def _gradient_function(self) -> Callable[..., Any]:
        def stage(*activation: Tensor) -> Tensor:
            return self._call(self._current, *activation)

        def scaled_loss(*activation: Tensor) -> tuple[Tensor, Tensor]:
            loss = stage(*activation)
            return loss * self._scales[self._current], loss

        if self.is_last:
            position = None if self.is_first else 0
            return ms.value_and_grad(scaled_loss, position, self.parameters, has_aux=True)
        gradient = ops.GradOperation(get_all=not self.is_first, get_by_list=True, sens_param=True)
        return gradient(stage, self.parameters)


class PipelineScheduleRuntime:
    """Moves the micro-batches of a batch through the stages.

    Attributes:
        steps: what this stage did in the last run.
        seconds_waiting: time in transfers. On a CPU a send waits for its receiver, so sends count too.
        seconds_total: time in `run`, and in `waiting` between runs.
    """

    def __init__(
        self,
        stages: ScaledLossPipelineStage | Sequence[ScaledLossPipelineStage],
        micro_batch_num: int = 1,
        schedule: Schedule = "forward",
    ) -> None:
        """Prepares the runtime of this rank.

        Args:
            stages: the stage of this rank; interleaved stages are not supported.
            micro_batch_num: parts that a batch is split into, fewer where it has fewer rows.
            schedule: ``gpipe``, ``1f1b`` or ``forward``.

        Raises:
            ValueError: several stages, an unknown schedule, or one that does not fit the stage's ``has_backward``.
        """
        given = [stages] if isinstance(stages, ScaledLossPipelineStage) else list(stages)
        if len(given) != 1:
            raise ValueError(f"a rank runs one stage, not {len(given)}: interleaved pipelines are not supported")
        self.stage = given[0]
        if (schedule != "forward") != self.stage.has_backward:
            wanted = "a backward" if schedule != "forward" else "no backward"
            raise ValueError(f"schedule {schedule!r} needs a stage with {wanted}: see has_backward")
        build_steps(schedule, self.stage.stage_num, micro_batch_num)
        self.micro_batch_num = micro_batch_num
        self.schedule = schedule
        self.steps: list[MetaStep] = []
        self.seconds_waiting = 0.0
        self.seconds_total = 0.0
        self._running = False
        stage = self.stage
        self._handlers: dict[MetaStepType, Callable[[int], None]] = {
            MetaStepType.FWD_RECV: stage.receive_forward,
            MetaStepType.FWD: stage.forward,
            MetaStepType.FWD_SEND: stage.send_forward,
            MetaStepType.BWD_RECV: stage.receive_backward,
            MetaStepType.BWD: stage.backward,
            MetaStepType.BWD_SEND: stage.send_backward,
        }

    @property
    def idle_share(self) -> float:
        """Share of the time so far in which this stage waited for others, 0 to 1."""
        return self.seconds_waiting / self.seconds_total if self.seconds_total else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as waiting, for what a loop waits for between runs, such as the chosen tokens."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds_waiting += seconds
            if not self._running:
                self.seconds_total += seconds

    def run(self, *args: Any, loss_scales: Sequence[float] | None = None, **kwargs: Any) -> list[Tensor]:
        """Runs a batch; every rank of the pipeline gives the same arguments.

        Tensors and arrays are split along dimension 0 into micro-batches whose rows differ by one at most. A
        `PerMicroBatch` gives each its own value and fixes their number. Anything else goes to each as it is.

        Args:
            args: positional arguments of the first stage.
            loss_scales: factor of each micro-batch's loss in the loss of the batch; its share of the rows by default,
                which fits a loss that is a mean over rows of equal weight.
            kwargs: keyword arguments of every stage.

        Returns:
            On the last stage its output of each micro-batch, in order; on the others an empty list.

        Raises:
            ValueError: the arguments do not agree on rows or micro-batches.
            ConnectionError: a transfer failed.
        """
        arguments, shares = _micro_batches(self.micro_batch_num, args, kwargs)
        scales = shares if loss_scales is None else list(loss_scales)
        if len(scales) != len(arguments):
            raise ValueError(f"{len(scales)} loss_scales for {len(arguments)} micro-batches")
        stage = self.stage
        self.steps = build_steps(self.schedule, stage.stage_num, len(arguments))[stage.stage_index]
        start = time.perf_counter()
        self._running = True
        try:
            stage.begin(arguments, scales)
            for step in self.steps:
                if step.meta_type in (MetaStepType.FWD, MetaStepType.BWD):
                    self._handlers[step.meta_type](step.micro_index)
                else:
                    with self.waiting():
                        self._handlers[step.meta_type](step.micro_index)
            return stage.take_outputs()
        finally:
            stage.clear()
            self._running = False
            self.seconds_total += time.perf_counter() - start


def _micro_batches(
    micro_batch_num: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], list[float]]:
    """Returns the arguments of each micro-batch, and its share of the rows."""
    values = [*args, *kwargs.values()]
    rows = {len(value) for value in values if _has_rows(value)}
    counts = {len(value) for value in values if isinstance(value, PerMicroBatch)}
    if len(rows) > 1 or len(counts) > 1:
        raise ValueError(
            f"the arguments of a pipeline must agree: they have {_listed(rows)} rows and values for {_listed(counts)} "
            "micro-batches"
        )
    count = counts.pop() if counts else None
    slices = split_rows(rows.pop(), count or micro_batch_num) if rows else [slice(0, 1)] * (count or micro_batch_num)
    if count is not None and len(slices) != count:
        raise ValueError(f"{count} micro-batches are too many for {slices[-1].stop} rows")

    def part(value: Any, index: int) -> Any:
        if isinstance(value, PerMicroBatch):
            return value[index]
        return value[slices[index]] if _has_rows(value) else value

    arguments = [
        (tuple(part(value, index) for value in args), {name: part(value, index) for name, value in kwargs.items()})
        for index in range(len(slices))
    ]
    total = sum(one.stop - one.start for one in slices)
    return arguments, [(one.stop - one.start) / total for one in slices]


def _has_rows(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _listed(numbers: set[int]) -> str:
    return " and ".join(str(number) for number in sorted(numbers)) or "no"


@dataclass(frozen=True)
class StageModelBuilder:
    """Builds the stage of this rank.

    Attributes:
        context: this process.
        layers_per_stage: ``parallelism.pipeline_parallel_layers_per_stage``, see `split_layers`.
    """

    context: ParallelContext
    layers_per_stage: object = "auto"

    def layers(self, num_layers: int) -> range:
        """Returns the layers of this rank's stage."""
        return split_layers(num_layers, self.context.dims.pp, self.layers_per_stage)[self.context.coordinates.pp]

    def build_stages(
        self,
        model_cls: Callable[..., Any],
        model_config: Any,
        has_backward: bool,
        dyn_shape: bool = False,
        activation_shape: ActivationShape | None = None,
    ) -> list[ScaledLossPipelineStage]:
        """Builds the model of this rank's layers and wraps it.

        Args:
            model_cls: called with ``model_config`` and the keywords layer_start, layer_end (excluded), pre_process,
                post_process, stage_idx and vp_size, as in MindSpore Transformers.
            model_config: has ``num_layers``.
            has_backward: False for prediction.
            dyn_shape: see `ScaledLossPipelineStage`.
            activation_shape: see `ScaledLossPipelineStage`.

        Returns:
            A list of one stage.

        Raises:
            ValueError: the layers cannot be split as asked for.
        """
        layers = self.layers(model_config.num_layers)
        stage, stage_num = self.context.coordinates.pp, self.context.dims.pp
        submodule = model_cls(
            model_config,
            layer_start=layers.start,
            layer_end=layers.stop,
            pre_process=stage == 0,
            post_process=stage == stage_num - 1,
            stage_idx=stage,
            vp_size=1,
        )
        return [
            ScaledLossPipelineStage(
                *(submodule, stage, stage_num, self.context.previous_stage, self.context.next_stage),
                has_backward=has_backward,
                activation_shape=activation_shape,
                dyn_shape=dyn_shape,
            )
        ]

"""The training loop on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mindspore as ms
from mindspore import Tensor, nn

from mindformers_ext.config import batch_size_mistake
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.callbacks import TrainerCallback
from mindformers_ext.trainer.dataset import Batch, TrainDataset
from mindformers_ext.trainer.lr_scheduler import Schedule
from mindformers_ext.trainer.optimizer import AdamW, clip_by_norm, global_norm
from mindformers_ext.trainer.train_state import TrainerState

LossFunction = Callable[[Any, Tensor], Tensor]


class TrainingOptions(Protocol):
    """The part of the ``training`` section that the loop reads."""

    local_batch_size: int
    global_batch_size: int
    max_norm: float
    use_skip_step_on_nan: bool
    max_consecutive_skipped_steps: int
    rampup_batch_size: list[int] | None


@dataclass(frozen=True)
class StepResult:
    """What one forward and backward over all micro-batches of a step gives.

    Attributes:
        loss: mean over all counted tokens of the step.
        grads: gradient of ``loss``, one tensor a parameter.
        num_tokens: real input tokens.
    """

    loss: float
    grads: Sequence[Tensor]
    num_tokens: int


def train_loop(
    model: nn.Cell,
    config: Any,
    dataset: TrainDataset,
    optimizer: AdamW,
    schedule: Schedule,
    callbacks: TrainerCallback,
    state: TrainerState,
    compute_loss_func: LossFunction | None = None,
    until: int | None = None,
) -> TrainerState:
    """Trains from ``state.global_step`` to ``state.max_steps``.

    What a step does depends on the weights, the optimizer's state, ``state.global_step`` and
    ``state.consumed_samples`` alone, so a run that is resumed from these equals the uninterrupted one.

    Args:
        model: called with ``position_ids``, ``attention_mask`` and ``labels``; returns the mean loss over the labels
            that are not -100. It is left in training mode.
        config: a `TrainConfig`; ``config.training`` is read here, the whole goes to the callbacks as ``args``.
        dataset: source of the samples.
        optimizer: made for ``model.trainable_params()``.
        schedule: learning rate by number of finished steps.
        callbacks: usually a `CallbackHandler`.
        state: progress so far; updated in place.
        compute_loss_func: ``(model outputs without labels, labels) -> mean loss over the labels that are not -100``,
            instead of the model's own loss.
        until: the step to end after instead.

    Returns:
        ``state``.

    Raises:
        ValueError: batch sizes that do not fit together.
        RuntimeError: loss or gradient is not finite and skipping is off, or too many steps were skipped in a row.
    """
    options: TrainingOptions = config.training
    check_batch_sizes(options)
    last = state.max_steps if until is None else until
    if state.global_step >= last:
        logger.warning("nothing to train: step %d of %d is reached already", state.global_step, last)
    loss_and_grads = gradient_function(model, optimizer.params, compute_loss_func)
    skipped_in_a_row = 0
    model.set_train(True)
    callbacks.on_train_begin(config, state)
    begins_epoch = True
    while state.global_step < last:
        if begins_epoch:
            callbacks.on_epoch_begin(config, state)
        callbacks.on_step_begin(config, state)
        size = global_batch_size(options, state.consumed_samples)
        result = accumulate(loss_and_grads, dataset, state.consumed_samples, size, options.local_batch_size)
        norm, learning_rate = global_norm(result.grads), schedule(state.global_step)
        finite = math.isfinite(result.loss) and math.isfinite(norm)
        if finite:
            optimizer.step(clip_by_norm(result.grads, norm, options.max_norm), learning_rate)
            skipped_in_a_row = 0
        else:
            skipped_in_a_row += 1
            _skip(options, state, result.loss, norm, skipped_in_a_row)

        epochs_before = state.consumed_samples // len(dataset)
        state.global_step += 1
        state.consumed_samples += size
        state.global_batch_size = size
        state.epoch = state.consumed_samples / len(dataset)
        callbacks.on_step_end(
            config,
            state,
            loss=result.loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            num_tokens=result.num_tokens,
            skipped=not finite,
        )
        begins_epoch = state.consumed_samples // len(dataset) > epochs_before
        if begins_epoch:
            callbacks.on_epoch_end(config, state)
    callbacks.on_train_end(config, state)
    return state


def gradient_function(
    model: nn.Cell, params: Sequence[ms.Parameter], compute_loss_func: LossFunction | None = None
) -> Callable[[Batch, float], tuple[float, tuple[Tensor, ...]]]:
    """Returns ``(batch, weight) -> (weight * loss, its gradient by each parameter)``."""

    def forward(
        input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, labels: Tensor, weight: float
    ) -> Tensor:
        inputs = {"position_ids": position_ids, "attention_mask": attention_mask}
        if compute_loss_func is None:
            loss = model(input_ids, labels=labels, **inputs)
        else:
            loss = compute_loss_func(model(input_ids, **inputs), labels)
        return loss if weight == 1.0 else loss * weight

    differentiated = ms.value_and_grad(forward, None, list(params))

    def loss_and_grads(batch: Batch, weight: float) -> tuple[float, tuple[Tensor, ...]]:
        if not getattr(model, "takes_additive_mask", True):
            batch = batch.unpacked()
        mask = batch.attention_mask
        loss, grads = differentiated(
            Tensor(batch.input_ids),
            Tensor(batch.position_ids),
            None if mask is None else Tensor(mask),
            Tensor(batch.labels),
            weight,
        )
        return float(loss.asnumpy()), grads

    return loss_and_grads


def accumulate(
    loss_and_grads: Callable[[Batch, float], tuple[float, tuple[Tensor, ...]]],
    dataset: TrainDataset,
    start: int,
    size: int,
    local_batch_size: int,
) -> StepResult:
    """Computes loss and gradient of samples ``start`` to ``start + size``, ``local_batch_size`` at a time.

    Micro-batches are weighted by their counted tokens, so the result is that of one batch of all samples.

    Raises:
        ValueError: none of the samples has a token to learn.
    """
    batches = [dataset.batch(at, local_batch_size) for at in range(start, start + size, local_batch_size)]
    counted = sum(batch.num_counted for batch in batches)
    if not counted:
        raise ValueError(f"samples {start} to {start + size - 1} hold no label to learn (all are -100)")
    total_loss = 0.0
    total_grads: tuple[Tensor, ...] = ()
    for batch in batches:
        if not batch.num_counted:
            continue
        loss, grads = loss_and_grads(batch, batch.num_counted / counted)
        total_loss += loss
        total_grads = tuple(a + b for a, b in zip(total_grads, grads, strict=True)) if total_grads else grads
    return StepResult(total_loss, total_grads, sum(batch.num_tokens for batch in batches))


def global_batch_size(options: TrainingOptions, consumed_samples: int) -> int:
    """Returns the samples of the next step.

    With ``rampup_batch_size: [start, increment, samples]`` it grows from ``start`` in equal stretches of data and
    reaches ``global_batch_size`` after ``samples`` samples.
    """
    if not options.rampup_batch_size:
        return options.global_batch_size
    start, increment, samples = options.rampup_batch_size
    increments = (options.global_batch_size - start) // increment
    if not samples or consumed_samples > samples:
        return options.global_batch_size
    return min(options.global_batch_size, start + consumed_samples * increments // samples * increment)


def check_batch_sizes(options: TrainingOptions) -> None:
    """Refuses batch sizes that do not divide.

    Raises:
        ValueError: names the values.
    """
    mistake = batch_size_mistake(options.local_batch_size, options.global_batch_size, options.rampup_batch_size)
    if mistake is not None:
        raise ValueError(f"training.{mistake[0]}: {mistake[1]}")


def _skip(options: TrainingOptions, state: TrainerState, loss: float, norm: float, in_a_row: int) -> None:
    """Counts a step without an update, or ends the run."""
    what = f"step {state.global_step + 1}: loss {loss}, gradient norm {norm}"
    if not options.use_skip_step_on_nan:
        raise RuntimeError(
            f"{what}; training stops before the weights are spoilt. Lower the learning rate, or set "
            "training.use_skip_step_on_nan: true to pass over such steps"
        )
    state.skipped_steps += 1
    limit = options.max_consecutive_skipped_steps
    if limit and in_a_row >= limit:
        raise RuntimeError(f"{what}; {in_a_row} steps in a row were skipped (training.max_consecutive_skipped_steps)")
    logger.warning("%s; the step is skipped", what)

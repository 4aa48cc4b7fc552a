"""Callbacks of the training loop."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mindformers_ext.runtime import logger
from mindformers_ext.trainer.train_state import TrainerState


class TrainerCallback:
    """Base class: override the events that matter.

    ``args`` is the whole `TrainConfig`. Keyword arguments are ``model``, ``optimizer``, ``lr_scheduler`` and
    ``train_dataset``, and for ``on_step_end`` also ``loss`` and ``grad_norm`` (floats, as computed: not finite
    in a skipped step), ``learning_rate``, ``num_tokens`` (real input tokens of the step) and ``skipped``.
    """

    def on_init_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Called once, when the Trainer is complete: the place to refuse what cannot work.

        Has the keyword argument ``trainer`` besides, whose ``inference()`` may be called in the events that follow.
        """

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Called once, before the first step."""

    def on_train_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Called once, after the last step; not after an exception."""

    def on_epoch_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Called before the first step of the run and before the first step of each further epoch."""

    def on_epoch_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Called after the step that read the last sample of an epoch."""

    def on_step_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Called before each step; ``state.global_step`` counts the finished ones."""

    def on_step_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Called after each step; ``state`` already counts it."""


class CallbackHandler(TrainerCallback):
    """Passes every event on to its callbacks, in order, adding the objects of the run to the keyword arguments."""

    def __init__(self, callbacks: Iterable[TrainerCallback], **objects: Any) -> None:
        self.callbacks = list(callbacks)
        self._objects = objects

    def add_callback(self, callback: TrainerCallback) -> None:
        """Adds a callback behind the others."""
        self.callbacks.append(callback)

    def on_init_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._call("on_init_end", args, state, kwargs)

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._call("on_train_begin", args, state, kwargs)

    def on_train_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._call("on_train_end", args, state, kwargs)

    def on_epoch_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._call("on_epoch_begin", args, state, kwargs)

    def on_epoch_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._call("on_epoch_end", args, state, kwargs)

    def on_step_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._call("on_step_begin", args, state, kwargs)

    def on_step_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._call("on_step_end", args, state, kwargs)

    def _call(self, event: str, args: Any, state: TrainerState, kwargs: dict[str, Any]) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(args, state, **self._objects, **kwargs)


class LossCallback(TrainerCallback):
    """Logs one line every ``log_interval`` steps and appends its values to ``state.log_history``.

    Loss and norm are those of the step; tokens/s is the rate since the last line.
    """

    def __init__(self, log_interval: int = 1) -> None:
        if not isinstance(log_interval, int) or log_interval < 1:
            raise ValueError(f"LossCallback: log_interval {log_interval!r} must be an integer of at least 1")
        self.log_interval = log_interval
        self._tokens = 0
        self._since = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Starts the clock."""
        self._tokens, self._since = 0, time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Counts the step's tokens and logs when it is time."""
        self._tokens += kwargs["num_tokens"]
        if state.global_step % self.log_interval:
            return
        now = time.perf_counter()
        rate = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        line = {
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": kwargs["loss"],
            "learning_rate": kwargs["learning_rate"],
            "grad_norm": kwargs["grad_norm"],
            "tokens_per_second": rate,
        }
        state.log_history.append(line)
        logger.info(
            "step %d/%d | epoch %.2f | loss %.6f | lr %.3e | grad_norm %.4f | %.0f tokens/s",
            *(line["step"], state.max_steps, line["epoch"], line["loss"], line["learning_rate"], line["grad_norm"]),
            rate,
        )


class CheckpointCallback(TrainerCallback):
    """Saves every ``interval`` steps and after the last step.

    Args:
        save: writes the checkpoint of the state that it is given.
        interval: ``checkpoint.save_interleaved_steps``.
    """

    def __init__(self, save: Callable[[TrainerState], None], interval: int) -> None:
        if interval < 1:
            raise ValueError(f"checkpoint.save_interleaved_steps {interval} must be at least 1")
        self._save = save
        self._interval = interval
        self._saved_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Notes where the run starts: a resumed run that has nothing to do saves nothing."""
        self._saved_step = state.global_step

    def on_step_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Saves when it is time. A disk that fails now need not end a long run: the error is logged."""
        if state.global_step % self._interval:
            return
        try:
            self._save_once(state)
        except OSError as error:
            logger.error("no checkpoint of step %d: %s; training goes on", state.global_step, error)

    def on_train_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Saves the end of the run unless that is done; here an error counts."""
        self._save_once(state)

    def _save_once(self, state: TrainerState) -> None:
        if self._saved_step != state.global_step:
            self._save(state)
            self._saved_step = state.global_step


# By import path, as the second needs what this file is part of.
_BUILT_IN = {
    "LossCallback": "mindformers_ext.trainer.callbacks.LossCallback",
    "EvaluationCallback": "mindformers_ext.trainer.evaluation.EvaluationCallback",
}
_KNOWN = ", ".join(_BUILT_IN)


def build_callbacks(entries: Sequence[Mapping[str, Any]]) -> list[TrainerCallback]:
    """Builds the callbacks of the ``callbacks`` section; a `LossCallback` comes first if none is listed.

    Args:
        entries: each ``{"type": name, **arguments}``, where the name is ``LossCallback``, ``EvaluationCallback`` or the
            import path ``package.module.Class`` of a `TrainerCallback`.

    Raises:
        ValueError: an entry cannot be built; its place in the list and the reason are given.
    """
    callbacks = [_build(f"callbacks[{index}]", dict(entry)) for index, entry in enumerate(entries)]
    if not any(isinstance(callback, LossCallback) for callback in callbacks):
        callbacks.insert(0, LossCallback())
    return callbacks


def _build(place: str, arguments: dict[str, Any]) -> TrainerCallback:
    name = arguments.pop("type", None)
    if not isinstance(name, str):
        raise ValueError(f"{place}: type is missing; give {_KNOWN} or an import path such as package.module.Class")
    if name == "CheckpointCallback":
        raise ValueError(f"{place}: checkpoints are configured by the checkpoint section, not by a callback")
    kind = _import(place, _BUILT_IN.get(name, name))
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: cannot build {name}: {error}") from error


def _import(place: str, path: str) -> type[TrainerCallback]:
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{place}: unknown callback {path!r}; use {_KNOWN} or an import path package.module.Class")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{place}: cannot import {path}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, TrainerCallback)):
        raise ValueError(f"{place}: {path} is not a subclass of mindformers_ext.trainer.callbacks.TrainerCallback")
    return kind

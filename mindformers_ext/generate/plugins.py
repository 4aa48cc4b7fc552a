"""What users plug into a generation: processors of scores and criteria that stop rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class LogitsProcessor:
    """Changes the scores of the next token; any callable with these arguments will do.

    ``__call__(input_ids, scores)`` gets the ids int64 ``[B, T]`` so far, prompt and new tokens, padded on the left, and
    the scores float32 ``[B, V]``, which it may change in place; it returns scores ``[B, V]``.
    """

    def __call__(self, input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(input_ids, scores)")


class StoppingCriteria:
    """Ends rows; any callable with these arguments will do.

    ``__call__(input_ids, scores)`` gets the ids int64 ``[B, T]`` with the newest token, padded on the left, and the
    scores float32 ``[B, V]`` that it was chosen from; it returns booleans ``[B]``, True for a row that is done.
    """

    def __call__(self, input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(input_ids, scores)")


def call_processor(plugin: Callable[..., Any], input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The plug-in's scores as float32 ``[B, V]``.

    Raises:
        ValueError: it returned something of another shape or type.
        RuntimeError: it failed.
    """
    array = _returned("logits_processor", plugin, input_ids, scores, scores.shape, "fiu", "numbers")
    return array.astype(np.float32, copy=False)


def call_criterion(plugin: Callable[..., Any], input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Whether each row is done according to the plug-in, bool ``[B]``.

    Raises:
        ValueError: it returned something of another shape or type.
        RuntimeError: it failed.
    """
    return _returned("stopping_criteria", plugin, input_ids, scores, (len(input_ids),), "biu", "booleans").astype(bool)


def _returned(
    option: str,
    plugin: Callable[..., Any],
    input_ids: np.ndarray,
    scores: np.ndarray,
    shape: tuple[int, ...],
    kinds: str,
    wanted: str,
) -> np.ndarray:
    """What a plug-in returns, as an array of the given shape and of one of numpy's kinds of types."""
    try:
        result = plugin(input_ids, scores)
    except NotImplementedError:
        raise  # a plug-in that lacks its __call__
    except Exception as error:
        raise RuntimeError(f"{option} {plugin_name(plugin)} failed: {type(error).__name__}: {error}") from error
    try:
        array = np.asarray(result)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.shape != shape or array.dtype.kind not in kinds:
        raise ValueError(_complaint(option, plugin, result, f"{wanted} of shape {shape}"))
    return array


def plugin_name(plugin: Callable[..., Any]) -> str:
    """The plug-in's name for a message."""
    return getattr(plugin, "__qualname__", None) or type(plugin).__name__


def _complaint(option: str, plugin: Callable[..., Any], result: Any, wanted: str) -> str:
    shape = getattr(result, "shape", None)
    got = f"{type(result).__name__}"
    if shape is not None:
        got += f" of shape {tuple(shape)} and type {getattr(result, 'dtype', None)}"
    return f"{option}: {plugin_name(plugin)} must return {wanted}, not {got}"

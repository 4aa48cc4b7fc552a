"""The one way in which decoding and scoring call a model, and what a model tells of itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.kv_cache import KVCache
from mindformers_ext.generate.utils import _build_combined_mask, build_position_ids
from mindformers_ext.parallel.groups import ParallelContext, single
from mindformers_ext.parallel.lockstep import Lockstep


@dataclass(frozen=True)
class Outputs:
    """What a model returned; nothing outside the last stage of a pipeline.

    Attributes:
        logits: ``[B, S or kept, V]``, of this process' part of the vocabulary; None where there are scores instead.
        scores: float32 ``[B, S, 4]`` of targets, see `GPTModel.construct`; None without targets, and from a model that
            takes none.
    """

    logits: Tensor | None
    scores: Tensor | None = None


class ModelCall:
    """Runs a model on new tokens, with what it takes of all that is known of them.

    Any Cell works whose ``construct`` takes ``input_ids`` int32 ``[B, S]`` and, by name, what it needs of

    - ``position_ids`` int32 ``[B, S]``,
    - ``attention_mask`` additive float32 ``[B, 1, S, T]`` over all T tokens so far, or None where a causal mask does;
      a model with ``new_cache`` gets int32 ``[B, T]`` instead, 1 for real tokens and 0 for pads, or None without pads,
    - ``past_key_values``: what it returned last, pairs (K, V) ``[B, heads, past, D]``; None at first,
    - ``logits_to_keep``: how many of the last positions' logits are read, mostly 1,
    - ``score_targets``, where tokens are scored: see `GPTModel.construct`,

    and which returns logits ``[B, S, V]``, or of these positions only: alone, as the first of a tuple with
    ``past_key_values`` the second, or in a dict under these names, which for targets that it takes holds ``scores``
    instead of logits. A model with ``new_cache(batch_size, max_length)``
    gets a cache that it extends in place; one that returns no ``past_key_values`` is run on the whole sequence at every
    step.

    Args:
        model: the Cell.
        before_forward: is called before each forward; what it raises ends the call.

    Attributes:
        model: as given.
        layout: the place of this process, and its groups.
        waiting: a block of time in which a stage waits for the last one.
        num_forwards: how often the model was run, idle forwards aside.
        keeps_cache: whether the model returns a cache, as far as is known.
    """

    def __init__(self, model: Any, before_forward: Callable[[], None] | None = None) -> None:
        self.model, self._before_forward = model, before_forward
        self.layout = layout_of(model)
        runtime = getattr(model, "runtime", None)
        self.waiting = nullcontext if runtime is None else runtime.waiting
        self.num_forwards = 0
        self._accepts = set(inspect.signature(model.construct).parameters)
        self._in_place = hasattr(model, "new_cache")
        self._lockstep = _lockstep_of(model)
        self.keeps_cache = "past_key_values" in self._accepts

    def new_cache(self, num_rows: int, max_length: int) -> KVCache | None:
        """An empty cache for rows of up to ``max_length`` tokens; None if the model keeps none."""
        if not self.keeps_cache:
            return None
        return KVCache(self.model.new_cache(num_rows, max_length) if self._in_place else ())

    def run(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        cache: KVCache | None = None,
        kept: int = 1,
        targets: np.ndarray | None = None,
    ) -> Outputs:
        """One forward. `cache` then holds its tokens too; if the model returns none, `keeps_cache` becomes False.

        Args:
            ids: of the new tokens, int32 ``[B, S]``.
            mask: int32 ``[B, past + S]`` of all tokens, 1 real, 0 pad.
            cache: of the tokens before them; None if there are none.
            kept: how many of the last positions' logits are read.
            targets: int32 ``[B, S]``, see `GPTModel.construct`; None asks for logits.
        """
        length = ids.shape[1]
        past: Any = cache
        if not self._in_place:
            past = cache.past_key_values if cache else None
        is_padded = bool((mask == 0).any())
        given_mask = None
        if self._in_place:
            given_mask = mask if is_padded else None
        elif is_padded or length > 1:
            given_mask = _build_combined_mask(mask, length)
        given: dict[str, Any] = {
            "position_ids": _tensor(build_position_ids(mask)[:, -length:]),
            "attention_mask": None if given_mask is None else _tensor(given_mask),
            "past_key_values": past,
            "logits_to_keep": kept,
        }
        if targets is not None:
            given["score_targets"] = _tensor(targets)
        if self._before_forward is not None:
            self._before_forward()
        self._lockstep.forward()
        self.num_forwards += 1
        returned = self.model(_tensor(ids), **{name: value for name, value in given.items() if name in self._accepts})
        outputs, past_key_values = _unpacked(returned, targets is not None and "score_targets" in self._accepts)
        if cache is not None and not self._in_place:
            if past_key_values is None:
                self.keeps_cache = False
            else:
                cache.update(past_key_values)
        return outputs

    def last_logits(self, outputs: Outputs, num_rows: int, kept: int = 1) -> Logits:
        """The logits of the last ``kept`` tokens of each row, ``[num_rows * kept, V]``, one row after the other."""
        last = None
        if outputs.logits is not None:
            last = outputs.logits if outputs.logits.shape[1] == kept else outputs.logits[:, -kept:]
            last = last.asnumpy().reshape(-1, last.shape[-1]).astype(np.float32, copy=False)
        is_whole = self.layout.tp.size == 1  # then a foreign model needs no config
        vocab_size = last.shape[1] if last is not None and is_whole else self.model.config.vocab_size
        return Logits(last, num_rows * kept, vocab_size, self.layout, self.waiting)

    def finish(self) -> None:
        """Lets processes that share parameters with this one come to their end."""
        self._lockstep.finish()


def run_idle(model: Any) -> None:
    """Takes part in the forwards of processes that share parameters with this one, which has nothing to do itself."""
    with ms._no_grad():
        _lockstep_of(model).finish()


def layout_of(model: Any) -> ParallelContext:
    """Returns the place of this process in the layout of a model; a foreign model has one process."""
    shard = getattr(model, "model_shard", None)
    return single() if shard is None else shard.context


def limits_of(model: Any) -> tuple[int | None, int | None]:
    """Returns how many ids a model has, and how many tokens of a row it can read; None where its config tells none."""
    limits = getattr(model, "config", None)
    vocab_size, seq_length = getattr(limits, "vocab_size", None), getattr(limits, "seq_length", None)
    return (
        vocab_size if isinstance(vocab_size, int) else None,
        seq_length if isinstance(seq_length, int) and seq_length > 0 else None,
    )


def pads_obstacle(model: Any) -> str | None:
    """Says why rows of this model cannot have pads in front; None if they can."""
    return _missing(model, "attention_mask", "position_ids")


def cache_obstacle(model: Any) -> str | None:
    """Says why nothing is remembered of what this model has read; None if it can be."""
    return _missing(model, "past_key_values")


def _missing(model: Any, *names: str) -> str | None:
    accepted = inspect.signature(model.construct).parameters
    missing = [name for name in names if name not in accepted]
    return f"{type(model).__name__}.construct takes no {' and no '.join(missing)}" if missing else None


def _lockstep_of(model: Any) -> Lockstep:
    """Returns what keeps processes that share parameters at the same number of forwards."""

    def idle() -> None:
        model(Tensor.from_numpy(np.zeros((1, 1), np.int32)), logits_to_keep=1)

    return Lockstep(layout_of(model).groups["dp_shard"], idle)


def _unpacked(returned: Any, may_have_scores: bool) -> tuple[Outputs, Any]:
    """Takes logits or scores, and past_key_values, out of what a model returned."""
    if isinstance(returned, dict):
        has_scores = may_have_scores and "scores" in returned
        outputs = Outputs(None, returned["scores"]) if has_scores else Outputs(returned["logits"])
        return outputs, returned.get("past_key_values")
    if isinstance(returned, tuple | list):
        return Outputs(returned[0]), returned[1] if len(returned) > 1 else None
    return Outputs(returned), None


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array))

"""How far a training run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainerState:
    """Progress of a run; everything that a resumed run needs besides the weights and the optimizer.

    Attributes:
        global_step: finished optimizer steps, skipped ones included.
        epoch: passes over the dataset, with fraction.
        consumed_samples: samples (blocks) read so far; the position in the data.
        max_steps: step at which training ends.
        global_batch_size: samples of the latest step.
        skipped_steps: steps of this run without an update because the gradient was not finite.
        loss_scale: always 1; kept because checkpoints record it.
        data: what the samples are, see `data_mismatch`; empty where it is not known.
        log_history: what was logged, one dict a line.
    """

    global_step: int = 0
    epoch: float = 0.0
    consumed_samples: int = 0
    max_steps: int = 0
    global_batch_size: int = 0
    skipped_steps: int = 0
    loss_scale: float = 1.0
    data: dict[str, Any] = field(default_factory=dict)
    log_history: list[dict[str, Any]] = field(default_factory=list)

    def to_common(self) -> dict[str, Any]:
        """Returns the fields of a checkpoint's ``common.json``, and ``data`` of its ``trainer_state.json``."""
        common = {
            "epoch_num": int(self.epoch),
            "step_num": self.max_steps,
            "global_step": self.global_step,
            "loss_scale": self.loss_scale,
            "global_batch_size": self.global_batch_size,
            "consumed_samples": self.consumed_samples,
        }
        return {**common, "data": self.data} if self.data else common

    @classmethod
    def from_common(
        cls, common: Mapping[str, Any], max_steps: int, source: str = "common.json of the checkpoint"
    ) -> TrainerState:
        """Restores the progress that `to_common` recorded.

        Checkpoints without ``consumed_samples`` are read as ``global_step * global_batch_size``.

        Args:
            common: the recorded fields.
            max_steps: step at which training ends.
            source: names the checkpoint in errors.

        Raises:
            ValueError: ``global_step`` is missing, or so is every trace of the position in the data; or a value is
                none that training writes.
        """
        names = ("global_step", "global_batch_size", "consumed_samples", "epoch_num")
        step, batch, consumed, epoch = (_counter(common, name, source) for name in names)
        if step is None:
            raise ValueError(f"{source} has no global_step; it is not a training checkpoint")
        if consumed is None:
            if batch is None:
                raise ValueError(f"{source} has neither consumed_samples nor global_batch_size")
            consumed = step * batch
        return cls(
            global_step=step,
            epoch=float(epoch or 0),
            consumed_samples=consumed,
            max_steps=max_steps,
            global_batch_size=batch or 0,
        )


def _counter(common: Mapping[str, Any], name: str, source: str) -> int | None:
    value = common.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{source}: {name} must be a whole number of at least 0, not {value!r:.40}")
    return value


def data_mismatch(now: Mapping[str, Any], recorded: Any) -> tuple[list[str], list[str]]:
    """Compares the samples of a run with those of the checkpoint that it continues.

    Args:
        now: ``seq_length`` and ``blocks``, without which a position in the data has no meaning, and settings that
            change which block is read when: ``shuffle``, ``seed``, ``packing``.
        recorded: the same of the checkpoint; keys that are missing, as in foreign checkpoints, are not compared.

    Returns:
        Differences that make the position meaningless, and those that only change the order.
    """
    before = recorded if isinstance(recorded, Mapping) else {}
    changed = {
        key: f"{key} {value!r} instead of {before[key]!r}"
        for key, value in now.items()
        if key in before and before[key] != value
    }
    if not now.get("shuffle") and not before.get("shuffle"):
        changed.pop("seed", None)
    fatal = [changed.pop(key) for key in ("seq_length", "blocks") if key in changed]
    return fatal, list(changed.values())

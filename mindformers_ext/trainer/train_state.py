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
        log_history: what was logged, one dict a line.
    """

    global_step: int = 0
    epoch: float = 0.0
    consumed_samples: int = 0
    max_steps: int = 0
    global_batch_size: int = 0
    skipped_steps: int = 0
    loss_scale: float = 1.0
    log_history: list[dict[str, Any]] = field(default_factory=list)

    def to_common(self) -> dict[str, Any]:
        """Returns the fields of a checkpoint's ``common.json``."""
        return {
            "epoch_num": int(self.epoch),
            "step_num": self.max_steps,
            "global_step": self.global_step,
            "loss_scale": self.loss_scale,
            "global_batch_size": self.global_batch_size,
            "consumed_samples": self.consumed_samples,
        }

    @classmethod
    def from_common(cls, common: Mapping[str, Any], max_steps: int) -> TrainerState:
        """Restores the progress that `to_common` recorded.

        Checkpoints without ``consumed_samples`` are read as ``global_step * global_batch_size``.

        Raises:
            ValueError: ``global_step`` is missing, or so is every trace of the position in the data.
        """
        step, batch = common.get("global_step"), common.get("global_batch_size")
        if step is None:
            raise ValueError("common.json of the checkpoint has no global_step; it is not a training checkpoint")
        consumed = common.get("consumed_samples")
        if consumed is None and batch is None:
            raise ValueError("common.json of the checkpoint has neither consumed_samples nor global_batch_size")
        return cls(
            global_step=int(step),
            epoch=float(common.get("epoch_num") or 0),
            consumed_samples=int(step * batch if consumed is None else consumed),
            max_steps=max_steps,
            global_batch_size=int(batch or 0),
        )

"""The watchdog of a run with the limits of its configuration; training is not watched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from mindformers_ext.config.schema import PredictSection
from mindformers_ext.generate import GenerationStats
from mindformers_ext.parallel.collectives import Group
from mindformers_ext.runtime import rank
from mindformers_ext.trainer.inference import Watch
from mindformers_ext.trainer.watchdog import Watchdog


class RunWatch:
    """Watches the parts of a run on this rank.

    Attributes:
        watchdog: ends the process.
        world: all ranks of the job; None before this one has joined it.
    """

    def __init__(self, section: PredictSection, is_inference: bool, world_size: int) -> None:
        """Takes the limits of ``predict``; none of them hold in training."""
        self.watchdog = Watchdog(rank(), world_size)
        self.world: Group | None = None
        self._section, self._is_inference = section, is_inference

    def start(self, name: str) -> AbstractContextManager[None]:
        """Watches what comes before the ranks know each other, with the limit ``predict.start_timeout``."""
        return self.watchdog.phase(name, *self._limit("start_timeout"))

    def waiting(self, name: str, key: str) -> AbstractContextManager[None]:
        """Watches a step in which ranks wait for each other, with the limit ``predict.<key>``."""
        return self.watchdog.phase(name, *self._limit(key), waiting_for=self._waiting_for)

    def answering(self, stats: GenerationStats) -> Watch:
        """Returns what watches the answering of a batch of these records, the first one with more patience."""

        def watch(records: Sequence[int]) -> AbstractContextManager[None]:
            self.watchdog.records = records
            return self.watchdog.phase(
                "answering",
                *self._limit("step_timeout" if stats.steps else "start_timeout"),
                progress=lambda: (stats.steps, self.world and self.world.traffic.finished),
                waiting_for=self._waiting_for,
            )

        return watch

    def _limit(self, key: str) -> tuple[float, str]:
        return getattr(self._section, key) if self._is_inference else 0.0, f"predict.{key}"

    def _waiting_for(self) -> Sequence[int]:
        return () if self.world is None else self.world.waiting_for

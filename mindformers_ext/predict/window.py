"""The look-ahead: a bounded number of records is read in advance and made into batches of prompts of like length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mindformers_ext.predict.isolation import Job

# Batches that are read before the first of them is answered: enough to pair prompts by their length.
_BATCHES = 4


class Window:
    """Collects tokenised records, errors among them, and says when it is full.

    Args:
        batch_size: prompts of a batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._room = _BATCHES * batch_size
        self._ready: list[Job] = []
        self._failed: list[Job] = []

    def add(self, job: Job) -> None:
        """Takes a record that was read."""
        (self._ready if job.error is None else self._failed).append(job)

    @property
    def is_full(self) -> bool:
        """Whether it has its number of prompts, or as many errors."""
        return max(len(self._ready), len(self._failed)) >= self._room

    def batches(self, batch_size: int) -> Iterator[list[Job]]:
        """Yields everything in it and leaves it empty: first the errors, then the prompts, the longest first.

        The longest first: if memory does not hold them, that is known before the others are begun.
        """
        failed, ready = self._failed, sorted(self._ready, key=lambda job: (-len(job.prompt_ids), job.record.index))
        self._failed, self._ready = [], []
        if failed:
            yield failed
        for start in range(0, len(ready), batch_size):
            yield ready[start : start + batch_size]


def windowed(jobs: Iterable[Job], batch_size: int) -> Iterator[list[Job]]:
    """Yields the batches of one window after the other; reads on when the next batch is asked for."""
    window = Window(batch_size)
    for job in jobs:
        window.add(job)
        if window.is_full:
            yield from window.batches(batch_size)
    yield from window.batches(batch_size)

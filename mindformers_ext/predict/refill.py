"""Answers records one by one: where one is done, the next takes its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from mindformers_ext.predict.completion import Completion
from mindformers_ext.predict.isolation import FAULTS_OF_RECORDS, Answerer, Job, fault_of


class Refill(Protocol):
    """What answers prompts that come one after the other."""

    @property
    def room(self) -> int:
        """Prompts that may be added now."""

    def advance(
        self, prompts: Sequence[list[int]], indices: Sequence[int], more_to_come: bool
    ) -> list[tuple[int, list[Completion]]]:
        """Adds prompts, at most `room`, and goes on for a while; at least one prompt is under way.

        Args:
            prompts: token ids of each.
            indices: their records.
            more_to_come: False if no prompts follow.

        Returns:
            Records that are done now, and their completions.
        """

    def reset(self, batch_size: int) -> None:
        """Forgets the prompts that are under way; from now on there are up to `batch_size` at a time."""


def answer_refilled(
    batches: Iterator[list[Job]], refill: Refill, answerer: Answerer, emit: Callable[[list[Job]], None]
) -> None:
    """Answers all records, and gives them to `emit` as they are done.

    Where a step fails, the records that are under way are answered as a batch, which `answerer` divides until it has
    found the one at fault; then it goes on with the others.

    Args:
        batches: records in the order in which they are begun. A batch is of records with an error, or of those without.
        refill: answers prompts.
        answerer: answers what failed.
        emit: takes records with completions or an error.
    """
    waiting: deque[Job] = deque()
    under_way: dict[int, Job] = {}
    more_to_come = True
    while True:
        while more_to_come and len(waiting) < max(refill.room, 1):
            batch = next(batches, None)
            if batch is None:
                more_to_come = False
            elif batch[0].error is None:
                waiting.extend(batch)
            else:
                emit(batch)
        new = [waiting.popleft() for _ in range(min(refill.room, len(waiting)))]
        under_way |= {job.record.index: job for job in new}
        if not under_way:
            return
        failure = None
        try:
            done = refill.advance(
                [job.prompt for job in new], [job.record.index for job in new], more_to_come or bool(waiting)
            )
        except FAULTS_OF_RECORDS as error:
            failure = fault_of(error)
            answerer.log(list(under_way.values()), failure, error)
        # Out of the except block: see `Answerer.answer`.
        if failure is None:
            finished = []
            for index, completions in done:
                job = under_way.pop(index)
                answerer.share_out([job], completions)
                finished.append(job)
            emit(finished)
            continue
        jobs = list(under_way.values())
        under_way.clear()
        refill.reset(answerer.batch_size)  # frees what the batch held
        if len(jobs) > 1:
            answerer.retry(jobs, failure)
        else:  # alone, it has the room of all others
            answerer.answer(jobs)
        emit(jobs)
        refill.reset(answerer.batch_size)

"""Refill on all ranks of a job: which replica gets a prompt, and what is around each stretch of decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mindformers_ext.config.schema import PredictSection
from mindformers_ext.generate import GenerationConfig
from mindformers_ext.generate.refill import RefilledBatch, refill_obstacle
from mindformers_ext.generate.rows import GeneratedRow
from mindformers_ext.parallel.agreement import gather_errors
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import Completion
from mindformers_ext.predict.metrics import Latencies
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.replicas import COMPLETIONS, raise_together

# Steps between two exchanges of replicas: a row that ends waits for half of them on average.
_STEPS = 8


def refills(predict: PredictSection, model: Any, config: GenerationConfig, batch_size: int) -> bool:
    """Whether records replace each other in a batch; says why not if the YAML asks for it."""
    obstacle = refill_obstacle(model, config, batch_size)
    if obstacle is not None and predict.refill and "refill" in predict.given:
        logger.warning("predict.refill has no effect, batches are answered one after the other: %s", obstacle)
    return predict.refill and obstacle is None


def as_completion(row: GeneratedRow) -> Completion:
    """Returns an answer as `predict` knows it."""
    return Completion(
        token_ids=row.token_ids,
        finish_reason=row.finish_reason,
        stop_string=row.stop_string,
        stop_position=row.stop_position,
        score=row.score,
        logprobs=row.logprobs,
        top_logprobs=row.top_logprobs,
    )


class Refilling:
    """Answers prompts as they come, on all ranks together; see `mindformers_ext.predict.Refill`.

    Every rank makes the same calls and gets the same answers. The ranks of one replica decode the same rows, so they
    know at the same step that one has ended. Replicas tell each other after a few steps.

    Args:
        batch: the rows of this replica.
        context: the place of this rank.
        batch_size: prompts that a replica answers at the same time.
        watch: given the indices of the records that are under way, returns what is around the answering of them.
        latencies: is added to.
    """

    def __init__(
        self,
        batch: RefilledBatch,
        context: ParallelContext,
        batch_size: int,
        watch: Callable[[Sequence[int]], AbstractContextManager[None]],
        latencies: Latencies | None = None,
    ) -> None:
        self._batch, self._context, self._watch = batch, context, watch
        self._latencies = Latencies() if latencies is None else latencies
        self.reset(batch_size * context.dp.size)

    def reset(self, batch_size: int) -> None:
        """See `Refill.reset`; prompts of all replicas."""
        size = max(1, batch_size // self._context.dp.size)
        self._batch.reset(size)
        self._rooms = [size] * self._context.dp.size
        self._started: dict[int, float] = {}

    @property
    def room(self) -> int:
        """See `Refill.room`."""
        return sum(self._rooms)

    def advance(
        self, prompts: Sequence[list[int]], indices: Sequence[int], more_to_come: bool
    ) -> list[tuple[int, list[Completion]]]:
        """See `Refill.advance`.

        Raises:
            JobStoppedError: on all ranks, if one of them has to stop.
            BatchError: on all ranks of a job, if one of the records may be at fault.
            PeerLostError: another rank failed for good.
        """
        now = time.perf_counter()
        self._started |= dict.fromkeys(indices, now)
        mine = self._share(len(prompts))
        with self._watch(list(self._started)):
            done = self._together([prompts[i] for i in mine], [indices[i] for i in mine], more_to_come)
        now = time.perf_counter()
        for index, _ in done:
            self._latencies.add(now - self._started.pop(index))
        return done

    def _share(self, count: int) -> list[int]:
        """Which of so many new prompts this replica gets: each goes to the first that has the most room."""
        mine = []
        for prompt in range(count):
            replica = self._rooms.index(max(self._rooms))
            self._rooms[replica] -= 1
            if replica == self._context.dp.rank:
                mine.append(prompt)
        return mine

    def _together(
        self, prompts: list[list[int]], indices: list[int], more_to_come: bool
    ) -> list[tuple[int, list[Completion]]]:
        """Advances all replicas, and returns what is done on any of them; what fails on one rank fails on all."""
        context, group = self._context, self._context.dp
        found: list[tuple[int, list[Completion]]] = []
        error: Exception | None = None
        try:
            rows = self._batch.advance(prompts, indices, _STEPS if group.size > 1 else None, more_to_come)
            found = [(index, [as_completion(row) for row in answers]) for index, answers in rows]
        except Exception as raised:
            if context.world.size == 1:
                raise
            error = raised
        if context.world.size > 1:
            raise_together(gather_errors(context, error), error, context.rank, list(self._started))
        room = self._batch.room
        if group.size == 1:
            self._rooms = [room]
            return found
        told = group.all_gather_object(
            [room, [[index, [COMPLETIONS.pack(one) for one in answers]] for index, answers in found]]
        )
        self._rooms = [one[0] for one in told]
        return [
            (index, [COMPLETIONS.unpack(fields) for fields in answers])
            for _, records in told
            for index, answers in records
        ]

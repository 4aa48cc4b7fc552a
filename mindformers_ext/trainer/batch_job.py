"""A prediction whose rows are kept: one output, which rank 0 writes and all ranks of the job know about."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import numpy as np

from mindformers_ext.parallel.agreement import failing_together, gather_errors
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import (
    FinishedRecords,
    JobStoppedError,
    OutputJob,
    RunResult,
    RunSummary,
    StopSignals,
    open_job,
)

# (sample_idx, ids of prompt and answer) or (sample_idx, log-likelihood) of each answered record.
Outputs: TypeAlias = list[tuple[int, Any]]

# Forwards between two agreements on a stop: what they cost does not show, and a stop does not wait for a whole batch.
_FORWARDS = 4


class BatchJob:
    """The output of a run as every rank sees it; a context manager, in which signals ask for a stop.

    Attributes:
        writer: takes rows; None on all ranks but the first, and without an output.
        finished: the records that need not be done; None if there are none.
        num_errors: how many of those have an error.
        is_complete: whether the output was complete before, so that there is nothing to do.
        facts: what the run that began the job chose.
    """

    def __init__(
        self, context: ParallelContext, job: OutputJob | None, has_output: bool, facts: Mapping[str, Any]
    ) -> None:
        """Tells all ranks what the first one found; see `open_batch_job`."""
        self._has_output = has_output
        self._context = context
        self._signals = StopSignals()
        self._stack = ExitStack()
        self.writer = job
        found = {"facts": dict(facts), "complete": False, "finished": 0, "errors": 0, "bytes": 0}
        words = b""
        if job is not None:
            words = job.finished.to_bytes()
            found = {
                "facts": job.facts,
                "complete": job.manifest is not None,
                "finished": job.num_finished,
                "errors": job.num_errors,
                "bytes": len(words),
            }
        found = context.world.all_gather_object(found)[0]
        self.facts: dict[str, Any] = found["facts"]
        self.is_complete: bool = found["complete"]
        self.num_errors: int = found["errors"]
        self.num_finished: int = found["finished"]
        self.finished = self._shared(words, found["bytes"]) if found["finished"] else None

    def _shared(self, words: bytes, size: int) -> FinishedRecords:
        local = np.frombuffer(words, np.uint8) if words else np.zeros(size, np.uint8)
        return FinishedRecords(self._context.world.broadcast(local, 0).tobytes())

    def __enter__(self) -> BatchJob:
        if self.writer is not None:
            self._stack.enter_context(self.writer)
        if self._has_output:  # without one there is nothing to go on from, and an interrupt is an interrupt
            self._stack.enter_context(self._signals)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)

    def agree(self, reason: JobStoppedError | None) -> None:
        """Raises on all ranks if any of them has to stop; every rank calls it.

        Raises:
            JobStoppedError: with the reason of the first rank that has one.
        """
        if reason is None:
            try:
                self._signals.check()
            except JobStoppedError as stopped:
                reason = stopped
        self._stop_together(reason)

    def _stop_together(self, reason: JobStoppedError | None) -> None:
        if errors := gather_errors(self._context, reason):
            raise JobStoppedError(errors[0].message) from reason

    def step_check(self) -> Callable[[], None]:
        """Returns what the ranks that decode a batch together call before each of its forwards.

        It raises `JobStoppedError` on all of them if one got a signal.
        """
        unit = self._context.unit
        calls = 0

        def check() -> None:
            nonlocal calls
            calls += 1
            if unit.size == 1:
                self._signals.check()
            elif calls % _FORWARDS == 0 and unit.any(self._signals.received is not None):
                self._signals.check()
                raise JobStoppedError("another rank received a signal")

        return check

    def publish(self, result: RunResult, collect: bool) -> tuple[RunSummary, Outputs]:
        """Publishes the output of a run that came to its end; every rank calls it.

        Returns:
            The counts, and (sample_idx, ids of prompt and answer) of every answer if `collect` is set. Both are of the
            whole output where earlier runs began it.

        Raises:
            JobStoppedError: rank 0 could not write; the journal stays.
        """
        if not self._has_output:
            return result.summary, result.outputs
        outputs: Outputs | None = [] if collect and self.finished is not None else None
        summary = result.summary
        reason: JobStoppedError | None = None
        try:
            if self.writer is not None:
                summary = self.writer.publish(result.summary.num_records + result.summary.num_resumed, outputs)
        except JobStoppedError as stopped:
            reason = stopped
        self._stop_together(reason)
        summary, outputs = self._from_first(summary, outputs)
        summary.num_resumed, summary.wall_seconds = result.summary.num_resumed, result.summary.wall_seconds
        return summary, result.outputs if outputs is None else outputs

    def stored(self, collect: bool) -> tuple[RunSummary, Outputs]:
        """Returns what `publish` would, of an output that was complete before; every rank calls it."""
        summary, outputs = RunSummary(), None
        if self.writer is not None and self.writer.manifest is not None:
            summary = self.writer.manifest.summary()
            outputs = self.writer.stored_outputs() if collect else None
        summary, outputs = self._from_first(summary, outputs)
        return summary, outputs or []

    def _from_first(self, summary: RunSummary, outputs: Outputs | None) -> tuple[RunSummary, Outputs | None]:
        """What the first rank gives."""
        world = self._context.world
        if world.size == 1:
            return summary, outputs
        counts, pairs = world.all_gather_object([summary.to_dict(), outputs if self._context.rank == 0 else None])[0]
        return RunSummary.from_dict(counts), None if pairs is None else [(index, ids) for index, ids in pairs]


def open_batch_job(
    context: ParallelContext,
    output: str | os.PathLike[str],
    identity: Callable[[], dict[str, Any]],
    facts: Mapping[str, Any],
    resume: bool | Literal["auto"],
    repeatable: bool,
    needs_ids: bool,
) -> BatchJob:
    """Opens the output of a run on rank 0, and tells all ranks; see `predict.open_job`.

    Args:
        context: this process.
        output: the output file; empty for none.
        identity: gives what the rows depend on; called on rank 0 only.
        facts: what this run chose itself, equal on all ranks.
        resume: ``predict.resume``.
        repeatable: see `predict.open_job`.
        needs_ids: see `predict.open_job`.

    Raises:
        ValueError: see `predict.open_job`; on other ranks a `PeerError`.
        OSError: the journal cannot be made; on other ranks a `PeerError`.
    """
    job: OutputJob | None = None
    with failing_together(context):
        if output and context.rank == 0:
            job = open_job(output, identity(), facts, resume, repeatable=repeatable, needs_ids=needs_ids)
    return BatchJob(context, job, bool(output), facts)

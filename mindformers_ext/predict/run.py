"""Runs records through a model: tokenised, answered in batches, and their rows written as they are finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mindformers_ext.predict.finished import FinishedRecords, record_hash
from mindformers_ext.predict.generating import GenerationTask
from mindformers_ext.predict.isolation import Answerer, Decode, Job
from mindformers_ext.predict.progress import Progress
from mindformers_ext.predict.records import Record, RecordError
from mindformers_ext.predict.refill import Refill, answer_refilled
from mindformers_ext.predict.rows import error_row
from mindformers_ext.predict.stop import JobStoppedError
from mindformers_ext.predict.summary import RunSummary
from mindformers_ext.predict.task import Task
from mindformers_ext.predict.tokenizer import Tokenizer
from mindformers_ext.predict.window import windowed


@dataclass(frozen=True)
class RunResult:
    """`outputs` holds what `Task.outputs` gave of every record answered now, in input order, if collected."""

    outputs: list[tuple[int, Any]]
    summary: RunSummary


class RecordWriter(Protocol):
    """Where the rows of finished records go, in the order in which they are finished."""

    def write(self, index: int, content: int, rows: Sequence[dict[str, Any]]) -> None:
        """Takes the rows of record `index`, whose content has the hash `content`."""


def stop_alone(reason: JobStoppedError | None) -> None:
    """The agreement of one process: raises what it is given."""
    if reason is not None:
        raise reason


def run_generation(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    decode: Decode,
    writer: RecordWriter | None = None,
    *,
    max_new_tokens: int,
    max_length: int | None = None,
    vocab_size: int | None = None,
    num_sequences: int = 1,
    skip_special_tokens: bool = True,
    **options: Any,
) -> RunResult:
    """Lets a model go on with the prompt of every record; see `run_records`.

    Args:
        records: see there.
        tokenizer: makes ids of prompts and text of new ids.
        decode: takes the ids of prompts and returns a `Completion` for each of the `num_sequences` answers.
        writer: see there.
        max_new_tokens: new ids a record may get; with its prompt they must fit into `max_length`.
        max_length: positions the model has; None for no limit.
        vocab_size: ids the model has; a prompt with another id is an error. None for no limit.
        num_sequences: answers to each record.
        skip_special_tokens: leave special tokens out of the text.
        **options: further arguments of `run_records`.

    Raises:
        ValueError: batch_size or max_new_tokens below 1.
        JobStoppedError: see `run_records`.
        OSError: see there.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    task = GenerationTask(tokenizer, max_new_tokens, max_length, vocab_size, num_sequences, skip_special_tokens)
    return run_records(records, task, decode, writer, num_sequences=num_sequences, **options)


def run_records(
    records: Iterable[Record],
    task: Task,
    decode: Decode,
    writer: RecordWriter | None = None,
    *,
    batch_size: int,
    num_sequences: int = 1,
    progress: bool = False,
    total: int | None = None,
    collect: bool = True,
    finished: FinishedRecords | None = None,
    num_errors: int = 0,
    on_error: Literal["record", "abort"] = "record",
    max_errors: int | None = None,
    prepare: Callable[[], None] | None = None,
    agree: Callable[[JobStoppedError | None], None] = stop_alone,
    refill: Refill | None = None,
) -> RunResult:
    """Answers every record and writes its rows as soon as they are known.

    A record that cannot be answered becomes an error row and the run goes on. A batch whose `decode` raises is tried
    again in halves, so that only the record at fault is lost. Reads ahead by a few batches at most, and answers prompts
    of like length together; no answer depends on that.

    Args:
        records: see `normalize_input`.
        task: what is done with them.
        decode: takes what `task` asks the model for at most `batch_size` records, and the indices of these; returns
            the answers in that order, `num_sequences` for each. RuntimeError, ValueError and FloatingPointError mean
            that some record of the batch is at fault, and where memory ran out that the batch did not fit; any other
            exception ends the run.
        writer: takes the rows; None on ranks that do not write.
        batch_size: records in one call of `decode`.
        num_sequences: answers to each record.
        progress: show a progress bar on a terminal, else log lines.
        total: number of records if known, for the time that is left.
        collect: keep the output of every record for the result; False keeps none, so a run's memory has a bound.
        finished: records that are passed over, as long as their content is the same.
        num_errors: how many of those have an error; they count in `max_errors`.
        on_error: `abort` stops the run at a record that cannot be answered, which is not written then.
        max_errors: stops the run once so many records have an error; None for no limit.
        prepare: is called once, before the first batch; not at all if there is none.
        agree: is called after each batch, on all processes of the job, with what stopped this one, or None. Raises
            `JobStoppedError` on all of them if any was stopped.
        refill: answers records one by one, the next as soon as there is room; `decode` then answers only what failed.
            None answers batch after batch.

    Raises:
        ValueError: batch_size below 1.
        JobStoppedError: the run ended early; see `on_error`, `max_errors` and `agree`, or the writer stopped it.
        OSError: the input cannot be read on.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    answerer = Answerer(decode, batch_size, num_sequences)
    emitter = _Emitter(task, writer, collect, on_error, max_errors, num_errors)
    agree(emitter.too_many_errors())
    start = time.perf_counter()
    with Progress(progress, total) as bar:

        def jobs() -> Iterator[Job]:
            for record in records:
                content = record_hash(record) if writer is not None or finished is not None else 0
                if finished is not None and finished.has(record.index, content):
                    emitter.summary.num_resumed += 1
                    bar.update(1, emitter.summary)
                    continue
                yield task.prepare(record, content)

        def emit(done: list[Job]) -> None:
            agree(emitter.emit(done))
            bar.update(len(done), emitter.summary)

        batches = _batches(jobs(), batch_size, prepare)
        if refill is not None:
            answer_refilled(batches, refill, answerer, emit)
        else:
            for batch in batches:
                if batch[0].error is None:
                    answerer.answer(batch)
                emit(batch)
    emitter.summary.wall_seconds = time.perf_counter() - start
    emitter.outputs.sort(key=lambda output: output[0])
    return RunResult(emitter.outputs, emitter.summary)


def _batches(jobs: Iterator[Job], batch_size: int, prepare: Callable[[], None] | None) -> Iterator[list[Job]]:
    """Reads on as far as batches are asked for; calls `prepare` before the first one that can be answered."""
    for batch in windowed(jobs, batch_size):
        if prepare is not None and batch[0].error is None:
            prepare()
            prepare = None
        yield batch


@dataclass
class _Emitter:
    """Makes rows of what is finished, counts and writes them, and says when there are too many errors."""

    task: Task
    writer: RecordWriter | None
    collect: bool
    on_error: Literal["record", "abort"]
    max_errors: int | None
    num_errors: int

    def __post_init__(self) -> None:
        self.outputs: list[tuple[int, Any]] = []
        self.summary = RunSummary()

    def emit(self, jobs: Sequence[Job]) -> JobStoppedError | None:
        """Writes the rows of a batch; returns why the run stops here, None if it goes on."""
        reason: JobStoppedError | None = None
        try:
            for job in jobs:
                if job.error is None:
                    self._answered(job)
                elif self.on_error == "record":
                    self._failed(job, job.error)
                elif reason is None:
                    error = job.error
                    reason = JobStoppedError(
                        f"record {job.record.index} has an error ({error.type}: {error.message}), and predict.on_error "
                        "is abort; record goes on past it"
                    )
        except JobStoppedError as stopped:  # the writer is on one process, and all of them have to know
            return stopped
        return reason or self.too_many_errors()

    def too_many_errors(self) -> JobStoppedError | None:
        """Why a run has to stop that has so many errors, None if it has not."""
        if self.max_errors is None or self.num_errors < self.max_errors:
            return None
        return JobStoppedError(
            f"{self.num_errors} records have an error, predict.max_errors is {self.max_errors}; a higher one goes on"
        )

    def _failed(self, job: Job, error: RecordError) -> None:
        self.num_errors += 1
        self._write(job, [error_row(job.record, error, self.task.names)])
        self.summary.add_error(error)

    def _answered(self, job: Job) -> None:
        if self.writer is not None:
            self._write(job, self.task.rows(job))
        self.task.count(job, self.summary)
        if self.collect:
            self.outputs += self.task.outputs(job)

    def _write(self, job: Job, rows: Sequence[dict[str, Any]]) -> None:
        if self.writer is not None:
            self.writer.write(job.record.index, job.content, rows)

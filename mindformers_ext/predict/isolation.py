"""Answers a batch, and finds the record at fault in one that fails."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mindformers_ext.predict.records import ErrorType, Record, RecordError

logger = logging.getLogger(__name__)

# Takes what a task makes of some records and the indices of these; returns what the model says of them, in that order.
Decode: TypeAlias = Callable[[list[Any], list[int]], list[Any]]

_MAX_MESSAGE = 500
_MAX_LOGGED_FAILURES = 5
# What a record or its batch can bring about. Any other exception is a mistake of the program.
FAULTS_OF_RECORDS = (RuntimeError, FloatingPointError, MemoryError, ValueError)
# How MindSpore, its allocators and C++ say it.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|bad_alloc|(memory|malloc)\w* (is )?not enough|not enough memory|"
    r"(alloc\w*|malloc)\b.{0,40}\bfail|fail\w*\b.{0,40}\balloc",
    re.IGNORECASE,
)


class BatchError(RuntimeError):
    """A batch failed; all processes of a job raise the same one.

    Attributes:
        error: what the record at fault gets.
    """

    def __init__(self, error: RecordError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass
class Job:
    """A record on its way: with ids when it can be answered, then with answers or an error.

    Attributes:
        record: the record.
        prompt_ids: of its prompt.
        error: why it has no answer.
        content: hash of the record, 0 where nobody asks for it.
        answers: what the model says: a `Completion` for each sequence that was asked for, or what another task takes.
    """

    record: Record
    prompt_ids: list[int]
    error: RecordError | None
    content: int = 0
    answers: list[Any] = field(default_factory=list)

    @property
    def prompt(self) -> Any:
        """What the model is asked."""
        return self.prompt_ids


def fault_of(error: BaseException) -> RecordError:
    """Returns what a record gets whose batch raised `error`: `oom` if memory ran out, else `forward`."""
    if isinstance(error, BatchError):
        return error.error
    return described_fault(type(error).__name__, str(error))


def described_fault(kind: str, message: str) -> RecordError:
    """Returns what a record gets whose batch raised an exception of class `kind` with this message."""
    oom = kind == MemoryError.__name__ or _OUT_OF_MEMORY.search(message) is not None
    error_type: ErrorType = "oom" if oom else "forward"
    return RecordError(error_type, f"{kind}: {first_line(message) or kind}")


def sentence(error: BaseException) -> str:
    """The first line of an exception's message."""
    return first_line(str(error)) or type(error).__name__


def first_line(message: str) -> str:
    """The first line that is not blank; device errors bring pages of stack traces."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:_MAX_MESSAGE] if lines else ""


class Answerer:
    """Answers batches; one that fails is tried again in halves, so that only the record at fault is lost.

    Where memory ran out, batches are no larger than the half of the one that failed from then on.

    Attributes:
        batch_size: prompts that go to `decode` at once.
    """

    def __init__(self, decode: Decode, batch_size: int, num_sequences: int) -> None:
        """See `run_generation` for the arguments."""
        self.batch_size = batch_size
        self._decode = decode
        self._num_sequences = num_sequences
        self._num_logged = 0
        self._traced = False

    def answer(self, jobs: Sequence[Job]) -> None:
        """Gives each job answers, or an error.

        Raises:
            RuntimeError: `decode` returned too many answers, or too few.
        """
        size = self.batch_size
        if len(jobs) > size:
            for start in range(0, len(jobs), size):
                self.answer(jobs[start : start + size])
            return
        failure: RecordError | None = None
        try:
            answers = self._decode([job.prompt for job in jobs], [job.record.index for job in jobs])
        except FAULTS_OF_RECORDS as error:
            failure = fault_of(error)
            self.log(jobs, failure, error)
        # Out of the except block: the traceback holds the failed step's tensors, which the retry may need room for.
        if failure is None:
            self.share_out(jobs, answers)
        else:
            self.retry(jobs, failure)

    def retry(self, jobs: Sequence[Job], failure: RecordError) -> None:
        """Gives the jobs of a batch that failed answers, or an error."""
        if len(jobs) == 1:
            jobs[0].error = failure
            return
        middle = len(jobs) // 2
        if failure.type == "oom":
            self.batch_size = middle
            logger.warning("out of memory: batches have at most %d prompts from now on", middle)
        self.answer(jobs[:middle])
        self.answer(jobs[middle:])

    def share_out(self, jobs: Sequence[Job], answers: list[Any]) -> None:
        """Gives each job its answers.

        Raises:
            RuntimeError: there are too many, or too few.
        """
        each = self._num_sequences
        if len(answers) != each * len(jobs):
            raise RuntimeError(f"decode returned {len(answers)} answers for {len(jobs)} prompts, not {each} for each")
        for index, job in enumerate(jobs):
            job.answers = answers[each * index : each * (index + 1)]

    def log(self, jobs: Sequence[Job], failure: RecordError, error: Exception) -> None:
        """Writes a line about a batch that failed, unless there were many of them."""
        self._num_logged += 1
        if self._num_logged > _MAX_LOGGED_FAILURES:
            return
        indices = ", ".join(str(job.record.index) for job in jobs)
        retry = "; trying again in halves" if len(jobs) > 1 else ""
        # One traceback, which shows whether it is a record or the program. A model without finite scores needs none.
        trace = None if self._traced or failure.message.startswith(FloatingPointError.__name__) else error
        self._traced = self._traced or trace is not None
        logger.warning("records %s: %s: %s%s", indices, failure.type, failure.message, retry, exc_info=trace)
        if self._num_logged == _MAX_LOGGED_FAILURES:
            logger.warning("further failures are not logged; every error row has its message")

"""Runs records through a model: tokenised, answered in batches, written in input order, one row each."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from tqdm import tqdm  # type: ignore[import-untyped]

from mindformers_ext.predict.completion import Completion
from mindformers_ext.predict.records import ErrorType, Record, RecordError
from mindformers_ext.predict.rows import answer_row, error_row
from mindformers_ext.predict.summary import RunSummary
from mindformers_ext.predict.text import answer_text
from mindformers_ext.predict.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Records that wait for their turn, as a multiple of the batch size: only a rain of error records reaches it.
_MAX_WAITING = 4
_MAX_MESSAGE = 500
_MAX_LOGGED_FAILURES = 5
# What a record or its batch can bring about. Any other exception is a mistake of the program.
_FAULTS_OF_RECORDS = (RuntimeError, FloatingPointError, MemoryError, ValueError)


@dataclass(frozen=True)
class RunResult:
    """`outputs` holds (sample_idx, prompt ids + new ids) of every answered record, in input order, if collected."""

    outputs: list[tuple[int, list[int]]]
    summary: RunSummary


Decode: TypeAlias = Callable[[list[list[int]], list[int]], list[Completion]]


class RowWriter(Protocol):
    """Where rows go."""

    def write(self, row: dict[str, Any]) -> None:
        """Takes the next row."""


@dataclass
class _Job:
    """A record on its way: with ids when it can be answered, then with completions or an error."""

    record: Record
    prompt_ids: list[int]
    error: RecordError | None
    completions: list[Completion] = field(default_factory=list)


def run_generation(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    decode: Decode,
    writer: RowWriter | None = None,
    *,
    batch_size: int,
    max_new_tokens: int,
    max_length: int | None = None,
    vocab_size: int | None = None,
    num_sequences: int = 1,
    skip_special_tokens: bool = True,
    progress: bool = False,
    total: int | None = None,
    collect: bool = True,
) -> RunResult:
    """Answers every record and writes its row, or its `num_sequences` rows, in input order, as soon as its turn comes.

    A record that cannot be answered becomes an error row and the run goes on. A batch whose `decode` raises is tried
    again in halves, so that only the record at fault is lost. Reads ahead by a few batches at most.

    Args:
        records: see `normalize_input`.
        tokenizer: makes ids of prompts and text of new ids.
        decode: takes the ids of at most `batch_size` prompts and the indices of their records, and returns the
            completions in that order, `num_sequences` for each prompt. RuntimeError, ValueError and FloatingPointError
            mean that some record of the batch is at fault, `MemoryError` that the batch did not fit; any other
            exception ends the run.
        writer: takes the rows; None on ranks that do not write.
        batch_size: prompts in one call of `decode`.
        max_new_tokens: new ids a record may get; with its prompt they must fit into `max_length`.
        max_length: positions the model has; None for no limit.
        vocab_size: ids the model has; a prompt with another id is an error. None for no limit.
        num_sequences: answers to each record.
        skip_special_tokens: leave special tokens out of the text.
        progress: show a progress bar on stderr.
        total: number of records if known, for the bar.
        collect: keep the ids of every record for the result; False keeps none, so a run's memory has a bound.

    Raises:
        ValueError: batch_size or max_new_tokens below 1.
        OSError: the input cannot be read on, or the output cannot be written.
    """
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    run = _Run(tokenizer, decode, writer, num_sequences, skip_special_tokens, collect)
    start = time.perf_counter()
    waiting: list[_Job] = []
    num_ready = 0
    with _progress_bar(progress, total) as bar:
        for record in records:
            job = _tokenize(record, tokenizer, max_new_tokens, max_length, vocab_size)
            waiting.append(job)
            num_ready += job.error is None
            # An error with no answer before it has its turn now.
            if num_ready in (0, batch_size) or len(waiting) >= _MAX_WAITING * batch_size:
                run.finish(waiting)
                bar.update(len(waiting))
                waiting, num_ready = [], 0
        run.finish(waiting)
        bar.update(len(waiting))
    run.summary.wall_seconds = time.perf_counter() - start
    return RunResult(run.outputs, run.summary)


def _progress_bar(progress: bool, total: int | None) -> tqdm[Any]:
    interval = 0.2 if sys.stderr.isatty() else 30.0  # a log file needs no animation
    return tqdm(desc="predict", unit="record", total=total, disable=not progress, file=sys.stderr, mininterval=interval)


def _tokenize(
    record: Record, tokenizer: Tokenizer, max_new_tokens: int, max_length: int | None, vocab_size: int | None
) -> _Job:
    if record.prompt is None:
        return _Job(record, [], record.error or RecordError("schema", "the record has no prompt"))
    try:
        ids = tokenizer.encode(record.prompt, record.add_special_tokens)
    except Exception as error:  # whatever one text does to the tokenizer must not end the run
        return _Job(record, [], RecordError("tokenize", _sentence(error)))
    if not ids:
        return _Job(record, [], RecordError("tokenize", "the prompt gives no tokens"))
    if vocab_size is not None and max(ids) >= vocab_size:
        message = f"token id {max(ids)} is beyond the model's vocabulary of {vocab_size}"
        return _Job(record, [], RecordError("tokenize", message))
    if max_length is not None and len(ids) + max_new_tokens > max_length:
        message = f"{len(ids)} prompt tokens + max_new_tokens {max_new_tokens} exceed the model's length {max_length}"
        return _Job(record, [], RecordError("too_long", message))
    return _Job(record, ids, None)


class _Run:
    """The state of one run: what was answered and how to answer more."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        decode: Decode,
        writer: RowWriter | None,
        num_sequences: int,
        skip_special_tokens: bool,
        collect: bool,
    ) -> None:
        self.outputs: list[tuple[int, list[int]]] = []
        self.summary = RunSummary()
        self._tokenizer = tokenizer
        self._decode = decode
        self._writer = writer
        self._num_sequences = num_sequences
        self._skip_special_tokens = skip_special_tokens
        self._collect = collect
        self._num_logged = 0
        self._traced = False

    def finish(self, jobs: list[_Job]) -> None:
        """Answers those of `jobs` that have ids and emits all of them."""
        self._answer([job for job in jobs if job.error is None])
        for job in jobs:
            self._emit(job)

    def _answer(self, batch: list[_Job]) -> None:
        if not batch:
            return
        failure: RecordError | None = None
        try:
            completions = self._decode([job.prompt_ids for job in batch], [job.record.index for job in batch])
        except _FAULTS_OF_RECORDS as error:
            kind: ErrorType = "oom" if isinstance(error, MemoryError) else "forward"
            failure = RecordError(kind, f"{type(error).__name__}: {_sentence(error)}")
            self._log_failure(batch, failure, error)
        # Out of the except block: the traceback holds the failed step's tensors, which the retry may need room for.
        if failure is None:
            each = self._num_sequences
            if len(completions) != each * len(batch):
                raise RuntimeError(
                    f"decode returned {len(completions)} completions for {len(batch)} prompts, not {each} for each"
                )
            for index, job in enumerate(batch):
                job.completions = completions[each * index : each * (index + 1)]
        elif len(batch) == 1:
            batch[0].error = failure
        else:
            middle = len(batch) // 2
            self._answer(batch[:middle])
            self._answer(batch[middle:])

    def _log_failure(self, batch: list[_Job], failure: RecordError, error: Exception) -> None:
        self._num_logged += 1
        if self._num_logged > _MAX_LOGGED_FAILURES:
            return
        indices = ", ".join(str(job.record.index) for job in batch)
        retry = "; trying again in halves" if len(batch) > 1 else ""
        # One traceback, which shows whether it is a record or the program. A model without finite scores needs none.
        trace = None if self._traced or isinstance(error, FloatingPointError) else error
        self._traced = self._traced or trace is not None
        logger.warning("records %s: %s: %s%s", indices, failure.type, failure.message, retry, exc_info=trace)
        if self._num_logged == _MAX_LOGGED_FAILURES:
            logger.warning("further failures are not logged; every error row has its message")

    def _emit(self, job: _Job) -> None:
        if not job.completions:
            error = job.error or RecordError("forward", "no completion")
            self.summary.add_error(error)
            if self._writer is not None:
                self._writer.write(error_row(job.record, error))
            return
        self.summary.add_answer(len(job.prompt_ids))
        for index, completion in enumerate(job.completions):
            new_ids = [int(token) for token in completion.token_ids]  # a foreign model may give numpy's
            self.summary.add_sequence(len(new_ids), completion.finish_reason)
            if self._collect:
                self.outputs.append((job.record.index, job.prompt_ids + new_ids))
            if self._writer is not None:
                text = answer_text(
                    self._tokenizer, job.prompt_ids, new_ids, completion.stop_position, self._skip_special_tokens
                )
                sequence = index if self._num_sequences > 1 else None
                self._writer.write(answer_row(job.record, job.prompt_ids, new_ids, text, completion, sequence))


def _sentence(error: BaseException) -> str:
    """The first line of an exception's message; device errors bring pages of stack traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:_MAX_MESSAGE] if lines else type(error).__name__

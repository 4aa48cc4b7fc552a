"""Runs records through a model: tokenised, answered in batches, written in input order, one row each."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from tqdm import tqdm  # type: ignore[import-untyped]

from mindformers_ext.predict.records import ErrorType, Record, RecordError
from mindformers_ext.predict.rows import answer_row, error_row
from mindformers_ext.predict.summary import RunSummary
from mindformers_ext.predict.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Records that wait for their turn, as a multiple of the batch size: only a rain of error records reaches it.
_MAX_WAITING = 4
_MAX_MESSAGE = 500
_MAX_LOGGED_FAILURES = 5


@dataclass(frozen=True)
class Completion:
    """What the model adds to one prompt: the new ids only, with the EOS that ended it."""

    token_ids: list[int]
    finish_reason: Literal["eos", "length", "stop"]


@dataclass(frozen=True)
class RunResult:
    """`outputs` holds (sample_idx, prompt ids + new ids) of every answered record, in input order."""

    outputs: list[tuple[int, list[int]]]
    summary: RunSummary


Decode: TypeAlias = Callable[[list[list[int]], list[int]], list[Completion]]


class RowWriter(Protocol):
    """Where rows go."""

    def write(self, row: dict[str, Any]) -> None:
        """Takes the next row."""


@dataclass
class _Job:
    """A record on its way: with ids when it can be answered, then with a completion or an error."""

    record: Record
    prompt_ids: list[int]
    error: RecordError | None
    completion: Completion | None = None


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
    skip_special_tokens: bool = True,
    progress: bool = False,
    total: int | None = None,
) -> RunResult:
    """Answers every record and writes exactly one row for each, in input order, as soon as its turn comes.

    A record that cannot be answered becomes an error row and the run goes on. A batch whose `decode` raises is tried
    again in halves, so that only the record at fault is lost. Reads ahead by a few batches at most.

    Args:
        records: see `normalize_input`.
        tokenizer: makes ids of prompts and text of new ids.
        decode: takes the ids of at most `batch_size` prompts and the indices of their records, and returns the
            completions in that order. An exception means that some record of the batch is at fault; `MemoryError`
            that the batch did not fit.
        writer: takes the rows; None on ranks that do not write.
        batch_size: prompts in one call of `decode`.
        max_new_tokens: new ids a record may get; with its prompt they must fit into `max_length`.
        max_length: positions the model has; None for no limit.
        vocab_size: ids the model has; a prompt with another id is an error. None for no limit.
        skip_special_tokens: leave special tokens out of the text.
        progress: show a progress bar on stderr.
        total: number of records if known, for the bar.

    Raises:
        ValueError: batch_size or max_new_tokens below 1.
        OSError: the input cannot be read on, or the output cannot be written.
    """
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    run = _Run(tokenizer, decode, writer, skip_special_tokens)
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
        ids = tokenizer.encode(record.prompt)
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
        self, tokenizer: Tokenizer, decode: Decode, writer: RowWriter | None, skip_special_tokens: bool
    ) -> None:
        self.outputs: list[tuple[int, list[int]]] = []
        self.summary = RunSummary()
        self._tokenizer = tokenizer
        self._decode = decode
        self._writer = writer
        self._skip_special_tokens = skip_special_tokens
        self._num_logged = 0

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
        except Exception as error:
            kind: ErrorType = "oom" if isinstance(error, MemoryError) else "forward"
            failure = RecordError(kind, f"{type(error).__name__}: {_sentence(error)}")
            self._log_failure(batch, failure, error)
        # Out of the except block: the traceback holds the failed step's tensors, which the retry may need room for.
        if failure is None:
            if len(completions) != len(batch):
                raise RuntimeError(f"decode returned {len(completions)} completions for {len(batch)} prompts")
            for job, completion in zip(batch, completions, strict=True):
                job.completion = completion
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
        # The first with its traceback, which shows whether it is a record or the program.
        trace = error if self._num_logged == 1 else None
        logger.warning("records %s: %s: %s%s", indices, failure.type, failure.message, retry, exc_info=trace)
        if self._num_logged == _MAX_LOGGED_FAILURES:
            logger.warning("further failures are not logged; every error row has its message")

    def _emit(self, job: _Job) -> None:
        if job.completion is None:
            error = job.error or RecordError("forward", "no completion")
            self.summary.add_error(error)
            row = error_row(job.record, error)
        else:
            new_ids = [int(token) for token in job.completion.token_ids]  # a foreign model may give numpy's
            reason = job.completion.finish_reason
            self.summary.add_answer(len(job.prompt_ids), len(new_ids), reason)
            self.outputs.append((job.record.index, job.prompt_ids + new_ids))
            if self._writer is None:
                return
            text = self._tokenizer.decode_new(job.prompt_ids, new_ids, self._skip_special_tokens)
            row = answer_row(job.record, job.prompt_ids, new_ids, text, reason)
        if self._writer is not None:
            self._writer.write(row)


def _sentence(error: BaseException) -> str:
    """The first line of an exception's message; device errors bring pages of stack traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:_MAX_MESSAGE] if lines else type(error).__name__

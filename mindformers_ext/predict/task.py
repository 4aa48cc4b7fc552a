"""What a run does with its records; `run_records` is the same for every task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mindformers_ext.predict.isolation import Job, sentence
from mindformers_ext.predict.records import Record, RecordError
from mindformers_ext.predict.summary import RunSummary
from mindformers_ext.predict.tokenizer import Tokenizer


class Task(Protocol):
    """Makes jobs of records and rows of answers."""

    @property
    def names(self) -> frozenset[str]:
        """Fields of its rows; a user's field of such a name is kept under `record`."""

    def prepare(self, record: Record, content: int) -> Job:
        """Returns the record with what the model is asked, or with an error; `content` is its hash."""

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """Returns the rows of a record that was answered."""

    def count(self, job: Job, summary: RunSummary) -> None:
        """Adds a record that was answered to the counts."""

    def outputs(self, job: Job) -> list[tuple[int, Any]]:
        """Returns what `Trainer.inference` gives for a record that was answered."""


def prompt_ids(record: Record, tokenizer: Tokenizer, vocab_size: int | None) -> list[int] | RecordError:
    """Returns the ids of a record's prompt, or why there are none."""
    if record.prompt is None:
        return record.error or RecordError("schema", "the record has no prompt")
    prompt = record.prompt
    ids = checked_ids(lambda: tokenizer.encode(prompt, record.add_special_tokens), vocab_size)
    if not isinstance(ids, RecordError) and not ids:
        return RecordError("tokenize", "the prompt gives no tokens")
    return ids


def checked_ids(encode: Callable[[], list[int]], vocab_size: int | None) -> list[int] | RecordError:
    """Returns the ids that `encode` gives, or an error where it fails or one is beyond the model's vocabulary."""
    try:
        ids = encode()
    except Exception as error:  # whatever one text does to the tokenizer must not end the run
        return RecordError("tokenize", sentence(error))
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        return RecordError("tokenize", f"token id {max(ids)} is beyond the model's vocabulary of {vocab_size}")
    return ids

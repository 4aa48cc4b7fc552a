"""The rows of the output: one for each record, with the record's own fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindformers_ext.predict.records import Record, RecordError

_OURS = frozenset(
    {
        "sample_idx",
        "generated_ids",
        "generated_text",
        "finish_reason",
        "num_prompt_tokens",
        "num_new_tokens",
        "error",
        "error_type",
        "record",
    }
)


def answer_row(
    record: Record, prompt_ids: Sequence[int], new_ids: Sequence[int], text: str, finish_reason: str
) -> dict[str, Any]:
    """Returns the row of an answered record; `generated_ids` are prompt and new ids, `text` is of the new ones only."""
    return {
        "sample_idx": record.index,
        "generated_ids": [*prompt_ids, *new_ids],
        "generated_text": text,
        **_own_fields(record),
        "finish_reason": finish_reason,
        "num_prompt_tokens": len(prompt_ids),
        "num_new_tokens": len(new_ids),
    }


def error_row(record: Record, error: RecordError) -> dict[str, Any]:
    """Returns the row of a record that has no answer."""
    return {
        "sample_idx": record.index,
        "error": error.message,
        "error_type": error.type,
        **_own_fields(record),
    }


def _own_fields(record: Record) -> dict[str, Any]:
    # The same names move in answers and errors alike, so a user's "error" never looks like ours.
    own = {key: value for key, value in record.fields.items() if key not in _OURS}
    hidden = {key: value for key, value in record.fields.items() if key in _OURS}
    return {**own, "record": hidden} if hidden else own

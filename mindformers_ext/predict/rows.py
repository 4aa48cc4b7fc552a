"""The rows of the output: one for each answer or error, with the record's own fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mindformers_ext.predict.completion import Completion
from mindformers_ext.predict.records import Record, RecordError

# Float32 sums in another order, as of another layout or batch, differ by some 1e-6 of such numbers.
SCORE_DIGITS = 4
# Where rows keep the values of metrics of answers.
ANSWER_METRICS = "answer_metrics"

# Fields of an answer's row. `num_target_tokens` is none of them: it tells rows of scores from answers.
ANSWER_NAMES = frozenset(
    {
        "sample_idx",
        "sequence_idx",
        "generated_ids",
        "generated_text",
        "finish_reason",
        "num_prompt_tokens",
        "num_new_tokens",
        "num_target_tokens",
        "stop_string",
        "sequence_score",
        "logprobs",
        "top_logprobs",
        "error",
        "error_type",
        ANSWER_METRICS,
        "record",
    }
)


def answer_row(
    record: Record,
    prompt_ids: Sequence[int],
    new_ids: Sequence[int],
    text: str,
    completion: Completion,
    sequence: int | None = None,
) -> dict[str, Any]:
    """Returns the row of an answer; its score and log-probabilities are rounded to `SCORE_DIGITS` decimals.

    Args:
        record: what is answered.
        prompt_ids: ids of the prompt.
        new_ids: ids of the answer alone.
        text: text of the answer alone.
        completion: what else is known of the answer; what was not asked for has no key.
        sequence: which of the record's answers it is; None where there is one only.
    """
    row = {
        "sample_idx": record.index,
        **({} if sequence is None else {"sequence_idx": sequence}),
        "generated_ids": [*prompt_ids, *new_ids],
        "generated_text": text,
        **own_fields(record, ANSWER_NAMES),
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(prompt_ids),
        "num_new_tokens": len(new_ids),
    }
    optional = (
        ("stop_string", completion.stop_string),
        ("sequence_score", completion.score),
        ("logprobs", completion.logprobs),
        ("top_logprobs", completion.top_logprobs or None),
    )
    for name, value in optional:
        if value is not None:
            row[name] = rounded(value)
    return row


def error_row(record: Record, error: RecordError, names: Collection[str] = ANSWER_NAMES) -> dict[str, Any]:
    """Returns the row of a record that has no answer; see `own_fields` for `names`."""
    return {
        "sample_idx": record.index,
        "error": error.message,
        "error_type": error.type,
        **own_fields(record, names),
    }


def rounded(value: Any) -> Any:
    """Rounds the floats in lists, tuples or alone; -0.0 becomes 0.0."""
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return round(value, SCORE_DIGITS) + 0.0 if isinstance(value, float) else value


def own_fields(record: Record, names: Collection[str]) -> dict[str, Any]:
    """Returns the user's fields; those with one of these names, which a row has itself, are under `record`."""
    hidden = {key: value for key, value in record.fields.items() if key in names}
    if not hidden:
        return record.fields
    # The same names move in answers and errors alike, so a user's "error" never looks like ours.
    return {key: value for key, value in record.fields.items() if key not in names} | {"record": hidden}


def own_field(row: Mapping[str, Any], name: str) -> Any:
    """Returns a field of the record that a row answers, wherever `own_fields` has put it; None if there is none."""
    return hidden_fields(row).get(name) if name in ANSWER_NAMES else row.get(name)


def hidden_fields(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the record's fields whose names are those of a row's own; see `own_fields`."""
    hidden = row.get("record")
    return hidden if isinstance(hidden, Mapping) else {}

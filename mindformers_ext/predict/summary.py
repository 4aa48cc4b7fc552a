"""What a run did, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindformers_ext.predict.records import RecordError
from mindformers_ext.predict.score_sums import add_score, score_metrics


@dataclass(frozen=True)
class Timings:
    """Where the model's time went; prefill reads prompts, decode makes one token after the other."""

    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int


_COUNTED = {
    "sample_idx": int,
    "generated_ids": list,
    "finish_reason": str,
    "num_prompt_tokens": int,
    "num_new_tokens": int,
}
_COUNTED_OF_ERRORS = {"sample_idx": int, "error_type": str}


def is_row(value: Any) -> bool:
    """Whether a value is a row of an output, with all that `RunSummary.add_row` and a reader of ids need."""
    if not isinstance(value, dict):
        return False
    expected: Mapping[str, type] = _COUNTED
    if "error" in value:
        expected = _COUNTED_OF_ERRORS
    elif is_score(value):
        expected = _counted_of_score(value)
    return all(type(value.get(name)) is kind for name, kind in expected.items())


def _counted_of_score(row: Mapping[str, Any]) -> dict[str, type]:
    """What `score_sums.add_score` reads of a row, by the kind of the row."""
    counted: dict[str, type] = {"sample_idx": int, "num_prompt_tokens": int}
    if "best" in row:
        counted |= {"loglikelihood": list, "num_target_tokens": list}
        return counted | (dict.fromkeys(("acc", "acc_norm", "acc_bytes"), float) if "acc" in row else {})
    counted |= {"loglikelihood": float, "num_target_tokens": int}
    if "is_greedy" in row:
        return counted | {"is_greedy": bool}
    return counted | ({"num_words": int, "num_bytes": int} if "num_words" in row else {})


def is_score(row: Mapping[str, Any]) -> bool:
    """Whether a row that is no error is one of the task `score`."""
    return "num_target_tokens" in row


def row_output(row: Mapping[str, Any]) -> Any:
    """Returns what `Trainer.inference` gives of a row that is no error: ids, or log-likelihoods."""
    return row["loglikelihood"] if is_score(row) else row["generated_ids"]


@dataclass
class RunSummary:
    """Counts of one run. `errors` counts by class, `finish_reasons` counts sequences by the reason why they ended.

    `num_answers` is the number of answered records, and tokens are theirs; `wall_seconds` is from the first record read
    to the last row written; `seed` is that of sampling, None in other modes. `num_resumed` of the records were finished
    by earlier runs of the job. `metrics` is what `AnswerMetrics.result` says of the output, empty without metrics;
    `score_sums` are those of `score_sums.add_score`.
    """

    num_answers: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    new_tokens: int = 0
    wall_seconds: float = 0.0
    seed: int | None = None
    num_resumed: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    score_sums: dict[str, float] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, float | None]:
        """The metrics of the task `score`, see `score_sums.score_metrics`; empty for other tasks."""
        return score_metrics(self.score_sums)

    @property
    def num_errors(self) -> int:
        """How many records have an error instead."""
        return self.errors.total()

    @property
    def num_records(self) -> int:
        """How many records the input had."""
        return self.num_answers + self.num_errors

    def to_dict(self) -> dict[str, Any]:
        """Returns the values as plain data."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunSummary:
        """Returns the summary whose `to_dict` gave `values`."""
        counts: dict[str, Any] = {name: Counter(values[name]) for name in ("errors", "finish_reasons")}
        return cls(**{**values, **counts})

    def add_answer(self, num_prompt_tokens: int) -> None:
        """Counts an answered record."""
        self.num_answers += 1
        self.prompt_tokens += num_prompt_tokens

    def add_sequence(self, num_new_tokens: int, finish_reason: str) -> None:
        """Counts one of an answered record's sequences."""
        self.finish_reasons[finish_reason] += 1
        self.new_tokens += num_new_tokens

    def add_error(self, error: RecordError) -> None:
        """Counts a record without an answer."""
        self.errors[error.type] += 1

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Counts a row of an output."""
        if "error" in row:
            self.errors[row["error_type"]] += 1
            return
        if is_score(row):
            self.add_answer(row["num_prompt_tokens"])
            add_score(self.score_sums, row)
            return
        if row.get("sequence_idx", 0) == 0:
            self.add_answer(row["num_prompt_tokens"])
        self.add_sequence(row["num_new_tokens"], row["finish_reason"])


def format_summary(summary: RunSummary, timings: Timings | None = None) -> list[str]:
    """Returns the closing lines of a run, for the log or the terminal."""
    lines = [
        f"records: {summary.num_records}, answered: {summary.num_answers}{_counts(summary.finish_reasons)}, "
        f"errors: {summary.num_errors}{_counts(summary.errors)}",
        f"tokens: {summary.prompt_tokens} prompt, {summary.new_tokens} new; wall time: {summary.wall_seconds:.1f} s",
    ]
    if summary.scores:
        shown = (f"{name} {'too large' if value is None else f'{value:.4f}'}" for name, value in summary.scores.items())
        lines.append(f"scores: {', '.join(shown)}")
    if summary.num_resumed:
        lines.append(f"resumed: {summary.num_resumed} of these records were finished before")
    if summary.seed is not None:
        lines.append(f"seed of sampling: {summary.seed}; generation.seed: {summary.seed} repeats this run")
    if timings is not None:
        lines.append(
            f"prefill: {_rate(timings.prefill_tokens, timings.prefill_seconds)}, "
            f"decode: {_rate(timings.decode_tokens, timings.decode_seconds)}"
        )
    return lines


def _counts(counter: Counter[str]) -> str:
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))
    return f" ({parts})" if parts else ""


def _rate(tokens: int, seconds: float) -> str:
    rate = f"{tokens / seconds:.1f} tokens/s" if seconds > 0 else "no time measured"
    return f"{rate} ({tokens} tokens in {seconds:.1f} s)"

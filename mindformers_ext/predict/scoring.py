"""The task `score`: how likely the model finds a given continuation, several of them, or the prompt itself."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mindformers_ext.predict.isolation import Job
from mindformers_ext.predict.pairs import Pair, cut_left, encode_pair, prefix_token, rolling_windows
from mindformers_ext.predict.records import Record, RecordError, json_kind
from mindformers_ext.predict.rows import ANSWER_METRICS, own_fields, rounded
from mindformers_ext.predict.score_sums import exponential
from mindformers_ext.predict.summary import RunSummary
from mindformers_ext.predict.task import checked_ids, prompt_ids
from mindformers_ext.predict.tokenizer import Tokenizer

# Fields of a score's row. `generated_ids` and `answer_metrics` are none of them: they tell answers from rows of scores.
SCORE_NAMES = frozenset(
    {
        "sample_idx",
        "loglikelihood",
        "loglikelihood_per_token",
        "loglikelihood_per_byte",
        "token_logprobs",
        "is_greedy",
        "best",
        "best_norm",
        "best_bytes",
        "answer_idx",
        "acc",
        "acc_norm",
        "acc_bytes",
        "nll",
        "perplexity",
        "num_words",
        "num_bytes",
        "num_prompt_tokens",
        "num_target_tokens",
        "generated_ids",
        ANSWER_METRICS,
        "error",
        "error_type",
        "record",
    }
)


class Scored(Protocol):
    """What the model says of one continuation; see `generate.Likelihood`."""

    @property
    def token_logprobs(self) -> list[float]:
        """Log-probability of each token."""

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one."""


@dataclass(frozen=True)
class ScoringOptions:
    """The keys of ``predict`` that the task `score` reads; see docs/scoring.md."""

    target_field: str | None = None
    answer_field: str | None = None
    target_delimiter: str = ""
    truncation: Literal["none", "left"] = "none"
    rolling: bool = False
    token_logprobs: bool = True


@dataclass
class ScoreJob(Job):
    """A record with what is scored of it.

    Attributes:
        pairs: a context and a continuation each: of a target, of every choice, or of the parts of a text.
        targets: texts of the target or the choices; none where the prompt itself is scored.
        has_choices: whether they are choices, among which there may be one only.
        answer: number of the right choice, None if nobody says.
    """

    pairs: list[Pair] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    has_choices: bool = False
    answer: int | None = None

    @property
    def prompt(self) -> list[Pair]:
        """The pairs."""
        return self.pairs


@dataclass(frozen=True)
class ScoringTask:
    """Scores the targets that records name, or their prompts; see `Task`.

    Attributes:
        tokenizer: of the model.
        options: see `ScoringOptions`.
        max_length: tokens that the model reads at most; None for no limit.
        vocab_size: ids the model has; a text with another id is an error. None for no limit.
    """

    tokenizer: Tokenizer
    options: ScoringOptions
    max_length: int | None = None
    vocab_size: int | None = None
    names: frozenset[str] = SCORE_NAMES

    def __post_init__(self) -> None:
        """Finds out that a tokenizer has no prefix token before the first text that needs it."""
        if self.options.rolling:
            prefix_token(self.tokenizer)

    def prepare(self, record: Record, content: int) -> ScoreJob:
        """See `Task`."""
        job = ScoreJob(record, [], None, content)
        job.error = self._prepare_targets(job) if self.options.target_field is not None else self._prepare_text(job)
        return job

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """See `Task`."""
        row = self._row(job)
        if self.options.token_logprobs:
            found = [one.token_logprobs for one in job.answers[0]]
            flat = [value for some in found for value in some]
            row["token_logprobs"] = rounded(found if "best" in row else flat)
        return [row]

    def count(self, job: Job, summary: RunSummary) -> None:
        """See `Task`."""
        summary.add_row(self._row(job))

    def outputs(self, job: Job) -> list[tuple[int, Any]]:
        """Returns (sample_idx, log-likelihood), of choices a list of them."""
        return [(job.record.index, self._row(job)["loglikelihood"])]

    def _prepare_text(self, job: ScoreJob) -> RecordError | None:
        ids = prompt_ids(job.record, self.tokenizer, self.vocab_size)
        if isinstance(ids, RecordError):
            return ids
        if self.options.rolling:
            job.prompt_ids = ids
            job.pairs = rolling_windows(ids, prefix_token(self.tokenizer), self.max_length or len(ids))
            return None
        if len(ids) == 1:
            message = "the prompt gives 1 token, and nothing stands before it; predict.rolling: true scores it too"
            return RecordError("schema", message)
        if self.max_length is not None and len(ids) - 1 > self.max_length:
            message = (
                f"{len(ids)} prompt tokens, of which the last is not read, exceed the model's length "
                f"{self.max_length}; predict.rolling: true scores longer texts"
            )
            return RecordError("too_long", message)
        job.prompt_ids, job.pairs = ids, [(ids[:1], ids[1:])]
        return None

    def _prepare_targets(self, job: ScoreJob) -> RecordError | None:
        record = job.record
        if record.prompt is None:
            return record.error or RecordError("schema", "the record has no prompt")
        targets = self._read_targets(job)
        if isinstance(targets, RecordError):
            return targets
        for number, target in enumerate(targets):
            pair = self._pair(record, target)
            if isinstance(pair, RecordError):
                place = f"choice {number}: " if job.has_choices else ""
                return RecordError(pair.type, place + pair.message)
            job.pairs.append(pair)
        job.targets = targets
        job.prompt_ids = max((context for context, _ in job.pairs), key=len)
        return None

    def _read_targets(self, job: ScoreJob) -> list[str] | RecordError:
        """Takes the targets, and which of them is right, out of the record's fields."""
        name, fields = str(self.options.target_field), job.record.fields
        if name not in fields:
            return RecordError("schema", f"the record has no field {name!r}, which predict.target_field names")
        value = fields[name]
        job.has_choices = isinstance(value, list)
        targets = value if job.has_choices else [value]
        if not targets:
            return RecordError("schema", f"field {name!r} is an empty array")
        for number, target in enumerate(targets):
            place = f"element {number} of field {name!r}" if job.has_choices else f"field {name!r}"
            if not isinstance(target, str):
                wanted = "a string" if job.has_choices else "a string or an array of strings"
                return RecordError("schema", f"{place} must be {wanted}, not {json_kind(target)}")
            if not target:
                return RecordError("schema", f"{place} is empty")
        if self.options.answer_field is not None:
            answer = right_choice(fields, self.options.answer_field, targets if job.has_choices else None)
            if isinstance(answer, RecordError):
                return answer
            job.answer = answer
        return targets

    def _pair(self, record: Record, target: str) -> Pair | RecordError:
        pair: Pair = ([], [])

        def encode() -> list[int]:
            nonlocal pair
            text = self.options.target_delimiter + target
            pair = encode_pair(self.tokenizer, record.prompt or "", text, record.add_special_tokens)
            return pair[0] + pair[1]

        ids = checked_ids(encode, self.vocab_size)
        if isinstance(ids, RecordError):
            return ids
        if self.max_length is None or len(ids) - 1 <= self.max_length:
            return pair
        # A continuation that is too long is so with every truncation.
        if self.options.truncation == "left" or len(pair[1]) > self.max_length:
            try:
                return cut_left(pair, self.max_length)
            except ValueError as error:
                return RecordError("too_long", str(error))
        message = (
            f"{len(pair[0])} prompt tokens + {len(pair[1])} of the target, of which the last is not read, exceed the "
            f"model's length {self.max_length}; predict.truncation: left drops the first ones of the prompt"
        )
        return RecordError("too_long", message)

    def _row(self, job: Job) -> dict[str, Any]:
        """The row of an answered record without the log-probabilities of tokens."""
        assert isinstance(job, ScoreJob)
        found: Sequence[Scored] = job.answers[0]
        totals = [math.fsum(one.token_logprobs) for one in found]
        counts = [len(one.token_logprobs) for one in found]
        if not job.targets:
            values = self._text_values(job, math.fsum(totals), sum(counts))
        elif job.has_choices:
            sizes = [len(target.encode()) for target in job.targets]
            values = {
                "loglikelihood": totals,
                "loglikelihood_per_token": [total / count for total, count in zip(totals, counts, strict=True)],
                "loglikelihood_per_byte": [total / size for total, size in zip(totals, sizes, strict=True)],
                "is_greedy": [one.is_greedy for one in found],
            } | choice_values(totals, job.targets, job.answer)
        else:
            values = {
                "loglikelihood": totals[0],
                "loglikelihood_per_token": totals[0] / counts[0],
                "loglikelihood_per_byte": totals[0] / len(job.targets[0].encode()),
                "is_greedy": found[0].is_greedy,
            }
        return {
            "sample_idx": job.record.index,
            **{name: rounded(value) for name, value in values.items()},
            **own_fields(job.record, SCORE_NAMES),
            "num_prompt_tokens": len(job.prompt_ids),
            "num_target_tokens": counts if job.has_choices else sum(counts),
        }

    def _text_values(self, job: ScoreJob, total: float, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {"loglikelihood": total, **mean_nll(total, count)}
        if self.options.rolling:
            text = job.record.prompt or ""
            values |= {"num_words": len(re.split(r"\s+", text)), "num_bytes": len(text.encode())}
        return values


def right_choice(fields: Mapping[str, Any], name: str, choices: Sequence[str] | None) -> int | RecordError:
    """Returns the number of the right choice, which a field gives or whose text it gives; of equal ones the first.

    Args:
        fields: of the record.
        name: of the field.
        choices: None where the record has a single target.
    """
    if name not in fields:
        return RecordError("schema", f"the record has no field {name!r}, which predict.answer_field names")
    value = fields[name]
    if choices is None:
        return RecordError(
            "schema", f"field {name!r} names the right one of several choices, and the target is a string"
        )
    if isinstance(value, str):
        if value in choices:
            return choices.index(value)
        return RecordError("schema", f"field {name!r} is none of the {len(choices)} choices")
    if isinstance(value, bool) or not isinstance(value, int):
        given = str(value) if isinstance(value, float) else json_kind(value)
        return RecordError("schema", f"field {name!r} must be an integer, or the text of a choice, not {given}")
    if not 0 <= value < len(choices):
        return RecordError("schema", f"field {name!r} is {value}; choices are numbered from 0 to {len(choices) - 1}")
    return value


def choice_values(totals: Sequence[float], choices: Sequence[str], answer: int | None) -> dict[str, Any]:
    """Returns the best choices, and with a right one whether they are it: lm-eval's acc, acc_norm and acc_bytes.

    The best one is that with the highest log-likelihood, or the highest for each character or byte of the choice (the
    delimiter not counted); of equal ones the first.
    """
    characters, sizes = [len(choice) for choice in choices], [len(choice.encode()) for choice in choices]
    best = {
        "best": _best(totals),
        "best_norm": _best([total / count for total, count in zip(totals, characters, strict=True)]),
        "best_bytes": _best([total / size for total, size in zip(totals, sizes, strict=True)]),
    }
    if answer is None:
        return dict(best)
    right = {name.replace("best", "acc"): 1.0 if chosen == answer else 0.0 for name, chosen in best.items()}
    return {**best, "answer_idx": answer, **right}


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda number: values[number])


def mean_nll(loglikelihood: float, num_tokens: int) -> dict[str, float | None]:
    """Returns ``nll``, the mean of -ln p over tokens, and ``perplexity``, its exponential; None beyond float64."""
    nll = -loglikelihood / num_tokens
    return {"nll": nll, "perplexity": exponential(nll)}

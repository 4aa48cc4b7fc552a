"""What a report says of one output, gathered row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindformers_ext.predict.report.correctness import Accuracy, field_of, is_right, row_values
from mindformers_ext.predict.report.excerpts import Excerpt, OwnFields, as_text, excerpt, own_fields
from mindformers_ext.predict.report.reading import BrokenRow, Row
from mindformers_ext.predict.score_sums import add_score
from mindformers_ext.predict.summary import is_score

# What is kept of a file, however large and odd it is.
MAX_NAMES = 10_000
NAME_CHARACTERS = 80
ANSWER_CHARACTERS = 1_000
FIELD_CHARACTERS = 300
MAX_FIELDS = 8
EXAMPLES_OF_AN_ERROR = 3
MAX_BROKEN = 20
OTHERS = "(others)"
MISSING = "(missing)"


@dataclass(frozen=True)
class Choice:
    """What the reader of the report wants to see.

    Attributes:
        reference: the field that holds the right answer; None without one.
        metric: the metric that rows carry by which they are right or wrong; None takes the first, or `reference`.
        by: the fields whose values accuracy is told apart by.
        rows: so many rows are in each table.
    """

    reference: str | None = None
    metric: str | None = None
    by: Sequence[str] = ()
    rows: int = 100

    def value(self, row: Row) -> float | None:
        """Returns how right a row is, 1 if it is; None if nothing tells."""
        if self.reference is not None:
            if is_score(row) and "error" not in row:
                return None
            right = is_right(row, self.reference)
            return None if right is None else float(right)
        values = row_values(row)
        return values.get(self.metric) if self.metric is not None else next(iter(values.values()), None)


@dataclass(frozen=True)
class ShownRow:
    """A row as a table shows it; `value` is that of `Choice.value`, `reference` is None where there is none."""

    name: str
    own: OwnFields
    answer: Excerpt | None
    error: Excerpt | None
    note: str
    value: float | None
    reference: Excerpt | None


@dataclass
class ErrorClass:
    """How many records have an error of one class, and the first of them."""

    count: int = 0
    examples: list[ShownRow] = field(default_factory=list)


class RunFacts:
    """The counts of one output and the rows that are shown of it.

    Attributes:
        records: how many records the rows belong to.
        rows: how many there are; more where a record has several answers.
        answered: records without an error.
        prompt_lengths: records by the tokens of their prompt.
        new_lengths: answers by their tokens.
        target_lengths: scored targets, choices and texts by their tokens.
        score_sums: of scores, see `score_sums.add_score`.
        finish_reasons: answers by the reason why they ended.
        errors: by class.
        accuracy: of all rows that can be judged.
        metric: the name of the first metric that rows carry, empty without one.
        groups: accuracy by field and value.
        first: the first rows.
        wrong: the first wrong ones, whose value is 0; `num_wrong` counts all.
        broken: the first places without a row; `num_broken` counts all.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.records = self.rows = self.answered = self.num_broken = self.num_wrong = 0
        self.prompt_lengths: Counter[int] = Counter()
        self.new_lengths: Counter[int] = Counter()
        self.target_lengths: Counter[int] = Counter()
        self.score_sums: dict[str, float] = {}
        self.finish_reasons: Counter[str] = Counter()
        self.errors: dict[str, ErrorClass] = {}
        self.accuracy = Accuracy()
        self.metric = ""
        self.groups: dict[str, dict[str, Accuracy]] = {name: {} for name in choice.by}
        self.first: list[ShownRow] = []
        self.wrong: list[ShownRow] = []
        self.broken: list[BrokenRow] = []
        self.field_names: set[str] = set()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all answered records' prompts."""
        return sum(length * count for length, count in self.prompt_lengths.items())

    @property
    def new_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(length * count for length, count in self.new_lengths.items())

    @property
    def num_errors(self) -> int:
        """How many records have an error."""
        return self.records - self.answered

    def add_broken(self, broken: BrokenRow) -> None:
        """Takes note of a place where a row should be."""
        self.num_broken += 1
        if len(self.broken) < MAX_BROKEN:
            self.broken.append(broken)

    def add(self, row: Row) -> None:
        """Counts a row, and keeps what will be shown of it."""
        self.rows += 1
        if len(self.field_names) < MAX_NAMES:
            self.field_names.update(name[:NAME_CHARACTERS] for name in [*row, *row_values(row)])
        first_of_record = row.get("sequence_idx", 0) == 0
        self.records += first_of_record
        value = self._choice.value(row)
        if value is not None:
            self._judge(row, value)
        if "error" in row:
            self._add_error(row)
        else:
            self.answered += first_of_record
            if first_of_record:
                self.prompt_lengths[row["num_prompt_tokens"]] += 1
            self._add_score(row) if is_score(row) else self._add_answer(row)
        if len(self.first) < self._choice.rows:
            self.first.append(self._shown(row, value))
        if value == 0 and len(self.wrong) < self._choice.rows:
            self.wrong.append(self._shown(row, value))

    def check_choice(self, path: str) -> None:
        """Refuses fields that no row has, and a reference for rows of scores, which have no text to compare with it.

        Raises:
            ValueError: names the field, and those that there are.
        """
        if self._choice.reference is not None and self.score_sums:
            raise ValueError(
                f"{path}: --reference is compared with answers, and these rows are scores; leave it out, and the "
                "accuracy that they carry is shown, or choose one with --metric"
            )
        asked = [("--reference", self._choice.reference), ("--metric", self._choice.metric)]
        names = [(flag, name, self.accuracy.total > 0) for flag, name in asked if name is not None]
        if self._choice.by and not self.accuracy.total:
            raise ValueError(f"{path}: nothing tells which rows are right; --reference names a field with the answer")
        names += [("--by", name, bool(set(groups) - {MISSING})) for name, groups in self.groups.items()]
        for flag, name, is_there in names:
            if not is_there:
                there = ", ".join(sorted(self.field_names)[:20])
                raise ValueError(f"{path}: no row has a field {name!r} for {flag}; there are {there}")

    def _judge(self, row: Row, judgement: float) -> None:
        self.accuracy.add(judgement)
        self.num_wrong += judgement == 0
        self.metric = self.metric or next(iter(row_values(row)), "")[:NAME_CHARACTERS]
        for name, groups in self.groups.items():
            value = field_of(row, name)
            key = _key(groups, MISSING if value is None else as_text(value))
            groups.setdefault(key, Accuracy()).add(judgement)

    def _add_answer(self, row: Row) -> None:
        self.new_lengths[row["num_new_tokens"]] += 1
        self.finish_reasons[_key(self.finish_reasons, row["finish_reason"])] += 1

    def _add_score(self, row: Row) -> None:
        add_score(self.score_sums, row)
        lengths = row["num_target_tokens"]
        self.target_lengths.update(lengths if isinstance(lengths, list) else [lengths])

    def _add_error(self, row: Row) -> None:
        found = self.errors.setdefault(_key(self.errors, row["error_type"]), ErrorClass())
        found.count += 1
        if len(found.examples) < EXAMPLES_OF_AN_ERROR:
            found.examples.append(self._shown(row, None))

    def _shown(self, row: Row, value: float | None) -> ShownRow:
        reference = None if self._choice.reference is None else field_of(row, self._choice.reference)
        return ShownRow(
            name=row_name(row),
            own=own_fields(row, MAX_FIELDS, FIELD_CHARACTERS),
            answer=None if "error" in row else excerpt(answer_text(row), ANSWER_CHARACTERS),
            error=excerpt(row["error"], FIELD_CHARACTERS) if "error" in row else None,
            note=_note(row),
            value=value,
            reference=None if reference is None else excerpt(reference, FIELD_CHARACTERS),
        )


def row_name(row: Row) -> str:
    """How a page calls a row: the index of its record, and which of several answers it is."""
    index = str(row["sample_idx"])
    return f"{index}.{row['sequence_idx']}" if "sequence_idx" in row else index


def answer_text(row: Row) -> str:
    """What the model said in a row without an error: its text, or how likely it found the targets."""
    if not is_score(row):
        return as_text(row.get("generated_text", ""))
    chosen = f"choice {row['best']}, " if "best" in row else ""
    return f"{chosen}log-likelihood {as_text(row['loglikelihood'])}"


def _note(row: Row) -> str:
    """How an answer ended and how long it is."""
    if "error" in row:
        return "error"
    if is_score(row):
        return f"{as_text(row['num_target_tokens'])} tokens"
    return f"{row['finish_reason'][:NAME_CHARACTERS]}, {row['num_new_tokens']:,} new tokens"


def _key(known: Mapping[str, Any], name: str) -> str:
    """The name under which something is counted: cut, and one for all that come after `MAX_NAMES` others."""
    name = name[:NAME_CHARACTERS]
    return name if name in known or len(known) < MAX_NAMES else OTHERS

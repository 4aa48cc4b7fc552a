"""What became of each record in another run: rows of two outputs side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mindformers_ext.predict.report.collect import FIELD_CHARACTERS, MAX_FIELDS, Choice, answer_text, row_name
from mindformers_ext.predict.report.excerpts import Excerpt, OwnFields, as_text, excerpt, own_fields
from mindformers_ext.predict.report.reading import BrokenRow, Row
from mindformers_ext.predict.summary import is_score

BEFORE_CHARACTERS = 60
AFTER_CHARACTERS = 200
# Log-likelihoods that differ by less are the same: float32 sums in another order do.
SCORE_TOLERANCE = 1e-3

Kind: TypeAlias = Literal[
    "same",
    "other tokens",
    "other text",
    "other end",
    "other choice",
    "other score",
    "other task",
    "other prompt",
    "other error",
    "error in A only",
    "error in B only",
    "only in A",
    "only in B",
]


@dataclass(frozen=True)
class Side:
    """A row of one run where it begins to differ: the token there, its log-probability, and the text from there on."""

    token: int | str
    logprob: float | None
    text: Excerpt


@dataclass(frozen=True)
class Change:
    """A row that is not the same in both runs.

    Attributes:
        name: of the row.
        kind: what differs.
        own: the record's own fields.
        position: of the first different token, from 0 in the prompt or in the answer; None where no tokens differ.
        common: the text that both answers have before they differ, cut at its beginning.
        a, b: the rest of them; None where there is no such row.
    """

    name: str
    kind: Kind
    own: OwnFields
    position: int | None
    common: Excerpt
    a: Side | None
    b: Side | None


def aligned(
    paths: tuple[str, str],
    a: Iterator[Row | BrokenRow],
    b: Iterator[Row | BrokenRow],
    on_broken: tuple[Callable[[BrokenRow], None], Callable[[BrokenRow], None]],
) -> Iterator[tuple[Row | None, Row | None]]:
    """Yields the rows of the same record and answer in pairs; None where an output has no such row.

    Args:
        paths: of the outputs, for messages.
        a, b: their rows, in the order of the input, as an output has them.
        on_broken: take what is no row in `a`, and in `b`.

    Raises:
        ValueError: the rows are in another order, or a row is there twice.
    """
    ordered_a = _ordered(paths[0], a, on_broken[0])
    ordered_b = _ordered(paths[1], b, on_broken[1])
    row_a, row_b = next(ordered_a, None), next(ordered_b, None)
    while row_a is not None or row_b is not None:
        takes_a = row_b is None or (row_a is not None and _place(row_a) <= _place(row_b))
        takes_b = row_a is None or (row_b is not None and _place(row_b) <= _place(row_a))
        yield row_a if takes_a else None, row_b if takes_b else None
        row_a = next(ordered_a, None) if takes_a else row_a
        row_b = next(ordered_b, None) if takes_b else row_b


class Comparison:
    """How the rows of two runs differ.

    Attributes:
        kinds: pairs by what differs.
        positions: pairs of answers with other tokens by the position of the first of these.
        verdicts: pairs by whether the answer of the first run was right and that of the second one.
        changes: the first that differ.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.kinds: Counter[Kind] = Counter()
        self.positions: Counter[int] = Counter()
        self.verdicts: Counter[tuple[bool, bool]] = Counter()
        self.changes: list[Change] = []

    @property
    def num_changed(self) -> int:
        """How many pairs differ."""
        return self.kinds.total() - self.kinds["same"]

    def add(self, a: Row | None, b: Row | None) -> None:
        """Compares the rows of one answer."""
        kind = _kind(a, b)
        self.kinds[kind] += 1
        position = None
        if a is not None and b is not None:
            if kind in ("other tokens", "other prompt"):
                part = _new_ids if kind == "other tokens" else _prompt_ids
                position = _first_difference(part(a), part(b))
            if kind == "other tokens" and position is not None:
                self.positions[position] += 1
            value_a, value_b = self._choice.value(a), self._choice.value(b)
            if value_a is not None and value_b is not None:
                self.verdicts[value_a > 0, value_b > 0] += 1
        if kind != "same" and len(self.changes) < self._choice.rows:
            self.changes.append(_change(kind, a, b, position))


def _place(row: Row) -> tuple[int, int]:
    return row["sample_idx"], row.get("sequence_idx", 0)


def _ordered(path: str, rows: Iterator[Row | BrokenRow], on_broken: Callable[[BrokenRow], None]) -> Iterator[Row]:
    last: Row | None = None
    for row in rows:
        if isinstance(row, BrokenRow):
            on_broken(row)
            continue
        if last is not None and _place(row) <= _place(last):
            raise ValueError(
                f"{path}: row {row_name(row)} comes after row {row_name(last)}; outputs are compared in the order in "
                "which they were written"
            )
        last = row
        yield row


def _prompt_ids(row: Row) -> list[Any]:
    return row["generated_ids"][: row["num_prompt_tokens"]]


def _new_ids(row: Row) -> list[Any]:
    return row["generated_ids"][row["num_prompt_tokens"] :]


def _kind(a: Row | None, b: Row | None) -> Kind:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    if "error" in a and "error" in b:
        same = (a["error_type"], a["error"]) == (b["error_type"], b["error"])
        return "same" if same else "other error"
    if "error" in a or "error" in b:
        return "error in A only" if "error" in a else "error in B only"
    if is_score(a) or is_score(b):
        return _kind_of_scores(a, b) if is_score(a) and is_score(b) else "other task"
    if _prompt_ids(a) != _prompt_ids(b):
        return "other prompt"
    if _new_ids(a) != _new_ids(b):
        return "other tokens"
    if a.get("generated_text") != b.get("generated_text"):
        return "other text"
    return "same" if a["finish_reason"] == b["finish_reason"] else "other end"


def _kind_of_scores(a: Row, b: Row) -> Kind:
    if a.get("best") != b.get("best"):
        return "other choice"
    numbers_a, numbers_b = (row["loglikelihood"] for row in (a, b))
    if not isinstance(numbers_a, list) or not isinstance(numbers_b, list):
        numbers_a, numbers_b = [numbers_a], [numbers_b]
    near = len(numbers_a) == len(numbers_b) and all(
        abs(one - other) <= SCORE_TOLERANCE for one, other in zip(numbers_a, numbers_b, strict=True)
    )
    return "same" if near else "other score"


def _first_difference(a: list[Any] | str, b: list[Any] | str) -> int:
    """The first place where one has something else, or ends before the other."""
    shared = min(len(a), len(b))
    return next((place for place in range(shared) if a[place] != b[place]), shared)


def _change(kind: Kind, a: Row | None, b: Row | None, position: int | None) -> Change:
    row = a if a is not None else b
    assert row is not None
    text_a, text_b = _text(a), _text(b)
    start = _first_difference(text_a, text_b) if a is not None and b is not None else 0
    common = Excerpt(text_a[max(start - BEFORE_CHARACTERS, 0) : start], max(start - BEFORE_CHARACTERS, 0))
    part = _prompt_ids if kind == "other prompt" else _new_ids
    return Change(
        name=row_name(row),
        kind=kind,
        own=own_fields(row, MAX_FIELDS, FIELD_CHARACTERS),
        position=position,
        common=common,
        a=None if a is None else _side(a, part, position, text_a[start:]),
        b=None if b is None else _side(b, part, position, text_b[start:]),
    )


def _text(row: Row | None) -> str:
    """The answer of a row, or its error."""
    if row is None:
        return ""
    return f"{row['error_type']}: {as_text(row['error'])}" if "error" in row else answer_text(row)


def _side(row: Row, part: Callable[[Row], list[Any]], position: int | None, rest: str) -> Side:
    token: int | str = ""
    logprob = None
    if position is not None:
        ids = part(row)
        token = excerpt(ids[position], 20).text if position < len(ids) else "end"
        logprobs = row.get("logprobs")
        if part is _new_ids and isinstance(logprobs, list) and position < len(logprobs):
            value = logprobs[position]
            logprob = value if isinstance(value, float) else None
    return Side(token, logprob, excerpt(rest, AFTER_CHARACTERS))

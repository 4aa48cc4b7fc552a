"""How good answers are: rows of an output against references in their records; docs/evaluation.md defines it all."""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from mindformers_ext.config.evaluation import (
    ANY_SUFFIX,
    ContainsSection,
    ExactMatchSection,
    ExtractingSection,
    FunctionSection,
    MetricSection,
    NumericMatchSection,
    RegexSection,
)
from mindformers_ext.predict.rows import ANSWER_METRICS, own_field

logger = logging.getLogger(__name__)

# (answer, references) -> value; None where the record has no reference that the metric could use.
Judge = Callable[[str, Sequence[str]], float | None]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DIGITS = str.maketrans("", "", string.digits)
# A sign counts where no number, word or bracket ends before it: 3-5 has the numbers 3 and 5. The length is bounded, as
# the time of reading a number is not linear in it.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,300})(?:\.[0-9]{1,300})?"
    r"(?:[eE][-+]?[0-9]{1,3})?|(?:(?<![\w.)\]])[-+\u2212])?(?<![0-9])\.[0-9]{1,300}"
)


@dataclass
class _Totals:
    """Sums over records."""

    records: int = 0
    total: float = 0.0
    squares: float = 0.0
    any_right: float = 0.0
    failures: int = 0

    def add(self, values: Sequence[float]) -> None:
        mean = math.fsum(values) / len(values)
        self.records += 1
        self.total += mean
        self.squares += mean * mean
        self.any_right += max(values)

    def summary(self, several: bool) -> dict[str, Any]:
        count = self.records
        if not count:
            return {"value": None, "records": 0}
        mean = self.total / count
        result: dict[str, Any] = {"value": mean}
        if count > 1:  # of the mean, from the variance of a sample, as lm-evaluation-harness has it
            variance = max(self.squares / count - mean * mean, 0.0) * count / (count - 1)
            result["stderr"] = math.sqrt(variance / count)
        if several:
            result["any"] = self.any_right / count
        result["records"] = count
        if self.failures:
            result["failures"] = self.failures
        return result


@dataclass
class AnswerMetrics:
    """Judges the rows of an output one by one; the rows of a record follow each other.

    Attributes:
        sections: the metrics, with names.
        reference_field: field of a record with what its answer should be.
        num_sequences: answers to each record.
        in_rows: whether each row gets its values, under `ANSWER_METRICS`.
    """

    sections: Sequence[MetricSection]
    reference_field: str
    num_sequences: int = 1
    in_rows: bool = False
    _judges: dict[str, Callable[[Mapping[str, Any]], float | None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Imports the user's functions.

        Raises:
            ValueError: a function that cannot be imported.
        """
        self._judges = {section.name or "": self._judge(section) for section in self.sections}
        self.restart()

    def restart(self) -> None:
        """Forgets all rows."""
        self._totals = {name: _Totals() for name in self._judges}
        self._records = self._errors = 0
        self._current: int | None = None
        self._values: dict[str, list[float]] = {}

    def identity(self) -> list[Any]:
        """Returns what the values of rows depend on, as JSON can hold it."""
        return [self.reference_field, *(f"{type(section).__name__} {section.to_dict()}" for section in self.sections)]

    def needs_reference(self) -> bool:
        """Whether one of the metrics compares with a reference, and cannot do without."""
        return any(not isinstance(section, RegexSection | FunctionSection) for section in self.sections)

    def references(self, row: Mapping[str, Any]) -> list[str]:
        """Returns what the answer of a row should be: no text, one, or several good ones."""
        return reference_texts(own_field(row, self.reference_field))

    def row_values(self, row: Mapping[str, Any]) -> dict[str, float | None]:
        """Returns the value of each metric for one row: 0 for an error, None without a reference where it needs one."""
        if "error" in row:
            return dict.fromkeys(self._judges, 0.0)
        return {name: judge(row) for name, judge in self._judges.items()}

    def add(self, row: Mapping[str, Any]) -> dict[str, float | None]:
        """Counts a row; returns its values."""
        values = self.row_values(row)
        if row["sample_idx"] != self._current:
            self._finish_record()
            self._current = row["sample_idx"]
            self._records += 1
            self._errors += "error" in row
        for name, value in values.items():
            if value is not None:
                self._values.setdefault(name, []).append(value)
        return values

    def _finish_record(self) -> None:
        for name, values in self._values.items():
            self._totals[name].add(values)
        self._values = {}

    def result(self) -> dict[str, Any]:
        """Returns what the rows give, and warns of records that a metric had to leave out.

        Returns:
            ``records``, ``errors``, ``reference_field`` and ``metrics``: name -> ``value`` (the mean over records of
            the mean over their answers; None without any), ``stderr``, with several answers ``any``, ``records``, and
            ``failures`` of a function.
        """
        self._finish_record()
        several = self.num_sequences > 1
        metrics = {name: totals.summary(several) for name, totals in self._totals.items()}
        for name, found in metrics.items():
            if left_out := self._records - found["records"]:
                logger.warning(
                    "%s: %d of %d records have nothing to compare with in their field '%s' and do not count",
                    *(name, left_out, self._records, self.reference_field),
                )
        return {
            "records": self._records,
            "errors": self._errors,
            "reference_field": self.reference_field,
            "metrics": metrics,
        }

    def _judge(self, section: MetricSection) -> Callable[[Mapping[str, Any]], float | None]:
        if isinstance(section, FunctionSection):
            return self._function(section)
        if isinstance(section, RegexSection):
            pattern = re.compile(section.pattern)
            return lambda row: float(pattern.search(row["generated_text"]) is not None)
        assert isinstance(section, ExtractingSection)
        find = _finder(section)
        judge = _numeric_judge(section) if isinstance(section, NumericMatchSection) else _text_judge(section)

        def with_references(row: Mapping[str, Any]) -> float | None:
            references = self.references(row)
            if not references:
                return None
            found = find(row["generated_text"])
            # What matters first: whether there is anything to compare with.
            value = judge("" if found is None else found, references)
            return value if found is not None or value is None else 0.0

        return with_references

    def _function(self, section: FunctionSection) -> Callable[[Mapping[str, Any]], float | None]:
        function = import_function(section.function)
        name = section.name or ""

        def judge(row: Mapping[str, Any]) -> float | None:
            try:
                value = function(row["generated_text"], own_field(row, self.reference_field), dict(row))
                if value is None:
                    return None
                number = float(value)
                if not math.isfinite(number):
                    raise ValueError(f"it returned {number}")
            except (Exception, SystemExit) as error:  # a row that the user's code cannot judge must not lose the others
                totals = self._totals[name]
                if not totals.failures:
                    logger.error(
                        "%s: %s failed at record %d and counts as 0 there: %s: %s",
                        *(name, section.function, row["sample_idx"], type(error).__name__, error),
                    )
                totals.failures += 1
                return 0.0
            return number

        return judge


def import_function(path: str) -> Callable[..., Any]:
    """Imports a function from ``package.module:function`` or ``package.module.function``.

    Raises:
        ValueError: there is no such module or function, or it cannot be called.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a module may raise anything, and a script ends the process
        advice = ""
        if isinstance(error, ModuleNotFoundError):
            advice = "; its folder belongs into PYTHONPATH, or into --register_path"
        raise ValueError(f"the metric {path} cannot be imported: {type(error).__name__}: {error}{advice}") from error
    if not callable(function):
        raise ValueError(f"the metric {path} is no function: {name} is of type {type(function).__name__}")
    return function


def reference_texts(value: Any) -> list[str]:
    """Returns the texts of a reference: of a text or number itself, of a list each of its members; else none.

    Numbers are written as JSON writes them. Empty texts are no reference.
    """
    members = value if isinstance(value, list) else [value]
    texts = [member if isinstance(member, str) else _number_text(member) for member in members]
    return [text for text in texts if text]


def _number_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float) else ""


def last_number(text: str) -> Decimal | None:
    """Returns the last number of a text: 1,234.5, -3, .5 or 1e-6; None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def normalized(text: str, section: ExactMatchSection) -> str:
    """Returns a text with the changes of `section`, in the order of the exact_match of HuggingFace's evaluate."""
    for pattern in section.regexes_to_ignore or ():
        text = re.sub(pattern, "", text)
    if section.ignore_case:
        text = text.lower()
    if section.ignore_punctuation:
        text = text.translate(_PUNCTUATION)
    if section.ignore_numbers:
        text = text.translate(_DIGITS)
    return text.strip() if section.strip else text


def _finder(section: ExtractingSection) -> Callable[[str], str | None]:
    """From an answer to the part that counts, None if it is not there: the first group that is not empty."""
    if section.extract is None:
        return lambda text: text
    pattern, select = re.compile(section.extract), section.group_select

    def find(text: str) -> str | None:
        matches = pattern.findall(text)
        if not -len(matches) <= select < len(matches):
            return None
        match = matches[select]
        return match if isinstance(match, str) else next(filter(None, match), "")

    return find


def _text_judge(section: ExtractingSection) -> Judge:
    assert isinstance(section, ExactMatchSection)
    inside = isinstance(section, ContainsSection)

    def judge(answer: str, references: Sequence[str]) -> float | None:
        given = normalized(answer, section)
        wanted = [normalized(reference, section) for reference in references]
        if inside:  # what is empty is in everything
            wanted = list(filter(None, wanted))
        if not wanted:
            return None
        return float(any(text in given for text in wanted) if inside else given in wanted)

    return judge


def _numeric_judge(section: NumericMatchSection) -> Judge:
    def judge(answer: str, references: Sequence[str]) -> float | None:
        wanted = [number for number in map(last_number, references) if number is not None]
        if not wanted:
            return None
        given = last_number(answer)
        return float(given is not None and any(_near(given, number, section) for number in wanted))

    return judge


def _near(given: Decimal, wanted: Decimal, section: NumericMatchSection) -> bool:
    if given == wanted:
        return True
    distance, size = abs(float(given) - float(wanted)), abs(float(wanted))
    limits = (section.tolerance, section.relative_tolerance * size)
    return any(0.0 < limit >= distance for limit in limits)


def metric_values(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the values of `AnswerMetrics.result` by name, those of any answer as ``<name>_any``."""
    values: dict[str, float | None] = {}
    for name, found in result["metrics"].items():
        values[name] = found["value"]
        if "any" in found:
            values[name + ANY_SUFFIX] = found["any"]
    return values


def format_metrics(result: Mapping[str, Any]) -> list[str]:
    """Returns lines for the log."""
    lines = []
    for name, found in result["metrics"].items():
        if found["value"] is None:
            lines.append(f"{name}: no record to judge")
            continue
        error = f" +- {found['stderr']:.4f}" if "stderr" in found else ""
        extra = f", any of a record's answers {found['any']:.4f}" if "any" in found else ""
        failed = f", {found['failures']} failures of the function" if "failures" in found else ""
        lines.append(f"{name}: {found['value']:.4f}{error}{extra} ({found['records']} records{failed})")
    return lines


def judged(rows: Iterable[dict[str, Any]], metrics: AnswerMetrics) -> Iterator[dict[str, Any]]:
    """Passes rows on while the metrics judge them, with their values where `in_rows` asks for them."""
    for row in rows:
        values = metrics.add(row)
        yield row | {ANSWER_METRICS: values} if metrics.in_rows else row

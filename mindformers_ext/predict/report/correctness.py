"""Whether an answer is right, and how many are, by the values of fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindformers_ext.predict.report.excerpts import as_text
from mindformers_ext.predict.rows import ANSWER_METRICS, hidden_fields

# Metrics of a choice among several, see scoring.py.
CHOICE_METRICS = ("acc", "acc_norm", "acc_bytes")
_NORMAL_95 = 1.959964  # of the normal distribution, 95 % lie within so many standard deviations


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field of a row, or of its record if the name is one of the row's own; None without it."""
    return row.get(name, hidden_fields(row).get(name))


def row_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that a row carries itself: those of answers, and the accuracies of a choice."""
    answer_metrics = row.get(ANSWER_METRICS)
    found = dict(answer_metrics) if isinstance(answer_metrics, Mapping) else {}
    if "best" in row:
        found |= {name: row.get(name) for name in CHOICE_METRICS}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def is_right(row: Mapping[str, Any], reference: str) -> bool | None:
    """Tells whether the answer is that of the field `reference`, white space around both aside.

    A reference that is a list holds several right answers. An error is a wrong answer. None without a reference.
    """
    expected = field_of(row, reference)
    if expected is None:
        return None
    answer = row.get("generated_text")
    if "error" in row or not isinstance(answer, str):
        return False
    accepted = expected if isinstance(expected, list) else [expected]
    return answer.strip() in {as_text(one).strip() for one in accepted}


@dataclass
class Accuracy:
    """The mean of a metric over `total` rows."""

    total: int = 0
    sum: float = 0.0
    is_share: bool = True

    def add(self, value: float) -> None:
        """Counts one row."""
        self.total += 1
        self.sum += value
        self.is_share = self.is_share and value in (0.0, 1.0)

    @property
    def mean(self) -> float:
        """Of all values."""
        return self.sum / self.total

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the true share of rows with the value 1 lies with 95 % confidence (Wilson's score interval).

        None if there are other values than 0 and 1.
        """
        if not self.is_share:
            return None
        spread = _NORMAL_95**2 / self.total
        center = (self.mean + spread / 2) / (1 + spread)
        half = math.sqrt(self.mean * (1 - self.mean) * spread + spread**2 / 4) / (1 + spread)
        return max(center - half, 0.0), min(center + half, 1.0)

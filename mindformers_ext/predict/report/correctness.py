"""Whether an answer is right, and how many are, by the values of fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindformers_ext.predict.report.excerpts import as_text, hidden_fields

_NORMAL_95 = 1.959964  # of the normal distribution, 95 % lie within so many standard deviations


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field of a row, or of its record if the name is one of the row's own; None without it."""
    return row.get(name, hidden_fields(row).get(name))


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
    """How many of `total` answers are right."""

    right: int = 0
    total: int = 0

    def add(self, right: bool) -> None:
        """Counts one answer."""
        self.right += right
        self.total += 1

    @property
    def share(self) -> float:
        """Of right answers, 0 to 1."""
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The shares between which the true one lies with 95 % confidence (Wilson's score interval)."""
        spread = _NORMAL_95**2 / self.total
        center = (self.share + spread / 2) / (1 + spread)
        half = math.sqrt(self.share * (1 - self.share) * spread + spread**2 / 4) / (1 + spread)
        return max(center - half, 0.0), min(center + half, 1.0)

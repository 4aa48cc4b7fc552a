"""Prints what the quickstart model answered, beside the expected answers, and counts the right ones.

    python scripts/check_quickstart.py [result.jsonl] [--wrong-only]

The exit code is 0 if every answer is right, 1 if one is wrong, 2 if there is no usable result file.
"""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parent.parent / "output" / "quickstart" / "result.jsonl"
HEADER = ("prompt", "answer", "expected", "")
MAX_WIDTH = 44


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a result file of ``run_mode: predict``.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a JSON object with an expected ``answer``, or there is none.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("answer"), str):
            raise ValueError(f"{path}:{number}: expected a JSON object with a text field 'answer'")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no results")
    return rows


def answer_of(row: dict[str, Any]) -> str:
    """Returns the model's answer, or the error of a record that has none."""
    if "error" in row:
        return f"[{row.get('error_type', 'error')}] {row['error']}"
    return str(row.get("generated_text", "")).strip()


def is_right(row: dict[str, Any]) -> bool:
    """Tells whether the answer is the expected one, and the model ended it by itself."""
    return "error" not in row and row.get("finish_reason") == "eos" and answer_of(row) == row["answer"]


def display_width(text: str) -> int:
    """Returns the columns that a terminal needs: two for a wide character."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def fit(text: str, width: int) -> str:
    """Returns one line of exactly ``width`` columns, cut with ``...`` or filled with spaces."""
    text = text.replace("\n", "\\n")
    if display_width(text) > width:
        while display_width(text) > width - 3:
            text = text[:-1]
        text += "..."
    return text + " " * (width - display_width(text))


def table(lines: Sequence[Sequence[str]]) -> str:
    """Returns the lines below each other with aligned columns, none wider than `MAX_WIDTH`."""
    widths = [min(MAX_WIDTH, max(display_width(line[i]) for line in lines)) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(fit(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the number of right answers, all together and of each kind."""
    total = Counter(str(row.get("kind", "other")) for row in rows)
    right = Counter(str(row.get("kind", "other")) for row in rows if is_right(row))
    kinds = ", ".join(f"{kind} {right[kind]}/{count}" for kind, count in total.items())
    return f"{sum(right.values())} of {len(rows)} answers are right: {kinds}"


def main() -> int:
    """Prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT, help="result file (default: %(default)s)")
    parser.add_argument("--wrong-only", action="store_true", help="leave out the right answers")
    arguments = parser.parse_args()
    try:
        rows = read_rows(arguments.result)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    shown = [row for row in rows if not (arguments.wrong_only and is_right(row))]
    lines = [
        (str(row.get("instruction", "")), answer_of(row), row["answer"], "right" if is_right(row) else "WRONG")
        for row in shown
    ]
    if lines:
        print(table([HEADER, *lines]))
        print()
    print(summary(rows))
    return 0 if all(map(is_right, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())

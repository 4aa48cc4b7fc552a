"""The rows of an output, read one after the other, and what stands where a row should be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from mindformers_ext.predict import sources
from mindformers_ext.predict.json_array import Fault, split_elements
from mindformers_ext.predict.records import json_kind
from mindformers_ext.predict.report.correctness import CHOICE_METRICS
from mindformers_ext.predict.sources import DamagedFileError, open_source, read_lines, suffix_of
from mindformers_ext.predict.strict_json import parse_json
from mindformers_ext.predict.summary import is_row, is_score

SUFFIXES = (".jsonl", ".json")

Row: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class BrokenRow:
    """Where in the file no row could be read, and why not."""

    place: str
    message: str


def check_result(path: str) -> None:
    """Refuses a file that cannot be the rows of an output.

    Raises:
        ValueError: the form of the file does not keep rows, or it is no regular file.
        OSError: it is not there, or cannot be opened.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file")
    if suffix_of(path) not in SUFFIXES:
        kept = "a .txt output keeps the texts alone" if suffix_of(path) in (".txt", "") else "this is no output"
        raise ValueError(f"{path}: {kept}; a report needs whole rows: .jsonl or .json, or one of them with .gz")
    with open(path, "rb"):
        pass


def read_results(path: str) -> Iterator[Row | BrokenRow]:
    """Yields the rows of a `.jsonl` or `.json` output, or of one followed by `.gz`; keeps one of them in memory.

    Every row has what `is_row` asks for, and no negative number among its counts.

    Raises:
        OSError: the file cannot be read on.
    """
    count = 0
    try:
        with open_source(path) as file:
            if suffix_of(path) == ".json":
                parts: Iterator[tuple[str, bytes | Fault]] = (
                    (f"element {number}", part)
                    for number, part in enumerate(split_elements(file, sources.MAX_LINE_BYTES))
                )
            else:
                too_long = Fault(f"has more than {sources.MAX_LINE_BYTES} bytes")
                parts = ((f"line {number}", line or too_long) for number, line in read_lines(file))
            for place, part in parts:
                yield _row(place, part)
                count += 1
    except DamagedFileError as error:
        yield BrokenRow(f"after row {count}", f"the compressed file is damaged and its rest is lost: {error}")


def _row(place: str, part: bytes | Fault) -> Row | BrokenRow:
    if isinstance(part, Fault):
        return BrokenRow(place, part.message)
    try:
        value = parse_json(part)
    except ValueError as error:
        return BrokenRow(place, str(error))
    if not isinstance(value, dict):
        return BrokenRow(place, f"is {json_kind(value)}, not an object")
    if not is_row(value):
        return BrokenRow(
            place, "is no row of an output: sample_idx, or what belongs to an answer or an error, is missing"
        )
    odd = next((name for name in _COUNTS if name in value and not _are_counts(value[name])), None)
    if odd is None and "error" not in value and is_score(value):
        odd = next((name for name in _NUMBERS if name in value and not _are_numbers(value[name])), None)
    return BrokenRow(place, f"has {odd} that is no number of its kind") if odd is not None else value


def _are_counts(value: Any) -> bool:
    return all(type(one) is int and one >= 0 for one in (value if isinstance(value, list) else [value]))


def _are_numbers(value: Any) -> bool:
    return all(type(one) in (int, float) for one in (value if isinstance(value, list) else [value]))


_COUNTS = ("sample_idx", "sequence_idx", "num_prompt_tokens", "num_new_tokens", "num_target_tokens")
_NUMBERS = ("loglikelihood", "num_words", "num_bytes", *CHOICE_METRICS)

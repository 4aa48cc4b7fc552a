"""Text of rows as a page can show it: short, and without characters that nobody sees."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindformers_ext.predict.rows import ANSWER_NAMES, hidden_fields
from mindformers_ext.predict.scoring import SCORE_NAMES
from mindformers_ext.predict.summary import is_score

# Controls, formats (marks of direction, joiners, tags), halves of surrogate pairs, ends of lines and paragraphs.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Lines and tabs are seen; emoji and several scripts are written with joiners.
_KEPT = frozenset("\n\t\u200c\u200d")


@dataclass(frozen=True)
class Excerpt:
    """The beginning of a text, and how many characters follow it."""

    text: str
    omitted: int = 0


@dataclass(frozen=True)
class OwnFields:
    """The first of a record's own fields by name, and how many more there are."""

    fields: list[tuple[str, Excerpt]]
    omitted: int = 0


def excerpt(value: Any, limit: int) -> Excerpt:
    """Returns at most `limit` characters of a text; what is no text is shown as JSON."""
    text = as_text(value)
    return Excerpt(text[:limit], max(len(text) - limit, 0))


def as_text(value: Any) -> str:
    """Returns a text as it is, and any other value of JSON as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def own_fields(row: Mapping[str, Any], count: int, limit: int) -> OwnFields:
    """Returns at most `count` of the fields that a row has from its record, each cut to `limit` characters."""
    names = SCORE_NAMES if is_score(row) else ANSWER_NAMES
    fields = {**{name: value for name, value in row.items() if name not in names}, **hidden_fields(row)}
    shown = [(name[:limit], excerpt(value, limit)) for name, value in list(fields.items())[:count]]
    return OwnFields(shown, max(len(fields) - count, 0))


def visible(text: str) -> str:
    """Returns the text with the code in place of each character that is not seen, so that it cannot disguise others."""
    if text.isprintable():
        return text
    return "".join(
        f"\N{MATHEMATICAL LEFT ANGLE BRACKET}U+{ord(character):04X}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
        if character not in _KEPT and unicodedata.category(character) in _UNSEEN
        else character
        for character in text
    )

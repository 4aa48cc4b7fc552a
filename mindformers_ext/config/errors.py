"""The errors of a configuration, and where in the user's input a value came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]

_LONGEST_VALUE = 60
_MOST_ERRORS = 10


class ConfigError(ValueError):
    """A mistake in the configuration, told in one line: where, what is wrong, what would be right."""


class ConfigFileNotFoundError(ConfigError, FileNotFoundError):
    """The configuration file does not exist."""


def joined(errors: Sequence[ConfigError]) -> ConfigError:
    """One error for all of ``errors``, a line each; the first ten are told, the others counted."""
    if len(errors) == 1:
        return errors[0]
    lines = "\n".join(map(str, errors)).split("\n")
    more = len(lines) - _MOST_ERRORS
    return ConfigError("\n".join(lines[:_MOST_ERRORS] + [f"and {more} more"] * (more > 0)))


@dataclass
class Source:
    """Where a configuration came from: `name` of the file (None for a mapping), line of each key, overridden keys."""

    name: str | None = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overridden: set[KeyPath] = field(default_factory=set)

    def error(self, path: KeyPath, problem: str) -> ConfigError:
        """The error for the key at `path`, ready to raise."""
        return ConfigError(f"{self.where(path)}: {problem}")

    def where(self, path: KeyPath) -> str:
        """`file:line: dotted.key`; `override dotted.key` when the value was not read from the file."""
        key = dotted(path)
        if any(parent in self.overridden for parent in _parents(path)):
            return f"override {key}"
        if self.name is None:
            return key or "config"
        line = next((self.lines[parent] for parent in _parents(path) if parent in self.lines), None)
        place = self.name if line is None else f"{self.name}:{line}"
        return f"{place}: {key}" if key else place


def _parents(path: KeyPath) -> Iterator[KeyPath]:
    """`path` itself, then each section around it, the nearest first; () is the whole file."""
    return (path[:length] for length in range(len(path), -1, -1))


def dotted(path: KeyPath) -> str:
    """`("callbacks", 0, "type")` as `callbacks[0].type`."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{printable(key)}" if text else printable(key)
    return text


def printable(text: str, limit: int | None = _LONGEST_VALUE) -> str:
    """`text` on one line, without control characters, cut to `limit` characters."""
    safe = text if text.isprintable() else ascii(text)[1:-1]
    return safe if limit is None or len(safe) <= limit else safe[: limit - 3] + "..."


def show(value: Any) -> str:
    """A value as the user knows it from YAML, with the name of its kind."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text '{printable(value)}'"
    if isinstance(value, (int, float)):
        return f"the number {printable(repr(value))}"
    if isinstance(value, list):
        return f"the list {printable(repr(value))}"
    if isinstance(value, dict):
        return f"the section {printable(repr(value))}"
    return f"an object of type {type(value).__name__}"

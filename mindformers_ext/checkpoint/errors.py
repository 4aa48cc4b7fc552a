"""The error of a bad checkpoint, and the way in which several problems become one sentence."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 10


class CheckpointError(ValueError):
    """A checkpoint cannot be used as it is; the message names the file and the tensor."""


def listed(items: Iterable[str], limit: int = SHOWN) -> str:
    """Joins the first ``limit`` items by commas and says how many were left off."""
    names = list(items)
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


class ProblemList:
    """Collects everything that is wrong with one checkpoint, so that it is reported at once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._kinds: dict[str, list[str]] = {}

    def add(self, kind: str, item: str) -> None:
        """Notes ``item`` under the heading ``kind``."""
        self._kinds.setdefault(kind, []).append(item)

    def has(self, kind: str) -> bool:
        """Whether something was noted under this heading."""
        return kind in self._kinds

    def raise_if_any(self) -> None:
        """Raises one error with all headings, their counts and their first items.

        Raises:
            CheckpointError: if anything was noted.
        """
        if self._kinds:
            parts = [f"{kind} ({len(items)}): {listed(items)}" for kind, items in self._kinds.items()]
            raise CheckpointError(f"checkpoint {self._where}: " + "; ".join(parts))

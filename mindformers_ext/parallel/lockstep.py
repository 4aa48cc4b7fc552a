"""Ranks that share parameters or experts run equally many forwards, however different their work is."""

from __future__ import annotations

from collections.abc import Callable

from mindformers_ext.parallel.collectives import Group


class Lockstep:
    """Keeps the ranks of a group at the same number of forwards.

    A rank says before each forward that it has one; a rank that has none left takes part with an idle one, until
    nobody has any.

    Args:
        group: the ranks.
        idle: runs a forward whose result nobody needs.
    """

    def __init__(self, group: Group, idle: Callable[[], object]) -> None:
        self._group = group
        self._idle = idle

    def forward(self) -> None:
        """Announces a forward, which must follow."""
        if self._group.size > 1:
            self._group.any(True)

    def finish(self) -> None:
        """Runs idle forwards until all ranks are done."""
        while self._group.size > 1 and self._group.any(False):
            self._idle()

"""Ranks that agree: on values that must be equal, and on whether one of them failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.groups import ParallelContext

_SHOWN_CHARACTERS = 200


class PeerError(RuntimeError):
    """Another rank failed.

    Attributes:
        rank: its global rank.
        kind: class of its exception.
    """

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message or kind}")
        self.rank = rank
        self.kind = kind


def require_same(context: ParallelContext, values: Mapping[str, Any], group: Group | None = None) -> None:
    """Refuses values that differ between ranks. All ranks raise the same error.

    Args:
        context: this process.
        values: small values by name, which JSON can hold; large ones as their hash.
        group: the ranks to compare; all of the job by default.

    Raises:
        ValueError: names each value that differs, with the ranks that have it.
    """
    group = context.world if group is None else group
    gathered = group.all_gather_object(dict(values))
    names = dict.fromkeys(name for one in gathered for name in one)
    differences = []
    for name in names:
        owners: dict[str, list[int]] = {}
        for rank, one in zip(group.ranks, gathered, strict=True):
            owners.setdefault(_shown(one[name]) if name in one else "missing", []).append(rank)
        if len(owners) > 1:
            differences.append(f"{name} is " + ", ".join(f"{value} on {_ranks(r)}" for value, r in owners.items()))
    if differences:
        raise ValueError(f"the ranks of this job were given different settings: {'; '.join(differences)}")


def gather_errors(
    context: ParallelContext, error: BaseException | None, group: Group | None = None
) -> list[tuple[int, str, str]]:
    """Returns (rank, class, message) of the error of every rank that failed, by rank. All ranks of the group call it.

    Args:
        context: this process.
        error: what failed here, None if nothing did.
        group: the ranks that agree; all of the job by default.
    """
    group = context.world if group is None else group
    if not group.any(error is not None):
        return []
    reports = group.all_gather_object(None if error is None else [type(error).__name__, str(error)])
    return [(rank, *report) for rank, report in zip(group.ranks, reports, strict=True) if report is not None]


def first_error(context: ParallelContext, error: BaseException | None, group: Group | None = None) -> None:
    """Returns if no rank failed; otherwise every rank raises the error of the lowest rank that did.

    That rank raises its own exception, the others a `PeerError`. All ranks of the group call it.

    Args:
        context: this process.
        error: what failed here, None if nothing did.
        group: the ranks that agree; all of the job by default.

    Raises:
        PeerError: another rank failed first.
    """
    group = context.world if group is None else group
    errors = gather_errors(context, error, group)
    if errors and errors[0][0] != group.ranks[group.rank]:
        raise PeerError(*errors[0]) from error
    if error is not None:
        raise error


@contextmanager
def failing_together(context: ParallelContext, group: Group | None = None) -> Iterator[None]:
    """Runs a block on all ranks; if it fails on one, it fails on all, see `first_error`.

    The block itself must not communicate: a rank that fails would leave the others waiting.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    first_error(context, error, group)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"

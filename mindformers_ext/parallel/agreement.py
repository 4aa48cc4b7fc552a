"""Ranks that agree: on values that must be equal, and on whether one of them failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.parallel.mesh import PeerError, PeerLostError

__all__ = [
    "PeerError",
    "PeerLostError",
    "RankError",
    "failing_together",
    "first_error",
    "gather_errors",
    "require_same",
]

_SHOWN_CHARACTERS = 200


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


@dataclass(frozen=True)
class RankError:
    """What failed on a rank.

    Attributes:
        rank: its global rank.
        kinds: class of the exception, and its bases.
        message: of the exception.
        victim: whether the rank failed because of another one.
    """

    rank: int
    kinds: tuple[str, ...]
    message: str
    victim: bool


def gather_errors(context: ParallelContext, error: BaseException | None) -> list[RankError]:
    """Returns what failed on the ranks of the job: causes before victims, each by rank. All ranks call it.

    On CPUs a rank may have failed anywhere before: the others, which may be in the middle of a collective, fail with it
    (`mesh`).

    Args:
        context: this process.
        error: what failed here, None if nothing did.

    Raises:
        PeerLostError: the process of another rank has ended.
    """
    reports = context.world.exchange_reports(None if error is None else _report(context.rank, error))
    errors = [RankError(one["rank"], tuple(one["kinds"]), one["message"], one["victim"]) for one in reports if one]
    return sorted(errors, key=lambda one: (one.victim, one.rank))


def first_error(context: ParallelContext, error: BaseException | None) -> None:
    """Returns if no rank failed; otherwise every rank raises the error of the lowest rank that did.

    That rank raises its own exception, the others a `PeerError`. All ranks of the job call it. On CPUs a rank may have
    failed anywhere before: the others, which may be in the middle of a collective, fail with it (`mesh`).

    Args:
        context: this process.
        error: what failed here, None if nothing did.

    Raises:
        PeerError: another rank failed first.
        PeerLostError: the process of another rank has ended.
    """
    errors = gather_errors(context, error)
    if errors and errors[0].rank != context.rank:
        raise PeerError(errors[0].rank, errors[0].kinds, errors[0].message) from error
    if error is not None:
        raise error


def _report(rank: int, error: BaseException) -> dict[str, Any]:
    if isinstance(error, PeerError):
        return {"rank": error.rank, "kinds": error.kinds, "message": error.reason, "victim": True}
    kinds = [kind.__name__ for kind in type(error).__mro__[:-1]]
    return {"rank": rank, "kinds": kinds, "message": str(error), "victim": isinstance(error, PeerLostError)}


@contextmanager
def failing_together(context: ParallelContext) -> Iterator[None]:
    """Runs a block on all ranks; if it fails on one, it fails on all, see `first_error`.

    Elsewhere than on CPUs the block must not communicate: a rank that fails would leave the others waiting.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    first_error(context, error)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"

"""Ranks that answer a batch together: replicas share its records, and all of them learn how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindformers_ext.parallel.agreement import PeerLostError, RankError, gather_errors
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import FAULTS_OF_RECORDS, BatchError, Completion, Decode, JobStoppedError, described_fault
from mindformers_ext.predict.schedule import balance

_FAULTS = {fault.__name__ for fault in FAULTS_OF_RECORDS}


@dataclass(frozen=True)
class Exchange:
    """How replicas share prompts and tell each other their answers.

    Attributes:
        work: expected work of a prompt.
        pack: makes an answer something that JSON can hold.
        unpack: makes that an answer again.
    """

    work: Callable[[Any], int]
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def shared_decode(
    decode: Decode, context: ParallelContext, num_sequences: int, idle: Callable[[], None], exchange: Exchange
) -> Decode:
    """Returns a function that answers a batch on all ranks together; every rank calls it and gets every answer.

    What fails on one rank fails on all of them: as `JobStoppedError` where a rank has to stop, as `BatchError` where
    one of the records may be at fault, and otherwise as `PeerLostError`, which ends the run.

    Args:
        decode: answers prompts on the replica of this rank.
        context: the place of this rank.
        num_sequences: answers to a prompt.
        idle: what a replica without prompts does meanwhile.
        exchange: what prompts and answers are.
    """
    group = context.dp

    def answer(prompts: list[Any], indices: list[int]) -> list[Any]:
        shares = balance([exchange.work(prompt) for prompt in prompts], group.size)
        mine = shares[group.rank]
        found: list[Any] = []
        error: Exception | None = None
        try:
            if mine:
                found = decode([prompts[piece] for piece in mine], [indices[piece] for piece in mine])
            else:
                idle()
        except Exception as raised:
            error = raised
        raise_together(gather_errors(context, error), error, context.rank, indices)
        if group.size == 1:
            return found
        gathered = group.all_gather_object([exchange.pack(one) for one in found])
        return [exchange.unpack(one) for one in _in_order(gathered, shares, num_sequences)]

    return answer


def raise_together(errors: Sequence[RankError], error: Exception | None, rank: int, indices: Sequence[int]) -> None:
    """Raises what makes all ranks do the same, if one failed: stop, try the batch again in halves, or end."""
    for one in errors:
        if JobStoppedError.__name__ in one.kinds:
            raise JobStoppedError(one.message) from error
    if not errors:
        return
    cause = errors[0]
    if _FAULTS & set(cause.kinds):
        raise BatchError(described_fault(cause.kinds[0], cause.message)) from error
    if cause.rank == rank and error is not None:
        raise error
    records = ", ".join(str(index) for index in indices)
    raise PeerLostError(
        cause.rank, f"rank {cause.rank} failed: {cause.message} ({cause.kinds[0]}, with records {records})"
    ) from error


def _in_order(gathered: Sequence[Sequence[Any]], shares: Sequence[Sequence[int]], each: int) -> list[Any]:
    """Puts the answers of all replicas into the order of the batch."""
    by_piece: dict[int, Sequence[Any]] = {}
    for share, found in zip(shares, gathered, strict=True):
        for place, piece in enumerate(share):
            by_piece[piece] = found[each * place : each * (place + 1)]
    return [answer for piece in sorted(by_piece) for answer in by_piece[piece]]


def _completion(fields: dict[str, Any]) -> Completion:
    best = fields["top_logprobs"]
    pairs = None if best is None else [[(token, value) for token, value in step] for step in best]
    return Completion(**{**fields, "top_logprobs": pairs})


COMPLETIONS = Exchange(work=len, pack=asdict, unpack=_completion)

"""Ranks that answer a batch together: replicas share its records, and all of them learn how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mindformers_ext.parallel.agreement import PeerLostError, RankError, gather_errors
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import FAULTS_OF_RECORDS, BatchError, Completion, Decode, JobStoppedError, described_fault
from mindformers_ext.predict.schedule import balance

_FAULTS = {fault.__name__ for fault in FAULTS_OF_RECORDS}


def shared_decode(decode: Decode, context: ParallelContext, num_sequences: int, idle: Callable[[], None]) -> Decode:
    """Returns a function that answers a batch on all ranks together; every rank calls it and gets every answer.

    What fails on one rank fails on all of them: as `JobStoppedError` where a rank has to stop, as `BatchError` where
    one of the records may be at fault, and otherwise as `PeerLostError`, which ends the run.

    Args:
        decode: answers prompts on the replica of this rank.
        context: the place of this rank.
        num_sequences: completions of a prompt.
        idle: what a replica without prompts does meanwhile.
    """
    group = context.dp

    def answer(prompts: list[list[int]], indices: list[int]) -> list[Completion]:
        shares = balance([len(prompt) for prompt in prompts], group.size)
        mine = shares[group.rank]
        found: list[Completion] = []
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
        return _in_order(group.all_gather_object([asdict(completion) for completion in found]), shares, num_sequences)

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


def _in_order(
    gathered: Sequence[Sequence[dict[str, Any]]], shares: Sequence[Sequence[int]], each: int
) -> list[Completion]:
    """Puts the completions of all replicas into the order of the batch."""
    by_piece: dict[int, list[Completion]] = {}
    for share, found in zip(shares, gathered, strict=True):
        for place, piece in enumerate(share):
            by_piece[piece] = [completion_of(fields) for fields in found[each * place : each * (place + 1)]]
    return [completion for piece in sorted(by_piece) for completion in by_piece[piece]]


def completion_of(fields: dict[str, Any]) -> Completion:
    """Returns the completion that `dataclasses.asdict` and JSON made fields of."""
    best = fields["top_logprobs"]
    pairs = None if best is None else [[(token, value) for token, value in step] for step in best]
    return Completion(**{**fields, "top_logprobs": pairs})

"""Replicas of a model that answer different records of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mindformers_ext.parallel.agreement import PeerError, PeerLostError, first_error
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import Completion
from mindformers_ext.predict.run import FAULTS_OF_RECORDS
from mindformers_ext.predict.schedule import balance

Decode = Callable[[list[list[int]], list[int]], list[Completion]]


def shared_decode(decode: Decode, context: ParallelContext, num_sequences: int, idle: Callable[[], None]) -> Decode:
    """Returns a function that answers a batch on all replicas together; every rank calls it and gets every answer.

    If it fails on one rank, it fails on all: as `MemoryError` where that rank had too little memory, as `PeerError`
    where one of the records may be at fault, and otherwise as `PeerLostError`, which ends the run.

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
        try:
            first_error(context, error)
        except PeerError as failure:
            raise _same_fault(failure, indices) from error
        if group.size == 1:
            return found
        return _in_order(group.all_gather_object([asdict(completion) for completion in found]), shares, num_sequences)

    return answer


def _same_fault(failure: PeerError, indices: Sequence[int]) -> Exception:
    """The exception that makes a rank do what the rank that failed does: try the batch again in halves, or end."""
    if "MemoryError" in failure.kinds:
        return MemoryError(str(failure))
    if {kind.__name__ for kind in FAULTS_OF_RECORDS} & set(failure.kinds):
        return failure
    records = ", ".join(str(index) for index in indices)
    return PeerLostError(failure.rank, f"{failure} ({failure.kind}, with records {records})")


def _in_order(
    gathered: Sequence[Sequence[dict[str, Any]]], shares: Sequence[Sequence[int]], each: int
) -> list[Completion]:
    """Puts the completions of all replicas into the order of the batch."""
    by_piece: dict[int, list[Completion]] = {}
    for share, found in zip(shares, gathered, strict=True):
        for place, piece in enumerate(share):
            by_piece[piece] = [_completion(fields) for fields in found[each * place : each * (place + 1)]]
    return [completion for piece in sorted(by_piece) for completion in by_piece[piece]]


def _completion(fields: dict[str, Any]) -> Completion:
    best = fields["top_logprobs"]
    pairs = None if best is None else [[(token, value) for token, value in step] for step in best]
    return Completion(**{**fields, "top_logprobs": pairs})

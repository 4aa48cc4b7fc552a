"""Ranks that answer a batch together: replicas share its records, and all of them learn how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mindformers_ext.parallel.agreement import gather_errors
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import BatchError, Completion, JobStoppedError, described_fault
from mindformers_ext.predict.schedule import balance

Decode = Callable[[list[list[int]], list[int]], list[Completion]]

_FAULTS = (RuntimeError, FloatingPointError, MemoryError, ValueError, JobStoppedError)


def shared_decode(decode: Decode, context: ParallelContext, num_sequences: int, idle: Callable[[], None]) -> Decode:
    """Returns a function that answers a batch on all ranks together; every rank calls it and gets every answer.

    What fails on one rank fails on all of them with the same error: `BatchError`, or `JobStoppedError`.

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
        except _FAULTS as raised:
            error = raised
        _raise_together(gather_errors(context, error), error)
        if group.size == 1:
            return found
        return _in_order(group.all_gather_object([asdict(completion) for completion in found]), shares, num_sequences)

    return answer


def _raise_together(errors: Sequence[tuple[int, str, str]], error: Exception | None) -> None:
    """Raises the error that all ranks agree on, if there is one: a stop comes before a fault, the lowest rank first."""
    for _, kind, message in errors:
        if kind == JobStoppedError.__name__:
            raise JobStoppedError(message) from error
    if errors:
        _, kind, message = errors[0]
        raise BatchError(described_fault(kind, message)) from error


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

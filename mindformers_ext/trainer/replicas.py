"""Replicas of a model that answer different records of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mindformers_ext.parallel.agreement import first_error
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict import Completion
from mindformers_ext.predict.schedule import balance

Decode = Callable[[list[list[int]], list[int]], list[Completion]]

_FAULTS = (RuntimeError, FloatingPointError, MemoryError, ValueError)


def shared_decode(decode: Decode, context: ParallelContext, num_sequences: int, idle: Callable[[], None]) -> Decode:
    """Returns a function that answers a batch on all replicas together; every rank calls it and gets every answer.

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
        first_error(context, error)
        return _in_order(group.all_gather_object([asdict(completion) for completion in found]), shares, num_sequences)

    return answer


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

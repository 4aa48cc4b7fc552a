"""Which replica answers which records."""

from __future__ import annotations

from collections.abc import Sequence


def balance(work: Sequence[int], replicas: int) -> list[list[int]]:
    """Shares pieces of work among replicas so that the largest share is small.

    The largest piece goes first, each to the replica that has the least so far among those with room; no replica gets
    more than one piece above the average number.

    Args:
        work: expected work of each piece.
        replicas: number of replicas.

    Returns:
        The pieces of each replica, ascending.
    """
    room = -(-len(work) // replicas)
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for piece in sorted(range(len(work)), key=lambda piece: (-work[piece], piece)):
        chosen = min(
            (replica for replica in range(replicas) if len(shares[replica]) < room),
            key=lambda replica: (loads[replica], replica),
        )
        shares[chosen].append(piece)
        loads[chosen] += work[piece]
    return [sorted(share) for share in shares]

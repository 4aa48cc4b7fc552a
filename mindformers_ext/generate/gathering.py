"""From the logits of one process to what all processes of its unit need: whole rows, or the tokens chosen by them."""

from __future__ import annotations

import numpy as np

from mindformers_ext.generate.topk import check_finite
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.parallel.plan import split_evenly


def gather_vocab_parallel_logits(
    local: np.ndarray | None, rows: int, vocab_size: int, context: ParallelContext
) -> np.ndarray:
    """Joins the parts of the vocabulary, and gives every stage of a pipeline the result.

    Args:
        local: logits of this process' part of the vocabulary, float32 ``[rows, V_local]``; None outside the last stage.
        rows: number of rows.
        vocab_size: V.
        context: the groups.

    Returns:
        float32 ``[rows, V]``.
    """
    whole = np.zeros((rows, vocab_size), np.float32)
    if local is not None:
        parts = [split_evenly(vocab_size, context.tp.size, index) for index in range(context.tp.size)]
        gathered = context.tp.all_gather_parts(local.T, [end - begin for begin, end in parts])
        whole = np.ascontiguousarray(np.concatenate(gathered).T)
    return context.pp.broadcast(whole, context.pp.size - 1)


def best_tokens(local: np.ndarray | None, rows: int, vocab_size: int, context: ParallelContext) -> np.ndarray:
    """Chooses the token with the highest logit of each row; of equal ones the lowest id.

    Processes exchange one value and one id a row, whatever the size of the vocabulary.

    Args:
        local: see `gather_vocab_parallel_logits`; so the rest.
        rows: see there.
        vocab_size: see there.
        context: see there.

    Returns:
        int64 ``[rows]``, the same on all processes.

    Raises:
        FloatingPointError: a row has no finite logit.
    """
    chosen = np.full(rows, -1, np.int32)
    if local is not None:
        first, _ = split_evenly(vocab_size, context.tp.size, context.tp.rank)
        ids = local.argmax(1).astype(np.int32)  # nan counts as the highest
        best = np.take_along_axis(local, ids[:, None], 1)[:, 0]
        all_values, all_ids = context.tp.all_gather(best), context.tp.all_gather(ids + np.int32(first))
        # Parts are in the order of their ids, so the first of equal values has the lowest.
        owner = all_values.argmax(0)
        chosen = np.take_along_axis(all_ids, owner[None], 0)[0]
        chosen[~np.isfinite(all_values.max(0))] = -1
    chosen = context.pp.broadcast(chosen, context.pp.size - 1)
    check_finite(np.where(chosen < 0, np.nan, 0))
    return chosen.astype(np.int64)

"""Scoring on the ranks of a job: pairs of a context and a continuation in batches, which the replicas share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, Literal

from mindformers_ext.generate import GenerationStats, Likelihood, Pair, score_groups
from mindformers_ext.generate.model_call import cache_obstacle
from mindformers_ext.predict import Decode, Tokenizer
from mindformers_ext.predict.pairs import prefix_token, rolling_windows
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.replicas import Exchange


def _likelihoods(found: Sequence[dict[str, Any]]) -> list[Likelihood]:
    return [Likelihood(**fields) for fields in found]


def num_read(pairs: Sequence[Pair]) -> int:
    """Tokens that a group of pairs has, equal contexts counted once."""
    contexts = {tuple(context) for context, _ in pairs}
    return sum(map(len, contexts)) + sum(len(continuation) for _, continuation in pairs)


# A prompt is a list of pairs, an answer the list of their likelihoods.
LIKELIHOODS = Exchange(work=num_read, pack=lambda found: [asdict(one) for one in found], unpack=_likelihoods)


def shares_contexts(wanted: bool | Literal["auto"], model: Any) -> bool:
    """Returns whether equal contexts run once.

    Args:
        wanted: ``predict.share_prefix``; true logs why it cannot be.
        model: of the run.
    """
    obstacle = cache_obstacle(model)
    if wanted is True and obstacle is not None:
        logger.warning("predict.share_prefix: every prompt is computed as a whole: %s", obstacle)
    return wanted is not False and obstacle is None


def scoring_decode(
    model: Any,
    stats: GenerationStats,
    share_prefix: bool | Literal["auto"],
    chunk_size: int,
    step_check: Callable[[], Callable[[], None]] | None = None,
) -> Decode:
    """Returns what scores the pairs of some records on this rank's replica.

    Args:
        model: see `score_groups`, as the rest.
        stats: see there.
        share_prefix: see `shares_contexts`.
        chunk_size: see there.
        step_check: gives for each batch what is called before each of its forwards.
    """
    share = shares_contexts(share_prefix, model)

    def score(groups: list[Sequence[Pair]], indices: list[int]) -> list[list[Likelihood]]:
        check = None if step_check is None else step_check()
        return score_groups(model, groups, stats, share_prefix=share, chunk_size=chunk_size, before_forward=check)

    return score


def score_pairs(decode: Decode, pairs: Sequence[Pair], batch_size: int) -> list[Likelihood]:
    """Returns the likelihoods of pairs, the longest contexts first; neighbours of one context run together.

    Args:
        decode: see `scoring_decode`.
        pairs: in any order.
        batch_size: contexts in one batch.
    """
    groups = [list(group) for _, group in groupby(range(len(pairs)), key=lambda number: list(pairs[number][0]))]
    groups.sort(key=lambda group: -num_read([pairs[number] for number in group]))
    found: dict[int, Likelihood] = {}
    for start in range(0, len(groups), batch_size):
        batch = groups[start : start + batch_size]
        scored = decode([[pairs[number] for number in group] for group in batch], [group[0] for group in batch])
        for group, likelihoods in zip(batch, scored, strict=True):
            found |= zip(group, likelihoods, strict=True)
    return [found[number] for number in range(len(pairs))]


def rolling_bounds(
    tokenizer: Tokenizer | None, model_config: Any, prefix: int | None, max_length: int | None
) -> tuple[int, int]:
    """Returns the id before a text's first token and the length of a window, given or those of tokenizer and model.

    Raises:
        ValueError: one of them cannot be had.
    """
    if prefix is None:
        if tokenizer is None:
            raise ValueError("score_rolling() needs a prefix, as this Trainer has no tokenizer")
        prefix = prefix_token(tokenizer)
    max_length = getattr(model_config, "seq_length", None) if max_length is None else max_length
    if max_length is None:
        raise ValueError("score_rolling() needs max_length: the model's config does not give its length")
    return prefix, max_length


def score_rolling(
    decode: Decode, texts: Sequence[Sequence[int]], prefix: int, max_length: int, batch_size: int
) -> list[float]:
    """Returns the log-likelihood of whole texts; see `rolling_windows`.

    Args:
        decode: see `scoring_decode`.
        texts: token ids of each.
        prefix: see `rolling_windows`.
        max_length: see there.
        batch_size: windows in one batch.
    """
    windows = [rolling_windows(text, prefix, max_length) for text in texts]
    scored = iter(score_pairs(decode, [window for some in windows for window in some], batch_size))
    return [math.fsum(next(scored).total for _ in some) for some in windows]

"""Warpers of scores for sampling: temperature and the filters that remove unlikely tokens.

Each takes scores float32 ``[R, N]``, changes them in place and returns them; a removed token has -inf, and at least one
token (``min_keep``) of a row with a finite score stays. No warper looks at token ids, so all of them work on the
candidates that an earlier one has left, in the order of their ids.

Formulas are those of transformers 5.24. A comparison with a bound on probabilities has a tolerance of 1e-6 of that
bound, so that a token that lies on the bound by arithmetic is on the side where it belongs, whatever the rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.topk import top_candidates

Warper = Callable[[np.ndarray], np.ndarray]

_TOLERANCE = 1e-6
_TOP_H_CANDIDATES = 100
_LOWEST_PLAIN_TEMPERATURE = 1e-6
_HEAD = 1024  # rows longer than this are not sorted as a whole if it can be avoided


def temperature(scores: np.ndarray, value: float) -> np.ndarray:
    """Divides by ``value``."""
    if value < _LOWEST_PLAIN_TEMPERATURE:
        scores -= np.nan_to_num(scores.max(axis=1, keepdims=True))  # the best score must not overflow
    with np.errstate(over="ignore"):
        scores /= np.float32(value)
    return scores


def top_k(scores: np.ndarray, k: int, min_keep: int = 1) -> np.ndarray:
    """Removes scores below the k-th highest; all that equal it stay."""
    count = max(k, min_keep)
    if count >= scores.shape[1]:
        return scores
    columns, valid = _contenders(scores, count)
    narrow = narrowed(scores, columns, valid)
    narrow[narrow < _nth_of(narrow, count)] = -np.inf
    return spread(scores, narrow, columns, valid)


def top_p(scores: np.ndarray, p: float, min_keep: int = 1) -> np.ndarray:
    """Keeps the smallest set of the most likely tokens whose probabilities sum up to ``p`` or more.

    Of equal scores at the border the higher positions stay, as in a stable ascending sort.
    """
    probs = softmax(scores)
    spare = (1.0 - p) * (1.0 + _TOLERANCE)  # mass that may go
    for size in (_HEAD, 16 * _HEAD):
        if 4 * size > scores.shape[1] or size < min_keep:
            continue
        columns, valid = _contenders(scores, size)
        weights = np.where(valid, np.take_along_axis(probs, columns, 1), 0)
        tail_mass = probs.sum(axis=1, dtype=np.float64) - weights.sum(axis=1, dtype=np.float64)
        if (tail_mass <= spare).all():  # all of the tail goes, and the border lies within the head
            narrow = narrowed(scores, columns, valid)
            return spread(scores, _remove_lowest(narrow, weights, spare - tail_mass, min_keep), columns, valid)
    return _remove_lowest(scores, probs, np.full(len(scores), spare), min_keep)


def _remove_lowest(scores: np.ndarray, probs: np.ndarray, spare: np.ndarray, min_keep: int) -> np.ndarray:
    """Removes the lowest scores while the sum of their probabilities is at most ``spare`` ``[R]``."""
    order = _ascending(scores)
    mass = np.cumsum(np.take_along_axis(probs, order, 1), axis=1, dtype=np.float64)
    removed = mass <= spare[:, None]
    removed[:, -min_keep:] = False
    mask = np.empty_like(removed)
    np.put_along_axis(mask, order, removed, 1)
    scores[mask] = -np.inf
    return scores


def min_p(scores: np.ndarray, share: float, min_keep: int = 1) -> np.ndarray:
    """Removes tokens whose probability is below ``share`` of the highest one."""
    probs = softmax(scores)
    return _remove_below(scores, probs, share * probs.max(axis=1, keepdims=True), min_keep)


def typical(scores: np.ndarray, mass: float, min_keep: int = 1) -> np.ndarray:
    """Keeps the tokens whose surprise is nearest to the entropy, until their probabilities sum up to ``mass``."""
    probs, surprise, entropy = _information(scores)
    distance = np.abs(surprise - entropy)
    order = _ascending(distance)
    covered = np.cumsum(np.take_along_axis(probs, order, 1), axis=1, dtype=np.float64)
    last = np.minimum((covered < mass * (1.0 - _TOLERANCE)).sum(axis=1), scores.shape[1] - 1)
    border = np.take_along_axis(distance, np.take_along_axis(order, last[:, None], 1), 1)
    removed = distance > border
    np.put_along_axis(removed, order[:, :min_keep], False, 1)
    scores[removed] = -np.inf
    return scores


def epsilon_cutoff(scores: np.ndarray, epsilon: float, min_keep: int = 1) -> np.ndarray:
    """Removes tokens whose probability is below ``epsilon``."""
    return _remove_below(scores, softmax(scores), epsilon, min_keep)


def eta_cutoff(scores: np.ndarray, eta: float, min_keep: int = 1) -> np.ndarray:
    """Removes tokens whose probability is below ``min(eta, sqrt(eta) * exp(-entropy))``."""
    probs, _, entropy = _information(scores)
    return _remove_below(scores, probs, np.minimum(eta, np.sqrt(eta) * np.exp(-entropy)), min_keep)


def top_h(scores: np.ndarray, share: float) -> np.ndarray:
    """Of the best 100 keeps the first ones whose part of the entropy sums up to ``share`` of it, one at least."""
    best, columns = top_candidates(scores, _TOP_H_CANDIDATES)
    probs, surprise, entropy = _information(best)
    spent = np.cumsum(_weighted(probs, surprise), axis=1, dtype=np.float64)
    kept = spent <= share * entropy * (1.0 + _TOLERANCE)
    kept[:, 0] = True
    best[~kept] = -np.inf
    scores.fill(-np.inf)
    np.put_along_axis(scores, columns, best, 1)
    return scores


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Turns scores into log-probabilities."""
    scores -= _highest(scores)
    with np.errstate(divide="ignore", invalid="ignore"):
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores


def softmax(scores: np.ndarray) -> np.ndarray:
    """Returns probabilities float32 ``[R, N]``; zeros for a row without a finite score."""
    probs = scores - _highest(scores)
    np.exp(probs, out=probs)
    total = probs.sum(axis=1, keepdims=True)
    probs /= np.where(total == 0, 1, total)
    return probs


def _ascending(values: np.ndarray) -> np.ndarray:
    """The stable argsort of float32 ``[R, N]``, made by sorting integers of value and position, which is far faster."""
    bits = (values + np.float32(0)).view(np.int32)  # -0 becomes 0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32
    keys |= np.arange(values.shape[1])
    keys.sort(axis=1)
    return keys & 0xFFFFFFFF


def _highest(scores: np.ndarray) -> np.ndarray:
    highest = scores.max(axis=1, keepdims=True)
    return np.where(np.isneginf(highest), 0, highest)


def _information(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities and surprise ``-ln p`` ``[R, N]``, and entropy ``[R, 1]``."""
    probs = softmax(scores)
    surprise = -log_softmax(scores.copy())
    return probs, surprise, _weighted(probs, surprise).sum(axis=1, keepdims=True)


def _weighted(probs: np.ndarray, surprise: np.ndarray) -> np.ndarray:
    """Each token's part of the entropy; a token that cannot come has none."""
    return np.multiply(probs, surprise, out=np.zeros_like(probs), where=probs > 0)


def _remove_below(scores: np.ndarray, probs: np.ndarray, bound: np.ndarray | float, min_keep: int) -> np.ndarray:
    removed = probs < np.multiply(bound, 1.0 - _TOLERANCE)
    removed &= scores < _nth_highest(scores, min_keep)
    scores[removed] = -np.inf
    return scores


def _nth_highest(scores: np.ndarray, n: int) -> np.ndarray:
    """The n-th highest score of each row, ``[R, 1]``, duplicates counted; the lowest if there are fewer than n."""
    if n == 1:
        return scores.max(axis=1, keepdims=True)
    return _nth_of(narrowed(scores, *_contenders(scores, n)), n)


def _nth_of(scores: np.ndarray, n: int) -> np.ndarray:
    place = max(scores.shape[1] - n, 0)
    return np.partition(scores, place, axis=1)[:, place, None]


def _contenders(scores: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A few columns of each row that hold its ``n`` highest scores and all that equal them; see `positions`.

    The columns are dealt to more than ``n`` groups. The n-th highest of the groups' maxima is a lower bound of the n-th
    highest score, since n scores reach it, and one pass finds what lies above.
    """
    rows, size = scores.shape
    groups = min(8 * n, size // 2)
    if groups < 2 * n:
        return np.broadcast_to(np.arange(size), scores.shape), np.ones(scores.shape, bool)
    whole = size - size % groups
    maxima = scores[:, :whole].reshape(rows, -1, groups).max(axis=1)
    return positions(~(scores < _nth_of(maxima, n)))  # with nan, which the choice refuses


def positions(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns that are True in each row, rising, int64 ``[R, most]``, and which of these are real, bool."""
    rows, found = np.divmod(np.flatnonzero(mask), mask.shape[1])
    counts = np.bincount(rows, minlength=len(mask))
    valid = np.arange(int(counts.max(initial=0))) < counts[:, None]
    columns = np.zeros(valid.shape, np.int64)
    columns[valid] = found
    return columns, valid


def narrowed(scores: np.ndarray, columns: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The scores float32 of ``columns`` where ``valid``, else -inf."""
    return np.where(valid, np.take_along_axis(scores, columns, 1), np.float32(-np.inf))


def spread(scores: np.ndarray, narrow: np.ndarray, columns: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Makes ``narrow`` the scores of ``columns`` where ``valid`` and -inf those of all others."""
    scores.fill(-np.inf)
    rows = np.broadcast_to(np.arange(len(scores))[:, None], columns.shape)
    scores[rows[valid], columns[valid]] = narrow[valid]
    return scores


class Warpers:
    """The warpers of a configuration one after another, on the candidates alone as soon as these are few."""

    def __init__(self, warpers: list[Warper]) -> None:
        self._warpers = warpers

    def __call__(self, scores: np.ndarray, _: object = None) -> np.ndarray:
        """Changes ``[R, V]`` in place."""
        for index, warper in enumerate(self._warpers):
            scores = warper(scores)
            rest = self._warpers[index + 1 :]
            candidates = few_candidates(scores) if rest else None
            if candidates is not None:
                return spread(scores, Warpers(rest)(narrowed(scores, *candidates)), *candidates)
        return scores


def few_candidates(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """`positions` of the scores that are not -inf, nan included, or None if it would not pay to look at these alone."""
    if scores.shape[1] < _HEAD:
        return None
    candidates = scores != -np.inf
    return positions(candidates) if np.count_nonzero(candidates) <= candidates.size // 8 else None


def num_contenders(config: GenerationConfig) -> int | None:
    """How many of the best scores of a row decide a sample, with all that equal the last of them; None: all scores."""
    if not config.do_sample or config.num_beams > 1 or config.temperature < _LOWEST_PLAIN_TEMPERATURE:
        return None
    if config.top_h is not None:
        return _TOP_H_CANDIDATES
    return config.top_k if config.top_k > 0 else None


def build_warpers(config: GenerationConfig) -> list[Warper]:
    """The warpers that ``config`` asks for, in transformers' order."""
    warpers: list[Warper] = []
    if config.do_sample:
        # Beams need a token to go on with beside every EOS.
        keep = max(len(config.eos_token_ids), 1) + 1 if config.num_beams > 1 else 1
        if config.temperature != 1.0:
            warpers.append(partial(temperature, value=config.temperature))
        if config.top_h is not None:
            warpers.append(partial(top_h, share=config.top_h))
        if config.top_k > 0:
            warpers.append(partial(top_k, k=config.top_k, min_keep=keep))
        if config.top_p < 1.0:
            warpers.append(partial(top_p, p=config.top_p, min_keep=keep))
        if config.min_p is not None:
            warpers.append(partial(min_p, share=config.min_p, min_keep=keep))
        if config.typical_p < 1.0:
            warpers.append(partial(typical, mass=config.typical_p, min_keep=keep))
        if config.epsilon_cutoff > 0.0:
            warpers.append(partial(epsilon_cutoff, epsilon=config.epsilon_cutoff, min_keep=keep))
        if config.eta_cutoff > 0.0:
            warpers.append(partial(eta_cutoff, eta=config.eta_cutoff, min_keep=keep))
    if config.renormalize_logits:
        warpers.append(log_softmax)
    return warpers

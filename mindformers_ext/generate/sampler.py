"""The choice of the next token from float32 scores on the host."""

from __future__ import annotations

import numpy as np

from mindformers_ext.generate import warpers
from mindformers_ext.generate.context import StepContext
from mindformers_ext.generate.noise import row_keys, uniform
from mindformers_ext.generate.penalties import penalize_seen
from mindformers_ext.generate.topk import check_finite

_CHUNK = 1 << 18  # scores that get their noise at once; it bounds the memory


def greedy_sample(scores: np.ndarray) -> np.ndarray:
    """Returns the ids int64 ``[B]`` of the highest scores of ``[B, V]``; ties go to the lowest id.

    Raises:
        FloatingPointError: a row has no finite score, or has nan.
    """
    ids = scores.argmax(axis=1)
    check_finite(scores[np.arange(len(ids)), ids])
    return ids


def sample(scores: np.ndarray, context: StepContext, seed: int) -> np.ndarray:
    """Draws one token a row from softmax(scores), by noise that depends on what is drawn alone; see `noise`.

    Args:
        scores: float32 ``[R, V]``; -inf is never drawn.
        context: tells records, sequences and step of the rows.
        seed: of the run.

    Returns:
        Ids int64 ``[R]``.

    Raises:
        FloatingPointError: a row has no finite score, or has nan.
    """
    return _draw(scores, row_keys(seed, context.record_ids, context.sequence_ids, context.step))


def _draw(scores: np.ndarray, keys: np.ndarray) -> np.ndarray:
    check_finite(scores.max(axis=1))
    columns = np.arange(scores.shape[1])[None]
    candidates = warpers.few_candidates(scores)
    if candidates is not None:
        scores, columns = warpers.narrowed(scores, *candidates), candidates[0]
    chosen = np.empty(len(scores), np.int64)
    rows = max(1, _CHUNK // scores.shape[1])
    for start in range(0, len(scores), rows):
        part = slice(start, start + rows)
        tokens = columns if len(columns) == 1 else columns[part]
        winners = _race(scores[part], keys[part], tokens)
        chosen[part] = np.broadcast_to(tokens, (len(winners), tokens.shape[1]))[np.arange(len(winners)), winners]
    return chosen


def _race(scores: np.ndarray, keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Columns int64 ``[R]`` of the greatest ``score - ln(noise)``, the first of equal ones.

    Noise ``-ln u`` is at least ``1 - u``, so a token can beat the most likely one only if ``1 - u`` is at most
    ``exp(score - best)``; of a long row few pass this cheap test and need logarithms.
    """
    best = scores.argmax(axis=1)[:, None]
    draws = uniform(keys, tokens)
    to_beat = np.take_along_axis(scores, best, 1) - np.log(-np.log(np.take_along_axis(draws, best, 1)))
    with np.errstate(over="ignore"):
        possible = 1.0 - draws <= np.exp(scores - to_beat) * (1.0 + 1e-6)
    np.put_along_axis(possible, best, True, 1)  # scores beyond 1e14 swallow the noise
    values = np.full(scores.shape, -np.inf)
    values[possible] = scores[possible] - np.log(-np.log(draws[possible]))
    return values.argmax(axis=1)


def top_k_sample(logits: np.ndarray, top_k: int, temperature: float = 1.0, seed: int = 0, step: int = 0) -> np.ndarray:
    """Draws ids int64 ``[B]`` from the ``top_k`` highest of ``[B, V]``; 0 takes all. Row ``i`` is record ``i``."""
    scores = warpers.temperature(logits.astype(np.float32), temperature)
    return _sample_rows(warpers.top_k(scores, top_k) if top_k > 0 else scores, seed, step)


def top_p_sample(
    logits: np.ndarray, top_p: float, temperature: float = 1.0, seed: int = 0, step: int = 0
) -> np.ndarray:
    """Draws ids int64 ``[B]`` from the smallest set of mass ``top_p`` of ``[B, V]``. Row ``i`` is record ``i``."""
    scores = warpers.temperature(logits.astype(np.float32), temperature)
    return _sample_rows(warpers.top_p(scores, top_p) if top_p < 1.0 else scores, seed, step)


def _sample_rows(scores: np.ndarray, seed: int, step: int) -> np.ndarray:
    rows = np.arange(len(scores))
    return _draw(scores, row_keys(seed, rows, np.zeros_like(rows), step))


def _apply_repetition_penalty(
    logits: np.ndarray, input_ids: np.ndarray, penalty: float, attention_mask: np.ndarray | None = None
) -> np.ndarray:
    """Returns ``logits`` ``[B, V]`` after a penalty on the ids of ``input_ids`` ``[B, T]``, pads (mask 0) excluded."""
    real = np.ones(input_ids.shape, bool) if attention_mask is None else attention_mask != 0
    real = real & (input_ids >= 0) & (input_ids < logits.shape[1])
    return penalize_seen(logits.astype(np.float32), np.nonzero(real)[0], input_ids[real], penalty)

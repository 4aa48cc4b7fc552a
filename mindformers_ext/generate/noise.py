"""Random numbers without a state: each is a hash of what it is for.

The noise of a token is a function of (seed, record, sequence, step, token id) alone. So an answer does not depend on
the size of the batch, on its order or on which other records there are, and each process can make the noise of the
tokens that it holds. The hash is SplitMix64 (Steele, Lea, Flood 2014): a row's key starts a sequence, and the token id
is the index of the number within it.
"""

from __future__ import annotations

import secrets

import numpy as np

SEED_LIMIT = 2**32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def fresh_seed() -> int:
    """Draws a seed from the system's randomness."""
    return secrets.randbelow(SEED_LIMIT)


def row_keys(seed: int, record_ids: np.ndarray, sequence_ids: np.ndarray, step: int | np.ndarray) -> np.ndarray:
    """The keys uint64 ``[R]`` of rows at a step, or each at its own, int ``[R]``."""
    keys = _mix(np.full(len(record_ids), seed, np.uint64))
    for part in (record_ids, sequence_ids, np.broadcast_to(step, len(record_ids))):
        keys = _mix(_advance(keys, np.asarray(part)))
    return keys


def exponential(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Exponentially distributed noise float64 ``[R, N]`` of ``tokens`` ``[R, N]`` or ``[N]``.

    ``keys`` are those of the rows, uint64 ``[R]``. The token with the greatest ``score - ln(noise)`` is a draw from
    softmax(scores): the Gumbel-max trick. The ``k`` greatest are a draw of k tokens without replacement.
    """
    return -np.log(uniform(keys, tokens))


def uniform(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Uniform noise float64 ``[R, N]`` within (0, 1), both ends excluded."""
    bits = _mix(_advance(keys[:, None], tokens))
    bits >>= np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52  # exact, and never 0 or 1


def _advance(keys: np.ndarray, index: np.ndarray) -> np.ndarray:
    return keys + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN


def _mix(bits: np.ndarray) -> np.ndarray:
    """Changes uint64 in place."""
    bits ^= bits >> np.uint64(30)
    bits *= _FIRST
    bits ^= bits >> np.uint64(27)
    bits *= _SECOND
    bits ^= bits >> np.uint64(31)
    return bits

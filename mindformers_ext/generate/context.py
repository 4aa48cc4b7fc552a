"""What processors know of the rows whose next token is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass
class StepContext:
    """What is known of the rows before the next token is chosen. Make a new one for each step.

    Attributes:
        sequences: the real ids of each row, prompt and new tokens, no pads; R integer arrays.
        prompt_lengths: int ``[R]``, real tokens of the prompts.
        record_ids: int ``[R]``, index of the record that a row answers.
        sequence_ids: int ``[R]``, which of the record's returned sequences a row is.
        step: new tokens that each row already has, int ``[R]``, or one number for all.
    """

    sequences: Sequence[np.ndarray]
    prompt_lengths: np.ndarray
    record_ids: np.ndarray
    sequence_ids: np.ndarray
    step: int | np.ndarray

    @cached_property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row, int ``[R]``."""
        return np.fromiter(map(len, self.sequences), np.int64, len(self.sequences))

    @cached_property
    def new_lengths(self) -> np.ndarray:
        """New tokens of each row, int ``[R]``."""
        return self.lengths - self.prompt_lengths

    @cached_property
    def ids(self) -> np.ndarray:
        """The ids of all rows one after another, int64 ``[sum of lengths]``."""
        return np.concatenate(self.sequences).astype(np.int64, copy=False) if self.sequences else np.empty(0, np.int64)

    @cached_property
    def rows(self) -> np.ndarray:
        """The row of each of `ids`."""
        return np.repeat(np.arange(len(self.sequences)), self.lengths)

    def history(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """`rows` and `ids` without ids that scores of width ``vocab_size`` do not have."""
        if not self.ids.size or self.ids.max() < vocab_size:
            return self.rows, self.ids
        inside = self.ids < vocab_size
        return self.rows[inside], self.ids[inside]

    def tails(self, length: int) -> np.ndarray:
        """The last ``length`` ids of each row, int64 ``[R, length]``; -1, which is no id, where a row is shorter."""
        result = np.full((len(self.sequences), length), -1, np.int64)
        for row, sequence in zip(result, self.sequences, strict=True):
            kept = min(length, len(sequence))
            row[length - kept :] = sequence[len(sequence) - kept :]
        return result

    def padded(self, filler: int) -> np.ndarray:
        """The sequences as int64 ``[R, T]``, padded on the left."""
        longest = int(self.lengths.max(initial=0))
        result = np.full((len(self.sequences), longest), filler, np.int64)
        result[np.arange(longest) >= longest - self.lengths[:, None]] = self.ids
        return result


Processor = Callable[[np.ndarray, StepContext], np.ndarray]

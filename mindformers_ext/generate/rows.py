"""What a generation knows of its rows while they grow, and what it says of them at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindformers_ext.generate.processors import StepContext

FinishReason = Literal["eos", "stop", "length", "time"]


@dataclass(frozen=True)
class GeneratedRow:
    """What one row got.

    Attributes:
        token_ids: new tokens only; an EOS or the end of a stop string that ended the row is in the last of them.
        finish_reason: ``eos``; ``stop`` for a stop string or a plug-in; ``length``; ``time`` for max_time.
        stop_string: the stop string that ended the row.
        stop_position: where it begins in the text of the new tokens, special tokens included; in characters.
        sequence_idx: which of the prompt's num_return_sequences answers this is; of beams, 0 is the best.
        score: of a beam: sum of log-probabilities / length^length_penalty.
        logprobs: log-probability of each new token, if asked for.
        top_logprobs: the most likely tokens at each place, best first, as (id, log-probability), if asked for.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_position: int | None = None
    sequence_idx: int = 0
    score: float | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


_BY_ROW = ("prompt_lengths", "record_ids", "sequence_ids", "budgets", "origins", "steps", "_ids")


class Rows:
    """The unfinished rows of a batch: their ids and whose answers they are.

    Args:
        prompts: token ids of each row, none empty.
        record_ids: index of the record that each row answers.
        budgets: most new tokens of each row.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], record_ids: Sequence[int], budgets: Sequence[int]) -> None:
        self.prompt_lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self.record_ids = np.array(record_ids, np.int64)
        self.sequence_ids = np.zeros(len(prompts), np.int64)
        self.budgets = np.array(budgets, np.int64)
        self.origins = np.arange(len(prompts))  # row numbers at the start, or those that `select` made of them
        self.steps = np.zeros(len(prompts), np.int64)  # new tokens that each row has
        self._ids = np.zeros((len(prompts), int((self.prompt_lengths + self.budgets).max())), np.int64)
        for row, prompt in enumerate(prompts):
            self._ids[row, : len(prompt)] = prompt

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def step(self) -> int:
        """New tokens of the row that has the most: of every row, where all of them began together."""
        return int(self.steps.max(initial=0))

    def context(self) -> StepContext:
        """What processors and criteria are told."""
        lengths = self.prompt_lengths + self.steps
        return StepContext(
            sequences=[ids[:length] for ids, length in zip(self._ids, lengths.tolist(), strict=True)],
            prompt_lengths=self.prompt_lengths,
            record_ids=self.record_ids,
            sequence_ids=self.sequence_ids,
            step=self.steps,
        )

    def append(self, tokens: np.ndarray) -> None:
        """Adds one token to each row, int ``[R]``."""
        self._ids[np.arange(len(self)), self.prompt_lengths + self.steps] = tokens
        self.steps = self.steps + 1  # not in place: contexts hold the array

    def new_tokens(self) -> np.ndarray:
        """The new tokens so far, int64 ``[R, step]``; a row's own are the first ``steps`` of them."""
        columns = self.prompt_lengths[:, None] + np.arange(self.step)
        return np.take_along_axis(self._ids, np.minimum(columns, self._ids.shape[1] - 1), axis=1)

    def select(self, rows: np.ndarray) -> Rows:
        """The rows ``rows`` of these, int ``[new R]``; a row may be taken more than once."""
        chosen = object.__new__(Rows)
        for name in _BY_ROW:
            setattr(chosen, name, getattr(self, name)[rows])
        return chosen

    def with_rows(self, others: Rows) -> Rows:
        """These rows, and others behind them."""
        joined = object.__new__(Rows)
        width = max(self._ids.shape[1], others._ids.shape[1])
        for name in _BY_ROW:
            parts = [getattr(rows, name) for rows in (self, others)]
            if name == "_ids":
                parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
            setattr(joined, name, np.concatenate(parts))
        return joined

    def repeated(self, count: int) -> Rows:
        """Each row ``count`` times, one after another, as sequences 0 to ``count`` - 1 of its record."""
        rows = self.select(np.repeat(np.arange(len(self)), count))
        rows.sequence_ids = np.tile(np.arange(count), len(self))
        rows.origins = np.arange(len(rows))
        return rows

"""An answer as the model gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Completion:
    """What the model adds to one prompt.

    Attributes:
        token_ids: the new ids only, with the EOS that ended them.
        finish_reason: why they end.
        stop_string: the stop string that ended them; the text is cut before it.
        stop_position: where it begins in the text of the new ids, special tokens included; in characters.
        score: of a beam.
        logprobs: log-probability of each new id.
        top_logprobs: the most likely ids at each place as (id, log-probability).
    """

    token_ids: list[int]
    finish_reason: Literal["eos", "length", "stop", "time"]
    stop_string: str | None = None
    stop_position: int | None = None
    score: float | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None

"""Where the time of generations went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class GenerationStats:
    """Time and tokens of one or more generations, prompts and answers apart; seconds.

    A row's first token comes from the prefill, so ``decode_tokens`` counts those from the second on. Both times
    include what a forward waits for other processes.

    Of beams, each one's tokens count: they are what the model ran.

    ``forwards`` counts runs of the model, idle ones aside; ``cache_bytes`` is the most that a cache has held.

    Of ``prefill_tokens``, ``shared_tokens`` were taken from states of common beginnings; these took ``prefix_tokens``
    to compute, and ``prefix_bytes`` at most. Of ``drafted_tokens``, which prompt lookup proposed, ``accepted_tokens``
    were what the model chose.

    Attributes:
        steps: forwards that are done, for those who watch a run; a prefill counts as one.
    """

    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    forwards: int = 0
    cache_bytes: int = 0
    shared_tokens: int = 0
    prefix_tokens: int = 0
    prefix_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __post_init__(self) -> None:
        self.steps = 0

    def add_forwards(self, count: int, cache_bytes: int) -> None:
        """Counts runs of the model, whose cache held up to ``cache_bytes``."""
        self.forwards += count
        self.cache_bytes = max(self.cache_bytes, cache_bytes)

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """Counts ``tokens`` and the time inside."""
        started = time.perf_counter()
        yield
        self.prefill_seconds += time.perf_counter() - started
        self.prefill_tokens += tokens
        self.steps += 1

    @contextmanager
    def decode(self) -> Iterator[None]:
        """Counts the time inside."""
        started = time.perf_counter()
        yield
        self.decode_seconds += time.perf_counter() - started
        self.steps += 1

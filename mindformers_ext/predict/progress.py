"""How far a run is: a bar on a terminal, lines of the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from mindformers_ext.predict.records import record_count
from mindformers_ext.predict.sources import input_files
from mindformers_ext.predict.summary import RunSummary

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0
_BLOCK = 1 << 20
# The other forms of input have no records that could be counted by looking for ends of lines.
_COUNTED = (".jsonl", ".txt")


class Progress:
    """Context manager that is told of each answered batch.

    Args:
        shown: False shows nothing.
        total: records of the run if known; there is no remaining time without it.
        terminal: whether stderr is one; None asks it.
        clock: seconds, for the rates.
    """

    def __init__(
        self,
        shown: bool,
        total: int | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._clock = clock
        self._start = clock()
        self._next_line = self._start + SECONDS_BETWEEN_LINES
        self._has_told = False
        animated = sys.stderr.isatty() if terminal is None else terminal
        self._logs = shown and not animated
        self._bar: Any = None
        if shown and animated:
            self._bar = tqdm(desc="predict", unit="record", total=total, file=sys.stderr, mininterval=0.2)

    def update(self, num_records: int, summary: RunSummary) -> None:
        """Takes note of ``num_records`` more that were written; ``summary`` counts all so far."""
        now = self._clock()
        if self._bar is not None:
            self._bar.set_postfix_str(self._state(summary, now), refresh=False)
            self._bar.update(num_records)
        elif self._logs and (now >= self._next_line or (summary.num_answers and not self._has_told)):
            # The first batch that is answered has a line: it tells how long the run will take.
            self._has_told = self._has_told or summary.num_answers > 0
            self._next_line = now + SECONDS_BETWEEN_LINES
            logger.info("predict: %s", self._line(summary, now))

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def _line(self, summary: RunSummary, now: float) -> str:
        done, seconds = summary.num_records + summary.num_resumed, now - self._start
        if self._total is None:
            return f"{done} records, {self._state(summary, now)}"
        line = f"{done} of about {self._total} records, {self._state(summary, now)}"
        if not summary.num_answers:
            return line
        # Records of an earlier run took no time of this one.
        left = max(self._total - done, 0) * seconds / summary.num_records
        return f"{line}, about {_span(left)} left"

    def _state(self, summary: RunSummary, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        rates = f"{summary.prompt_tokens / seconds:.1f} tokens/s in, {summary.new_tokens / seconds:.1f} out"
        return f"{rates}, {summary.num_errors} errors"


def estimate_total(input_data: Any) -> int | None:
    """Returns about how many records an input has: of files their lines; None where only reading it would tell."""
    files = input_files(input_data)
    if files is None:
        return record_count(input_data)
    if any(not path.lower().endswith(_COUNTED) for path in files.paths):
        return None
    return sum(map(_count_lines, files.paths))


def _count_lines(path: str) -> int:
    lines, last = 0, b""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last not in (b"", b"\n"))


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

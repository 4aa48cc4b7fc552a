"""Ends a process in which nothing moves any more, and says where and whose fault it is.

A rank that waits for another one is inside a call that Python cannot interrupt, so a thread watches and ends the
process. Each rank also leaves a small file, a heartbeat, from which the others tell who of them stopped.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# The launcher sets it to a folder beside the logs.
HEARTBEAT_FOLDER = "MSRUN_HEARTBEATS"
EXIT_STUCK = 6
_INTERVAL_SECONDS = 1.0
_SILENT_SECONDS = 5.0
_SHOWN_RECORDS = 16


class Watchdog:
    """Watches the phases of a run on this rank.

    Attributes:
        records: indices of the records that are being answered.
    """

    def __init__(
        self, rank: int, world_size: int, folder: str | None = None, leave: Callable[[int], Any] = os._exit
    ) -> None:
        """Watches nothing yet.

        Args:
            rank: of this process.
            world_size: processes of the job.
            folder: where the ranks keep their heartbeats; None takes the one of the environment, if it has one.
            leave: ends the process.
        """
        self.records: Sequence[int] = ()
        self._rank, self._world_size, self._leave = rank, world_size, leave
        folder = os.environ.get(HEARTBEAT_FOLDER) if folder is None else folder
        self._folder = Path(folder) if folder else None
        self._phase, self._key, self._limit = "", "", 0.0
        self._progress: Callable[[], Any] = tuple
        self._waiting_for: Callable[[], Sequence[int]] = tuple
        self._seen: Any = None
        self._still = 0.0  # seconds without progress

    @contextmanager
    def phase(
        self,
        name: str,
        limit: float,
        key: str,
        progress: Callable[[], Any] = tuple,
        waiting_for: Callable[[], Sequence[int]] = tuple,
    ) -> Iterator[None]:
        """Ends the process if the block does not progress for `limit` seconds.

        Seconds count while this process runs: a machine that sleeps, or a process that is stopped and goes on, is not
        taken for one that hangs.

        Args:
            name: what the block does, for the message.
            limit: 0 does not watch.
            key: name of the setting that gave the limit.
            progress: is asked once a second, from another thread; a value that differs from the last one is progress.
            waiting_for: ranks that this one is waiting for.
        """
        if limit <= 0:
            yield
            return
        self._phase, self._key, self._limit = name, key, limit
        self._progress, self._waiting_for = progress, waiting_for
        self._seen, self._still = progress(), 0.0
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._beat()

    def _watch(self, stop: threading.Event) -> None:
        interval = min(_INTERVAL_SECONDS, self._limit / 4)
        last = time.monotonic()
        while not stop.wait(interval):
            now = time.monotonic()
            seen = self._progress()
            # A longer pause was not spent waiting: the whole process stood still.
            self._still = self._still + min(now - last, 3 * interval) if seen == self._seen else 0.0
            self._seen, last = seen, now
            self._beat()
            if self._still >= self._limit:
                self._give_up()
                return

    def _beat(self) -> None:
        """Writes the heartbeat. A disk that fails must not end the run."""
        if self._folder is None:
            return
        beat = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": self._phase,
            "progress": self._seen,
            "still": round(self._still, 1),
            "records": list(self.records)[:_SHOWN_RECORDS],
            "waiting_for": list(self._waiting_for()),
            "time": time.time(),
        }
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = self._folder / f"rank_{self._rank}.new"
            draft.write_text(json.dumps(beat))
            draft.replace(self._folder / f"rank_{self._rank}.json")

    def _give_up(self) -> None:
        """Says what is known and ends the process."""
        faulthandler.dump_traceback(file=sys.stderr)
        lines = [self._own_state(), *self._states_of_others()]
        print("error: " + "; ".join(lines), file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._leave(EXIT_STUCK)

    def _own_state(self) -> str:
        waiting = _ranks(self._waiting_for())
        where = f"it waits for {waiting}" if waiting else "it does not wait for another rank"
        return (
            f"rank {self._rank} ({socket.gethostname()}): nothing has moved for {self._still:.0f} s in phase "
            f"{self._phase!r}{_at(self._seen, self.records)}; {where} (limit: {self._key} {self._limit:g} s)"
        )

    def _states_of_others(self) -> Iterator[str]:
        """What the heartbeats of the ranks say that are to blame: those that are silent, or wait for nobody."""
        if self._folder is None:
            return
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            try:
                beat = json.loads((self._folder / f"rank_{rank}.json").read_text())
            except (OSError, ValueError):
                continue
            silent = time.time() - beat["time"]
            where = f"in phase {beat['phase']!r}{_at(beat['progress'], beat['records'])}, process {beat['pid']}"
            if silent > _SILENT_SECONDS or silent > self._limit:
                yield f"rank {rank} ({beat['host']}) gave no sign of life for {silent:.0f} s, {where}"
            elif not beat["waiting_for"] and beat["still"] > self._limit / 2:
                yield f"rank {rank} ({beat['host']}) has not moved for {beat['still']:.0f} s, {where}"


def _at(progress: Any, records: Sequence[int]) -> str:
    step = f" at step {progress[0]}" if progress else ""
    more = ", ..." if len(records) > _SHOWN_RECORDS else ""
    shown = ", ".join(str(index) for index in list(records)[:_SHOWN_RECORDS])
    return f"{step} of records {shown}{more}" if records else step


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""

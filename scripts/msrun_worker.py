"""Runs the command of one msrun process and records how it ended.

msrun reports every failure as 1, kills the other workers whenever one does not return 0, and keeps waiting for its
scheduler when a worker dies before the cluster is built (2 hours by default). So msrun_launcher.sh puts this program
between msrun and the command. MSRUN_RECORDS names the folder of the exit codes, one file a rank; without it nothing is
recorded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FINISHED_WITH_ERROR_RECORDS = 3
STOPPED_AND_RESUMABLE = 4
# With these codes all workers of a job end alike, and none of them has to be killed.
ORDERLY = (0, FINISHED_WITH_ERROR_RECORDS, STOPPED_AND_RESUMABLE)
SCHEDULER_GRACE_SECONDS = 3.0
POLL_SECONDS = 0.5


def failure_recorded(records: Path) -> bool:
    """Whether a worker of this node has ended with a code that means a failed job."""
    orderly = [str(code) for code in ORDERLY]
    return any(path.read_text() not in orderly for path in records.iterdir() if path.name.isdigit())


def watch_scheduler(scheduler: int, records: Path) -> None:
    """End process `scheduler`, our parent, soon after a worker failed: it would wait for that worker."""
    while os.getppid() == scheduler:
        if records.is_dir() and failure_recorded(records):
            time.sleep(SCHEDULER_GRACE_SECONDS)
            if os.getppid() == scheduler:
                os.kill(scheduler, signal.SIGKILL)
            return
        time.sleep(POLL_SECONDS)


def run_scheduler(command: list[str], records: Path | None) -> None:
    """Become the scheduler, with a child that watches the workers. Does not return."""
    if records is not None:
        scheduler = os.getpid()
        if os.fork() == 0:
            watch_scheduler(scheduler, records)
            os._exit(0)
    os.execvp(command[0], command)


def run_worker(command: list[str], records: Path | None, rank: str) -> int:
    """Run `command` and return what msrun shall see: its exit code, 0 where the other workers must not be killed."""
    process = subprocess.Popen(command)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, frame: process.send_signal(number))
    if records is not None:
        (records / f"{rank}.pid").write_text(f"{os.getpid()}\n")  # whom the launcher passes a signal on to
    code = process.wait()
    if code < 0:  # ended by a signal: the number that a shell would give
        code = 128 - code
    if records is None:
        return code
    # Written under another name first: the launcher and the watcher never see half a record.
    draft = records / f"{rank}.new"
    draft.write_text(str(code))
    draft.rename(records / rank)
    return 0 if code in ORDERLY else code


def main(command: list[str]) -> int:
    """Run `command` in the role that msrun gave this process."""
    folder = os.environ.pop("MSRUN_RECORDS", "")
    records = Path(folder) if folder else None
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        # msrun starts a scheduler wherever the master's address is a local one, also for a second node on this host.
        if os.environ.get("MSRUN_NODE_RANK", "0") != "0":
            return 0
        run_scheduler(command, records)
    return run_worker(command, records, os.environ.get("RANK_ID", "0"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

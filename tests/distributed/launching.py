"""Jobs of several processes, through the launcher."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "jobs"


class Job(NamedTuple):
    """What a job left: exit code and output of the launcher, and the logs of its workers by rank."""

    code: int
    stdout: str
    stderr: str
    logs: list[str]


def start_job(folder, program, *numbers):
    """Starts a Python program with its arguments in a folder; ``numbers`` are the launcher's arguments behind it."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "scripts" / "msrun_launcher.sh"), f"python {program}", *map(str, numbers)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=env, **pipes)


def finish_job(job, logs=()):
    """Waits for a job of `start_job`, and ends it where that takes too long; reads the files of its logs."""
    try:
        stdout, stderr = job.communicate(timeout=240)
    except BaseException as error:  # a test's own limit too
        stdout, stderr = end_job(job)
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"a job took more than 240 s\n{stdout[-3000:]}{stderr[-4000:]}") from None
        raise
    return Job(job.returncode, stdout, stderr, [path.read_text() if path.exists() else "" for path in logs])


def end_job(job):
    """Ends a job that goes on, with its workers; returns its output."""
    output = "", ""
    for _ in range(2):  # the launcher passes the first one on to the workers, and kills them at the second
        if job.poll() is None:
            job.terminate()
            with suppress(subprocess.TimeoutExpired):
                output = job.communicate(timeout=10)
    return output


def run_job(folder, program, ranks, codes=(0,)):
    """Runs a Python program with its arguments on some ranks in a folder; it has to end with one of the codes."""
    logs = [folder / f"output/msrun_log/worker_{rank}.log" for rank in range(ranks)]
    job = finish_job(start_job(folder, program, ranks), logs)
    assert job.code in codes, job.stdout[-3000:] + job.stderr[-4000:]
    return job

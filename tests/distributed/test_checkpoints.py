"""Processes save together, read what other layouts saved, and fail together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

LAUNCHER = Path(__file__).parents[2] / "scripts" / "msrun_launcher.sh"
JOB = Path(__file__).parent / "jobs" / "checkpoint_job.py"


def test_two_processes_save_read_and_fail_together(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCHER), f"python {JOB} {tmp_path / 'checkpoints'}", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for rank in range(2):
        log = (tmp_path / f"output/msrun_log/worker_{rank}.log").read_text()
        for line in ("layouts are right", "reading fails together", "writing fails together"):
            assert line in log

"""Processes save together, read what other layouts saved, and fail together."""

import pytest
from launching import JOBS, run_job

pytestmark = pytest.mark.distributed


def test_two_processes_save_read_and_fail_together(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for log in run_job(tmp_path, f"{JOBS / 'checkpoint_job.py'} {tmp_path / 'checkpoints'}", 2).logs:
        for line in ("layouts are right", "reading fails together", "writing fails together"):
            assert line in log

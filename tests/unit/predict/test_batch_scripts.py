"""Jobs in processes of their own: kills that hit them in the middle of a write, and what a large one costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(script, *arguments):
    words = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_jobs_that_kill_themselves_while_they_write_go_on_to_the_same_file():
    result = run("check_resume.py", "--model", "none", "--kills", "4", "--records", "40", "--seed", "3")
    assert result["jobs"] == 4 and result["kills"] >= 4 and result["bad"] == []


def test_resident_memory_does_not_grow_with_the_number_of_records():
    small = run("bench_batch.py", "--records", "500")
    large = run("bench_batch.py", "--records", "12000")
    # As Python objects 11,500 records and rows would take more than 20 MiB; buffers fill up to some.
    assert large["MiB at most"] - small["MiB at most"] < 8

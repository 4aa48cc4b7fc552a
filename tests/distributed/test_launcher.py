"""The launcher with the real msrun: what two workers return is what the job returns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

LAUNCHER = Path(__file__).parents[2] / "scripts" / "msrun_launcher.sh"

JOB = """
import os, sys
if sys.argv[1] == "early" and os.environ["RANK_ID"] == "1":
    sys.exit("no such file")
import numpy as np
from mindspore import Tensor, communication, ops
communication.init("mccl")
total = ops.AllReduce()(Tensor(np.full(3, communication.get_rank() + 1, np.float32)))
print("sum", total.asnumpy().tolist(), flush=True)
sys.exit(3 if communication.get_rank() == 0 else 0)
"""


def launch(folder, mode):
    (folder / "job.py").write_text(JOB)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCHER), f"python job.py {mode}", "2"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def test_workers_that_finish_with_error_records_are_not_killed(tmp_path):
    done = launch(tmp_path, "all")
    assert done.returncode == 3, done.stderr
    assert "sum [3.0, 3.0, 3.0]" in done.stdout
    assert "sum [3.0, 3.0, 3.0]" in (tmp_path / "output/msrun_log/worker_1.log").read_text()


def test_a_worker_that_dies_before_joining_ends_the_job_instead_of_the_cluster_timeout(tmp_path):
    done = launch(tmp_path, "early")
    assert done.returncode == 1
    assert "worker 1 failed with exit code 1" in done.stderr
    assert "no such file" in done.stderr

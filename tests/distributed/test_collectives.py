"""Jobs of real processes: collectives and pipelines against what one process computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

LAUNCHER = Path(__file__).parents[2] / "scripts" / "msrun_launcher.sh"
JOBS = Path(__file__).parent / "jobs"


def launch(folder, job, ranks):
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCHER), f"python {JOBS / job}", str(ranks)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [(folder / f"output/msrun_log/worker_{rank}.log").read_text() for rank in range(ranks)]


def test_every_collective_on_world_pair_and_strided_groups_equals_numpy(tmp_path):
    for log in launch(tmp_path, "collectives_job.py", 4):
        assert "all collectives over connections are right" in log
        assert "all collectives by MindSpore's sums are right" in log


def test_two_stages_give_outputs_losses_and_gradients_of_the_model_in_one_piece(tmp_path):
    for log in launch(tmp_path, "pipeline_job.py", 2):
        for check in ("forward", "gpipe", "1f1b"):
            assert f"{check} is right" in log

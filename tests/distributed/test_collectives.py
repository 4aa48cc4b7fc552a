"""Jobs of real processes: collectives and pipelines against what one process computes."""

import pytest
from launching import JOBS, run_job

pytestmark = pytest.mark.distributed


def test_every_collective_on_world_pair_and_strided_groups_equals_numpy(tmp_path):
    for log in run_job(tmp_path, JOBS / "collectives_job.py", 4).logs:
        assert "all collectives over connections are right" in log
        assert "all collectives by MindSpore's sums are right" in log


def test_two_stages_give_outputs_losses_and_gradients_of_the_model_in_one_piece(tmp_path):
    for log in run_job(tmp_path, JOBS / "pipeline_job.py", 2).logs:
        for check in ("forward", "gpipe", "1f1b"):
            assert f"{check} is right" in log

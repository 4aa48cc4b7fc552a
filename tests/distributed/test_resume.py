"""A job of several processes that is stopped goes on in any layout, and what stops one rank stops them all."""

import importlib.util
import json
import random

import pytest
from launching import JOBS, ROOT, run_job

pytestmark = pytest.mark.distributed

CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_resume", ROOT / "scripts" / "check_resume.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_here(source, output, batch_size, max_new_tokens):
    from mindformers_ext.trainer import Trainer

    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(CHECKPOINT)},
        "inference": {
            "input_data": str(source),
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "output": str(output),
        },
        "generation": {"do_sample": True, "seed": 11, "top_k": 20},
        "predict": {"progress": False},
    }
    trainer = Trainer(config)
    trainer.inference(collect=False)
    return trainer.last_summary


def test_four_replicas_are_killed_and_one_process_goes_on_with_another_batch_size(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the input's name is part of messages about its lines
    script.write_input(tmp_path / "in.jsonl", 80)
    expected, output = tmp_path / "expected.jsonl", tmp_path / "killed.jsonl"
    run_here("in.jsonl", expected, 8, 4)
    random.seed(5)
    assert script.run_killed(script.start(tmp_path, output, 4, 2, {}), output, 10), (tmp_path / "job.log").read_text()
    assert not output.exists()
    summary = run_here("in.jsonl", output, 3, 4)
    assert 9 <= summary.num_resumed <= 80
    assert output.read_bytes() == expected.read_bytes()


def test_what_stops_one_rank_stops_both_and_another_layout_goes_on(script, tmp_path):
    script.write_input(tmp_path / "in.jsonl", 60)
    source, expected, output = tmp_path / "in.jsonl", tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
    errors = run_here(source, expected, 8, 6).num_errors
    done = run_job(tmp_path, f"{JOBS / 'resume_job.py'} {CHECKPOINT} {source} {output}", 2)
    first, second = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    for seen in (first, second):
        assert seen["full disk"][0] == "JobStoppedError" and "No space left on device" in seen["full disk"][1]
        assert seen["signal"][0] == "JobStoppedError"
        assert "generation.top_k was 20, is 21" in seen["another job"][1]
        assert seen["no memory"][0] == errors and 0 < seen["no memory"][1] < 60
        assert seen["complete"] == [errors, 60]
    # The ranks that decode together agree on a stop within a batch, and then it is one of another rank for the first.
    assert "received a signal" in first["signal"][1] or "SIGTERM was received" in first["signal"][1]
    assert (first["another job"][0], second["another job"][0]) == ("ValueError", "PeerError")
    assert output.read_bytes() == expected.read_bytes()

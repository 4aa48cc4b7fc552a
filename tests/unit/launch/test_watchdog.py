"""The watchdog ends a run in which nothing moves, names who stands still, and leaves slow runs alone."""

import json
import subprocess
import sys
import threading
import time

import pytest

from mindformers_ext.config import load_config
from mindformers_ext.trainer import watchdog
from mindformers_ext.trainer.watchdog import EXIT_STUCK, Watchdog

HANG = """
import sys, threading
from mindformers_ext.trainer.watchdog import Watchdog
dog = Watchdog(0, 1, sys.argv[1])
dog.records = [4, 5]
with dog.phase("answering", 0.4, "predict.step_timeout", progress=lambda: (17,)):
    threading.Event().wait()
"""


def test_a_process_that_hangs_is_ended_with_phase_step_and_records(tmp_path):
    done = subprocess.run([sys.executable, "-c", HANG, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == EXIT_STUCK
    message = done.stderr.splitlines()[-1]
    assert message.startswith("error: rank 0 (") and "in phase 'answering' at step 17 of records 4, 5" in message
    assert "it does not wait for another rank (limit: predict.step_timeout 0.4 s)" in message
    assert "threading.py" in done.stderr  # where it hung
    beat = json.loads((tmp_path / "rank_0.json").read_text())
    assert (beat["phase"], beat["records"], beat["progress"]) == ("answering", [4, 5], [17])


@pytest.fixture
def ended():
    return threading.Event()


@pytest.fixture
def dog(tmp_path, ended):
    return Watchdog(0, 3, str(tmp_path), leave=lambda code: ended.set())


def test_the_rank_that_is_to_blame_is_named(dog, ended, tmp_path, capfd):
    beat = {
        "host": "h",
        "pid": 9,
        "phase": "answering",
        "progress": [3],
        "still": 0.0,
        "records": [],
        "waiting_for": [],
    }
    (tmp_path / "rank_1.json").write_text(json.dumps(beat | {"rank": 1, "time": time.time() - 50}))
    (tmp_path / "rank_2.json").write_text(json.dumps(beat | {"rank": 2, "time": time.time() + 50, "waiting_for": [1]}))
    with dog.phase("answering", 0.2, "predict.step_timeout", waiting_for=lambda: (1,)):
        assert ended.wait(60)
    message = capfd.readouterr().err.splitlines()[-1]
    assert "it waits for rank 1 (" in message and "rank 1 (h) gave no sign of life for 5" in message
    assert "process 9" in message and "rank 2" not in message


def test_progress_starts_the_time_again_and_a_process_that_was_stopped_is_not_taken_for_one_that_hangs(
    dog, ended, monkeypatch
):
    ticks = iter(range(0, 10**9, 1000))  # between two looks the process stood still for 1000 seconds
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: float(next(ticks)))
    looks, enough = [], threading.Event()

    def progress():
        looks.append(len(looks))
        if len(looks) == 3:
            enough.set()
        return len(looks) // 3

    with dog.phase("answering", 4.0, "predict.step_timeout", progress=progress):
        assert enough.wait(60)
        assert not ended.is_set()


def test_zero_watches_nothing(dog, ended):
    with dog.phase("answering", 0, "predict.step_timeout", progress=lambda: pytest.fail("it looked")):
        pass
    assert not ended.is_set()


def test_the_limits_come_from_the_yaml():
    tree = {"run_mode": "predict", "checkpoint": {"load_path": "x"}, "inference": {}, "predict": {"step_timeout": 5}}
    predict = load_config(tree).predict
    assert (predict.start_timeout, predict.step_timeout) == (1800.0, 5.0)
    with pytest.raises(ValueError, match="predict.step_timeout: expected .*>= 0"):
        load_config(tree | {"predict": {"step_timeout": -1}})

"""A job of several processes in which one fails: it goes on where it can, and ends in bounded time where it cannot."""

import json
import re

import pytest
from launching import JOBS, run_job

pytestmark = pytest.mark.distributed

OLD = '{"an older": "result"}\n'


def launch(folder, action="", codes=(0,)):
    (folder / "result.jsonl").write_text(OLD)
    return run_job(folder, f"{JOBS / 'fault_job.py'} {folder} {action}", 2, codes)


def check_files(folder):
    """The older output is untouched; the records of the batches before that of record 3 are in the journal."""
    assert (folder / "result.jsonl").read_text() == OLD
    header, *lines = (folder / "result.jsonl.journal").read_text().splitlines()
    assert header.startswith('{"journal":')
    assert {json.loads(line)["index"] for line in lines} == {0, 1, 2, 4}


def test_a_fault_of_one_rank_costs_one_record_or_is_told_by_all_ranks(tmp_path):
    done = launch(tmp_path)
    for line in (
        "tp2, in batches: one record failed on rank 1, forward 1, forward",
        "tp2, refilled: one record failed on rank 0, forward 3, forward",
        "tp2, refilled: one record failed on rank 1, forward 2, oom",
        "pp2, refilled: one record failed on rank 1, forward 2, forward",
        "fsdp2, in batches: one record failed on rank None, forward 2, forward",
        "fsdp2, refilled: one record failed on rank None, forward 2, forward",
        "batch_size was refused",
        "the missing input was noticed",
        "unreadable weights were noticed",
    ):
        assert line in done.stdout
        assert line in done.logs[1]


def test_a_mistake_of_the_program_on_one_rank_ends_the_job_with_rank_records_and_reason(tmp_path):
    done = launch(tmp_path, "raise", codes=(1, 5))
    assert re.search(r"rank 1 failed: injected mistake \(TypeError, with records [0-9, ]*3[0-9, ]*\)", done.stdout)
    assert "TypeError: injected mistake" in done.stderr and "failing_attend" in done.stderr
    check_files(tmp_path)


def test_a_killed_rank_ends_the_job(tmp_path):
    done = launch(tmp_path, "kill", codes=(137,))
    assert "worker 1 failed with exit code 137, ended by SIGKILL" in done.stderr
    assert "rank 1 has ended, and this rank cannot go on without it" in done.stdout
    check_files(tmp_path)


def test_a_rank_that_stands_still_ends_the_job_and_is_named(tmp_path):
    done = launch(tmp_path, "stop", codes=(6,))
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: rank 0"))
    assert "nothing has moved for" in message and "it waits for rank 1" in message
    assert "(limit: predict.step_timeout 8 s)" in message
    assert re.search(r"in phase 'answering' at step \d+ of records [0-9, ]*3", message)
    assert "rank 1 (" in message and "gave no sign of life for" in message
    check_files(tmp_path)

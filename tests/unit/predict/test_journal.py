"""The journal: what is in it survives, what is torn or damaged is done again, what is not ours stays as it is."""

import errno
import fcntl
import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindformers_ext.predict.journal import Journal

IDENTITY = {"input": {"sha256": "ab"}, "generation": {"seed": None}}


def row(index, **fields):
    answer = {"generated_ids": [1, index], "generated_text": f"t{index}\u2028\ud800"}
    counts = {"finish_reason": "length", "num_prompt_tokens": 1, "num_new_tokens": 1}
    return {"sample_idx": index, **answer, **counts, **fields}


def begin(path, indices=range(4)):
    journal = Journal(path)
    journal.start(IDENTITY, {"seed": 7})
    for index in indices:
        journal.append(index, 100 + index, [row(index)])
    return journal


def reopened(path):
    journal = Journal(path)
    journal.close()
    return journal


def finished(journal, count=10):
    return [index for index in range(count) if journal.finished.has(index, 100 + index)]


def test_a_record_is_on_disk_when_append_returns_and_comes_back_with_its_header(tmp_path):
    path = tmp_path / "o.journal"
    journal = begin(path, [2, 0, 3, 1])
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["index"] for line in lines[1:]] == [2, 0, 3, 1]
    journal.close()
    again = Journal(path)
    assert (again.header.identity, again.header.facts) == (IDENTITY, {"seed": 7})
    assert finished(again) == [0, 1, 2, 3] and (again.num_finished, again.num_errors) == (4, 0)
    assert list(again.rows(4)) == [row(index) for index in range(4)]
    again.close()


def test_a_journal_cut_anywhere_in_its_last_two_lines_keeps_every_whole_line(tmp_path):
    path = tmp_path / "o.journal"
    begin(path).close()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole) - len(lines[-1]) - len(lines[-2]), len(whole)):
        path.write_bytes(whole[:cut])
        kept = [2, 3][: whole[:cut].count(b"\n") - 3]
        journal = Journal(path)
        assert finished(journal) == [0, 1, *kept]
        for index in range(4):
            if index not in journal_indices(journal):
                journal.append(index, 100 + index, [row(index)])
        assert list(journal.rows(4)) == [row(index) for index in range(4)]
        journal.close()
        assert path.read_bytes() == whole


def journal_indices(journal):
    return set(finished(journal))


def test_a_journal_cut_anywhere_in_its_first_line_is_an_empty_one(tmp_path, log):
    path = tmp_path / "o.journal"
    begin(path, []).close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        journal = reopened(path)
        assert journal.header is None and not journal.has_records
        assert path.read_bytes() == b""
    assert "dropped the last" in log.text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode) | st.just(bytes(4096)))
def test_whatever_follows_the_last_record_is_dropped_and_damage_between_records_is_done_again(tmp_path, dirt):
    path = tmp_path / "o.journal"
    begin(path).close()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(whole + dirt)
    assert finished(reopened(path)) == [0, 1, 2, 3] and path.read_bytes() == whole
    path.write_bytes(b"".join([*lines[:2], dirt + b"\n", *lines[3:]]))
    assert finished(reopened(path)) == [0, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        '{"index": 9, "record": "0000000000000001"}',
        '{"index": 9, "record": "0000000000000001", "rows": []}',
        '{"index": 9, "record": "0000000000000001", "rows": [{"sample_idx": 8}]}',
        '{"index": 9, "record": "1", "rows": [{"sample_idx": 9}]}',
        '{"index": true, "record": "0000000000000001", "rows": [{"sample_idx": true}]}',
        '{"index": -1, "record": "0000000000000001", "rows": [{"sample_idx": -1}]}',
        "[" * 100_000,
        "null",
    ],
)
def test_a_line_that_parses_but_is_no_record_does_not_count(tmp_path, line):
    path = tmp_path / "o.journal"
    begin(path, [0]).close()
    with open(path, "a") as file:
        file.write(line + "\n")
    assert reopened(path).num_finished == 1


def test_the_newest_line_of_a_record_counts(tmp_path):
    path = tmp_path / "o.journal"
    journal = begin(path, [0, 1])
    journal.append(0, 555, [row(0, again=True)])
    assert list(journal.rows(2)) == [row(0, again=True), row(1)]
    journal.close()
    again = Journal(path)
    assert again.finished.has(0, 555) and not again.finished.has(0, 100) and again.num_finished == 2
    assert list(again.rows(2)) == [row(0, again=True), row(1)]
    again.close()


def test_errors_of_the_model_are_tried_again_and_those_of_the_record_are_kept(tmp_path):
    path = tmp_path / "o.journal"
    journal = begin(path, [])
    kinds = ("parse", "forward", "schema", "oom", "tokenize", "too_long")
    for index, kind in enumerate(kinds):
        journal.append(index, 100 + index, [{"sample_idx": index, "error": "x", "error_type": kind}])
    journal.append(6, 106, [row(6, error_type="mine")])
    journal.close()
    again = reopened(path)
    assert finished(again) == [0, 2, 4, 5, 6] and (again.num_finished, again.num_errors) == (5, 4)


def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "o.journal"
    for content in (b"dear diary", b"dear diary\n", b'{"a": 1}\n', b"\xff\xfe\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"o\.journal is not the journal of a run"):
            Journal(path)
        assert path.read_bytes() == content


def test_a_full_disk_names_the_file_and_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "o.journal"
    journal = begin(path, [0])
    before, pwrite = path.read_bytes(), os.pwrite

    def full(descriptor, data, offset):
        if offset > len(before):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[:10], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"cannot write: No space left on device: '.*o\.journal'"):
            journal.append(1, 101, [row(1)])
    assert path.read_bytes() == before
    journal.append(1, 101, [row(1)])
    assert list(journal.rows(2)) == [row(0), row(1)]
    journal.close()


def test_a_second_run_is_refused_and_harms_nothing(tmp_path):
    path = tmp_path / "o.journal"
    journal = begin(path, [0])
    with pytest.raises(ValueError, match=r"o\.journal is being written by another run"):
        Journal(path)
    journal.append(1, 101, [row(1)])
    journal.close()
    assert finished(reopened(path)) == [0, 1]


HOLD = """
import sys, pathlib
from mindformers_ext.predict.journal import Journal
journal = Journal(pathlib.Path(sys.argv[1]))
journal.start({}, {})
journal.append(0, 100, [{"sample_idx": 0, "error": "x", "error_type": "schema"}])
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_process_is_kept_out_until_it_is_killed_and_its_records_are_there(tmp_path):
    path, root = tmp_path / "o.journal", pathlib.Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as other:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(ValueError, match="another run"):
            Journal(path)
        other.kill()
    assert finished(reopened(path)) == [0]


def test_a_journal_that_ended_between_open_and_lock_is_not_written_to(tmp_path, monkeypatch):
    path = tmp_path / "o.journal"
    first = begin(path)
    lock = fcntl.flock

    def late(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        first.remove()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second = begin(path, [0])
    assert finished(second) == [0] and path.stat().st_ino == os.fstat(second._descriptor).st_ino
    second.close()


def test_a_file_system_without_locks_is_written_to_with_a_warning(tmp_path, monkeypatch, log):
    def unsupported(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    begin(tmp_path / "o.journal").close()
    assert "cannot be locked (No locks available)" in log.text


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_mode_is_0640_also_of_a_file_that_was_there(tmp_path, umask):
    path = tmp_path / "deep" / "er" / "o.journal"
    previous = os.umask(umask)
    try:
        begin(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o777)
        reopened(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_rows_of_a_missing_record_are_an_error_of_the_program(tmp_path):
    journal = begin(tmp_path / "o.journal", [0, 2])
    with pytest.raises(RuntimeError, match="record 1 is missing"):
        list(journal.rows(3))
    journal.close()

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

from mindformers_ext.predict import check_output, open_writer

per_test_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

# Lone surrogates, NUL and every line separator are among these characters.
texts = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["\ud800", "a\u2028b", "\x85", "\r\n", "\\n", "\\\ud800"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
rows_of_json = st.lists(st.dictionaries(texts, json_values, max_size=4), max_size=4)

ROWS = [{"sample_idx": 0, "generated_text": "a\nb"}, {"sample_idx": 1, "error": "no", "error_type": "schema"}]


def write(path, rows):
    with open_writer(path) as writer:
        for row in rows:
            writer.write(row)
    return path.read_bytes()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def unescape(line):
    return json.loads('"' + line.replace('"', r"\"") + '"', strict=False)


def joined(value):
    """`value` as JSON can give it back: two halves of a surrogate pair side by side are one character there."""
    return json.loads(json.dumps(value))


def test_the_three_formats(tmp_path):
    assert write(tmp_path / "o.jsonl", ROWS).decode() == "".join(json.dumps(row) + "\n" for row in ROWS)
    assert json.loads(write(tmp_path / "o.json", ROWS)) == ROWS
    for name in ("o.txt", "o"):
        assert write(tmp_path / name, ROWS).decode() == "a\\nb\n" + json.dumps(ROWS[1]) + "\n"


def test_a_run_without_records_gives_a_valid_file(tmp_path):
    assert write(tmp_path / "o.jsonl", []) == b""
    assert write(tmp_path / "o.txt", []) == b""
    assert json.loads(write(tmp_path / "o.json", [])) == []


def test_suffixes_are_known_in_capitals_too(tmp_path):
    assert json.loads(write(tmp_path / "o.JSON", ROWS)) == ROWS


@per_test_folder
@given(rows_of_json)
def test_json_lines_parse_back_and_no_row_spans_lines(tmp_path, rows):
    content = write(tmp_path / "o.jsonl", rows).decode("utf-8")
    assert [json.loads(line) for line in content.splitlines()] == joined(rows)


@per_test_folder
@given(rows_of_json)
def test_a_json_array_parses_back(tmp_path, rows):
    assert json.loads(write(tmp_path / "o.json", rows)) == joined(rows)


@per_test_folder
@given(st.lists(texts.map(joined), max_size=4))
def test_text_lines_parse_back_and_no_text_spans_lines(tmp_path, answers):
    content = write(tmp_path / "o.txt", [{"generated_text": text} for text in answers]).decode("utf-8")
    assert [unescape(line) for line in content.splitlines()] == answers


def test_text_that_utf8_can_hold_is_not_escaped(tmp_path):
    text = "\u4e2d\u6587 \U0001f600 \u00e9"
    assert text in write(tmp_path / "o.jsonl", [{"generated_text": text}]).decode()


def test_a_row_is_on_disk_before_the_next(tmp_path):
    with open_writer(tmp_path / "o.jsonl") as writer:
        writer.write(ROWS[0])
        assert json.loads((tmp_path / "o.jsonl.partial").read_text()) == ROWS[0]
        assert not (tmp_path / "o.jsonl").exists()
    assert os.listdir(tmp_path) == ["o.jsonl"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_a_failed_run_leaves_the_old_output_and_keeps_its_rows(tmp_path, failure):
    path = tmp_path / "o.jsonl"
    path.write_text("old")
    with pytest.raises(failure), open_writer(path) as writer:
        writer.write(ROWS[0])
        raise failure
    assert path.read_text() == "old"
    assert json.loads((tmp_path / "o.jsonl.partial").read_text()) == ROWS[0]
    assert len(write(path, ROWS).splitlines()) == 2


def test_a_full_disk_is_one_sentence_and_leaves_the_old_output(tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_text("old")
    with pytest.raises(OSError, match=r"No space left.*o\.jsonl\.partial"), open_writer(path) as writer:
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), writer._file.fileno())
        writer.write(ROWS[0])
    assert path.read_text() == "old"


def test_a_second_writer_of_an_output_is_refused_and_harms_nothing(tmp_path):
    path = tmp_path / "o.jsonl"
    with open_writer(path) as writer:
        writer.write(ROWS[0])
        with pytest.raises(ValueError, match=r"o\.jsonl\.partial is being written by another run"):
            open_writer(path)
        writer.write(ROWS[1])
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    assert json.loads(write(path, ROWS[:1])) == ROWS[0]


HOLD = """
import sys
from mindformers_ext.predict import open_writer
with open_writer(sys.argv[1]) as writer:
    writer.write({"sample_idx": 7})
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_kept_out_until_it_is_killed(tmp_path):
    path, root = tmp_path / "o.jsonl", pathlib.Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as other:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(ValueError, match="another run"):
            open_writer(path)
        assert json.loads((tmp_path / "o.jsonl.partial").read_text()) == {"sample_idx": 7}
        other.kill()
    assert json.loads(write(path, ROWS[:1])) == ROWS[0]


def test_the_lock_holds_until_the_output_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / "o.jsonl"
    replace = os.replace

    def racing(source, target):
        with pytest.raises(ValueError, match="another run"):
            open_writer(path)
        replace(source, target)

    monkeypatch.setattr(os, "replace", racing)
    assert json.loads(write(path, ROWS[:1])) == ROWS[0]


def test_an_output_that_was_finished_between_open_and_lock_is_not_emptied(tmp_path, monkeypatch):
    path = tmp_path / "o.jsonl"
    first = open_writer(path)
    first.write(ROWS[0])
    lock = fcntl.flock

    def late(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        first.__exit__(None, None, None)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with open_writer(path):
        assert json.loads(path.read_text()) == ROWS[0]


def test_a_file_system_without_locks_is_written_to_with_a_warning(tmp_path, monkeypatch, caplog):
    def unsupported(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert json.loads(write(tmp_path / "o.jsonl", ROWS[:1])) == ROWS[0]
    assert "cannot be locked (No locks available)" in caplog.text


@pytest.mark.parametrize("name", ["model/o.jsonl", "model/deep/o.txt", "link/o", "x/../model/config.json", "train.txt"])
def test_what_is_protected_is_refused_as_output_by_any_name(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "train.txt").write_text("text")
    protected = {
        "checkpoint.load_path": tmp_path / "link",
        "train_dataset.dataloader.path": str(tmp_path / "train.txt"),
    }
    with pytest.raises(ValueError, match=r"output '.*' is (inside checkpoint\.load_path|train_dataset\.data.*) '.*'"):
        check_output(tmp_path / name, None, protected)
    for other in ("model2/o.txt", "o.jsonl", "model.txt"):
        check_output(tmp_path / other, None, protected)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_mode_is_0640_for_new_and_replaced_files(tmp_path, umask):
    path = tmp_path / "deep" / "er" / "o.jsonl"
    previous = os.umask(umask)
    try:
        write(path, ROWS)
        assert mode(path) == 0o640
        path.chmod(0o777)
        (path.parent / "o.jsonl.partial").touch(0o777)
        write(path, ROWS)
    finally:
        os.umask(previous)
    assert mode(path) == 0o640


def test_a_relative_output_stays_where_the_run_began(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_writer("o.jsonl") as writer:
        monkeypatch.chdir("other")
        writer.write(ROWS[0])
    assert (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(
    "name", ["", "o.xml", "o.jsonl.gz", "folder", "link.jsonl", "dangling.json", "file/o.txt", "o/"]
)
def test_an_output_that_cannot_be_is_refused_and_nothing_is_made(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("content")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "file")
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nothing")
    before = sorted(os.listdir(tmp_path))
    path = f"{tmp_path}/{name}" if name else ""
    for refuse in (check_output, open_writer):
        with pytest.raises(ValueError, match="output"):
            refuse(path)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text() == "content"


def test_a_device_as_output_is_refused(tmp_path):
    os.mkfifo(tmp_path / "o.txt")
    with pytest.raises(ValueError, match="not a regular file"):
        check_output(tmp_path / "o.txt")


def test_a_link_in_place_of_the_partial_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("content")
    (tmp_path / "o.txt.partial").symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match="symbolic link"):
        open_writer(tmp_path / "o.txt")
    assert (tmp_path / "victim").read_text() == "content"


@pytest.mark.parametrize("name", ["in.txt", "hard.txt", "folder_link/in.txt", "x/../in.txt"])
def test_the_input_file_is_refused_as_output_by_any_name(tmp_path, name):
    (tmp_path / "in.txt").write_text("prompt")
    (tmp_path / "in_link.txt").symlink_to(tmp_path / "in.txt")
    (tmp_path / "hard.txt").hardlink_to(tmp_path / "in.txt")
    (tmp_path / "folder_link").symlink_to(tmp_path)
    for source in (str(tmp_path / "in.txt"), tmp_path / "in_link.txt"):
        with pytest.raises(ValueError, match="is the input file"):
            check_output(f"{tmp_path}/{name}", source)
    check_output(tmp_path / "other.txt", str(tmp_path / "in.txt"))


def test_an_input_that_the_partial_file_would_overwrite_is_refused(tmp_path):
    (tmp_path / "o.txt.partial").write_text("prompt")
    with pytest.raises(ValueError, match="is the input file"):
        check_output(tmp_path / "o.txt", tmp_path / "o.txt.partial")


def test_data_that_is_no_file_does_not_matter(tmp_path):
    for data in (None, "prompt", ["a"], {"instruction": "a"}):
        check_output(tmp_path / "new" / "o.txt", data)
    assert os.listdir(tmp_path) == []


def test_a_read_only_folder_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="not writable"):
        check_output(tmp_path / "o.txt")

import hashlib
import json
import os
import resource
import signal
import stat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindformers_ext.predict import check_output, open_job
from mindformers_ext.predict.output_files import draft_path, journal_path, manifest_path
from mindformers_ext.predict.writers import keeps_ids, read_rows, write_rows

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
    write_rows(path, rows)
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


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_a_file_that_cannot_be_built_leaves_the_old_one_and_nothing_else(tmp_path, failure):
    path = tmp_path / "o.jsonl"
    path.write_text("old")

    def rows():
        yield ROWS[0]
        raise failure

    with pytest.raises(failure):
        write_rows(path, rows())
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["o.jsonl"]


def test_a_full_disk_is_one_sentence_and_leaves_the_old_output(tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_text("old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        with pytest.raises(OSError, match=r"cannot write: File too large.*o\.jsonl"):
            write_rows(path, ROWS * 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["o.jsonl"]


def test_size_checksum_and_rows_are_those_of_the_file(tmp_path):
    for name in ("o.jsonl", "o.json", "o.txt"):
        written = write_rows(tmp_path / name, ROWS)
        content = (tmp_path / name).read_bytes()
        assert (written.size, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert written.rows == len(ROWS)


@per_test_folder
@given(rows_of_json)
def test_rows_can_be_read_back_from_formats_that_keep_them(tmp_path, rows):
    for name in ("o.jsonl", "o.json"):
        write_rows(tmp_path / name, rows)
        assert keeps_ids(tmp_path / name) and list(read_rows(tmp_path / name)) == joined(rows)
    assert not keeps_ids(tmp_path / "o.txt")


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
    path = tmp_path / "o.jsonl"
    previous = os.umask(umask)
    try:
        write(path, ROWS)
        assert mode(path) == 0o640
        path.chmod(0o777)
        draft_path(path).touch(0o777)
        write(path, ROWS)
    finally:
        os.umask(previous)
    assert mode(path) == 0o640


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
    for refuse in (check_output, lambda path: open_job(path, {})):
        with pytest.raises(ValueError, match="output"):
            refuse(path)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text() == "content"


def test_a_device_as_output_is_refused(tmp_path):
    os.mkfifo(tmp_path / "o.txt")
    with pytest.raises(ValueError, match="not a regular file"):
        check_output(tmp_path / "o.txt")


@pytest.mark.parametrize("beside", [journal_path, manifest_path, draft_path])
def test_a_link_in_place_of_a_file_beside_the_output_is_not_followed(tmp_path, beside):
    (tmp_path / "victim").write_text("content")
    beside(tmp_path / "o.txt").symlink_to(tmp_path / "victim")
    for refuse in (check_output, lambda path: open_job(path, {})):
        with pytest.raises(ValueError, match="symbolic link"):
            refuse(tmp_path / "o.txt")
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


@pytest.mark.parametrize("beside", [journal_path, manifest_path, draft_path])
def test_an_input_that_a_file_beside_the_output_would_overwrite_is_refused(tmp_path, beside):
    source = beside(tmp_path / "o.txt")
    source.write_text("prompt")
    with pytest.raises(ValueError, match="is the input file"):
        check_output(tmp_path / "o.txt", source)


def test_data_that_is_no_file_does_not_matter(tmp_path):
    for data in (None, "prompt", ["a"], {"instruction": "a"}):
        check_output(tmp_path / "new" / "o.txt", data)
    assert os.listdir(tmp_path) == []


def test_a_read_only_folder_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="not writable"):
        check_output(tmp_path / "o.txt")

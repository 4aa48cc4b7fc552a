"""Where records come from: compressed files, several files, patterns, standard input."""

import gzip
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindformers_ext.predict import check_output, input_files, normalize_input
from mindformers_ext.trainer.fingerprint import input_fingerprint


def jsonl(*prompts):
    return b"".join(json.dumps({"instruction": prompt}).encode() + b"\n" for prompt in prompts)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "b.jsonl").write_bytes(jsonl("b0", "b1"))
    (tmp_path / "shards" / "a.jsonl").write_bytes(jsonl("a0"))
    (tmp_path / "shards" / "note.txt").write_bytes(b"t0\n")
    (tmp_path / "z.jsonl").write_bytes(jsonl("z0"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prompts(data):
    records = list(normalize_input(data))
    assert [record.index for record in records] == list(range(len(records)))
    return [record.prompt for record in records]


def errors(data):
    return [record.error.message for record in normalize_input(data) if record.error]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("shards/*.jsonl", ["a0", "b0", "b1"]),
        ("shards/[ab].jsonl", ["a0", "b0", "b1"]),
        ("*/?.jsonl", ["a0", "b0", "b1"]),
        ({"files": "shards/*"}, ["a0", "b0", "b1", "t0"]),
        ({"files": ["z.jsonl", "shards/*.jsonl"]}, ["z0", "a0", "b0", "b1"]),
        ({"files": ["shards/b.jsonl", Path("z.jsonl")]}, ["b0", "b1", "z0"]),
    ],
)
def test_files_are_read_in_the_order_given_and_those_of_a_pattern_by_name(folder, data, expected):
    assert prompts(data) == expected


@pytest.mark.parametrize("data", [["z.jsonl", "shards/a.jsonl"], "2 * 3 = ?", "is a*b [true]?", ["shards/*.jsonl"]])
def test_lists_of_strings_and_text_with_stars_stay_prompts(folder, data):
    assert prompts(data) == ([data] if isinstance(data, str) else data)


def test_a_list_of_prompts_that_are_all_names_of_files_is_pointed_out(folder, caplog):
    prompts(["z.jsonl", "shards/a.jsonl"])
    assert "{files: [...]}" in caplog.text
    caplog.clear()
    prompts(["z.jsonl", "hello"])
    assert not caplog.text


@pytest.mark.parametrize(
    ("data", "kind", "word"),
    [
        ("shards/*.json", FileNotFoundError, "matches no file"),
        ("none*.gz", FileNotFoundError, "matches no file"),
        ({"files": ["gone.jsonl"]}, FileNotFoundError, "'gone.jsonl' does not exist"),
        ({"files": ["-"]}, FileNotFoundError, "'-' does not exist"),
        ({"files": ["shards"]}, FileNotFoundError, "is a directory"),
        ({"files": ["x\0y*"]}, FileNotFoundError, "does not exist"),
        ({"files": []}, ValueError, "files is empty"),
        ({"files": ["shards/*.jsonl", "./shards/a.jsonl"]}, ValueError, "a.jsonl' twice"),
        ({"files": 3}, TypeError, "files must be a path"),
        ({"files": [3]}, TypeError, "files must be a path"),
    ],
)
def test_files_that_cannot_be_meant_are_refused_at_the_call(folder, data, kind, word):
    with pytest.raises(kind, match=".*") as caught:
        normalize_input(data)
    assert word in str(caught.value)


def test_a_link_to_a_file_that_is_read_already_is_the_same_file(folder):
    (folder / "link.jsonl").symlink_to("z.jsonl")
    with pytest.raises(ValueError, match="twice"):
        normalize_input({"files": ["z.jsonl", "link.jsonl"]})


def test_a_pipe_is_not_read_because_it_could_be_read_once_only(folder):
    os.mkfifo("pipe.jsonl")
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        normalize_input("pipe.jsonl")


def test_a_record_with_the_single_field_files_goes_into_a_list():
    (record,) = normalize_input([{"files": "x"}], "files")
    assert record.prompt == "x"


@pytest.mark.parametrize(
    ("name", "content"), [("x.jsonl", jsonl("a", "b")), ("x.txt", b"a\nb\n"), ("x.json", b'["a", "b"]')]
)
def test_compressed_files_give_the_records_of_the_plain_ones(folder, name, content):
    Path(name + ".gz").write_bytes(gzip.compress(content[:5]) + gzip.compress(content[5:]))  # several members
    Path(name.upper() + ".GZ").write_bytes(gzip.compress(content))
    assert prompts(name + ".gz") == prompts(name.upper() + ".GZ") == ["a", "b"]
    with pytest.raises(FileNotFoundError, match="gone"):
        normalize_input("gone " + name + ".gz")


def test_a_compressed_file_cut_at_any_byte_keeps_what_could_be_read_and_ends_with_one_error(folder):
    whole = gzip.compress(jsonl(*(os.urandom(9).hex() for _ in range(20))))
    Path("whole.jsonl.gz").write_bytes(whole)
    expected = prompts("whole.jsonl.gz")
    for size in range(0, len(whole), 3):
        Path("cut.jsonl.gz").write_bytes(whole[:size])
        *kept, last = normalize_input({"files": ["cut.jsonl.gz", "whole.jsonl.gz"]})
        assert last.error is None
        found = [record.prompt for record in kept if record.error is None]
        (error,) = (record.error for record in kept if record.error)
        count = len(found) - len(expected) + 1
        assert found + [last.prompt] == expected[:count] + expected
        assert error.type == "parse" and f"damaged after its first {count} records" in error.message


def test_a_damaged_byte_or_a_file_that_is_not_compressed_is_one_error(folder):
    data = bytearray(gzip.compress(jsonl("a")))
    data[-5] ^= 1  # of the checksum
    Path("x.jsonl.gz").write_bytes(data)
    assert prompts("x.jsonl.gz") == ["a", None] and "CRC" in errors("x.jsonl.gz")[0]
    Path("x.jsonl.gz").write_bytes(jsonl("a"))
    assert prompts("x.jsonl.gz") == [None] and "Not a gzipped file" in errors("x.jsonl.gz")[0]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60) | st.tuples(st.integers(0, 400), st.integers(1, 255)),
    st.sampled_from(["jsonl", "txt", "json"]),
)
def test_any_damage_of_a_compressed_file_gives_records_and_error_records(tmp_path, damage, suffix):
    data = damage
    if isinstance(damage, tuple):
        whole = bytearray(gzip.compress(b"[" + b",".join([b'"abc"'] * 50) + b"]\n" + jsonl("a", "b"), mtime=0))
        whole[damage[0] % len(whole)] ^= damage[1]
        data = bytes(whole)
    path = tmp_path / f"x.{suffix}.gz"
    path.write_bytes(data)
    found = list(normalize_input(str(path)))
    assert [record.index for record in found] == list(range(len(found)))
    assert all((record.prompt is None) != (record.error is None) for record in found)
    if not data.startswith(b"\x1f\x8b"):
        assert len(found) == 1 and "damaged" in found[0].error.message


def test_a_small_file_that_unpacks_to_a_huge_line_needs_little_memory(folder, monkeypatch):
    monkeypatch.setattr("mindformers_ext.predict.sources.MAX_LINE_BYTES", 1 << 16)
    Path("bomb.txt.gz").write_bytes(gzip.compress(bytes(1 << 26)) + gzip.compress(b"\nnext"))
    assert prompts("bomb.txt.gz") == [None, "next"]


def test_standard_input_has_lines_of_json(monkeypatch):
    content = b"\xef\xbb\xbf" + jsonl("a") + b"\r\n\nno json\n" + jsonl("b").rstrip()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert prompts("-") == ["a", None, "b"]
    assert prompts(["-"]) == ["-"]


def test_standard_input_is_read_line_by_line_when_it_is_needed(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "wb", buffering=0) as feed:
        monkeypatch.setattr("sys.stdin", stdin)
        records = normalize_input("-")
        for prompt in ("a", "b"):
            feed.write(jsonl(prompt))
            assert next(records).prompt == prompt


def test_a_process_without_standard_input_says_so(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="no standard input"):
        list(normalize_input("-"))


@pytest.mark.parametrize("output", ["shards/b.jsonl", "shards/new.jsonl", "link.jsonl", "hard.jsonl"])
def test_no_output_is_an_input_or_would_become_one(folder, output):
    os.link("shards/a.jsonl", "hard.jsonl")
    (folder / "same").symlink_to("shards")
    target = output if output != "link.jsonl" else "same/b.jsonl"
    with pytest.raises(ValueError, match="input"):
        check_output(target, {"files": ["z.jsonl", "shards/*.jsonl"]})
    check_output("shards/new.json", {"files": ["z.jsonl", "shards/*.jsonl"]})
    check_output("new.jsonl", "shards/*.jsonl")


def test_the_fingerprint_sees_content_order_and_number_of_files(folder):
    data = {"files": ["z.jsonl", "shards/*.jsonl"]}
    prints = {input_fingerprint(data), input_fingerprint("shards/*.jsonl"), input_fingerprint("z.jsonl")}
    prints.add(input_fingerprint({"files": ["shards/*.jsonl", "z.jsonl"]}))
    assert len(prints) == 4
    assert input_fingerprint("./shards/*.jsonl") in prints
    (folder / "shards" / "b.jsonl").write_bytes(jsonl("b0", "b2"))
    assert input_fingerprint(data) not in prints
    assert input_files(data).paths == ("z.jsonl", "shards/a.jsonl", "shards/b.jsonl")

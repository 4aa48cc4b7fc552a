"""The warning of a disk that may be too small for a run's output."""

import json
import shutil
from collections import namedtuple

import pytest

from mindformers_ext.predict.disk_space import space_warning

_Usage = namedtuple("_Usage", "total used free")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"instruction": "a question"}) + "\n" for _ in range(100)))
    return path


def test_a_disk_with_room_is_not_spoken_of(source, tmp_path):
    assert space_warning(tmp_path / "out.jsonl", source, 100, 16) is None


def test_a_disk_that_may_fill_is_told_with_both_sizes(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(2**40, 2**40 - 2**30, 2**30))
    warning = space_warning(tmp_path / "out.jsonl", source, 100, 1_000_000)
    assert warning.startswith(
        f"{tmp_path} has 1.0 GiB free; the journal and the output of 100 records may need 2.2 GiB"
    )


def test_what_the_journal_holds_already_is_not_needed_again(source, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    free = 2 * (3 * source.stat().st_size + 100 * (150 + 16 * 12)) - 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(2 * free, free, free))
    assert space_warning(output, source, 100, 16) is not None
    output.with_name("out.jsonl.journal").write_bytes(bytes(1000))
    assert space_warning(output, source, 100, 16) is None


@pytest.mark.parametrize(("data", "records"), [("a prompt", 1), (["a", "b"], 2), ("file", None)])
def test_an_input_of_unknown_size_has_no_estimate(data, records, source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(1, 1, 0))
    assert space_warning(tmp_path / "out.jsonl", source if data == "file" else data, records, 16) is None

"""Reading the file: whatever is in it, either data with lines or one clear sentence with file and line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindformers_ext.config import ConfigError, load_config
from mindformers_ext.config.errors import ConfigFileNotFoundError
from mindformers_ext.config.yaml_reader import MAX_BYTES, read_yaml

PREDICT = "run_mode: predict\ncheckpoint: {load_path: w}\ninference: {input_data: hi}\n"


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "\ufeff"])
def test_an_empty_file_is_called_empty(text, refuse):
    assert refuse(text) == "run.yaml: the file is empty; it must hold sections such as 'inference:'"


@pytest.mark.parametrize("text", ["- a\n- b\n", "hello\n", "3\n", "[1, 2]"])
def test_a_file_that_is_not_a_mapping_is_refused(text, refuse):
    assert refuse(text) == "run.yaml:1: the file must hold sections such as 'inference:', not one value"


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("inference:\n\tbatch_size: 1\n", 2, "a tab is used for indentation; use spaces"),
        ("inference: {\n  batch_size: [1, 2\n", 3, "while parsing a flow sequence that starts in line 2"),
        ("inference:\n  batch_size: 1\n output: a\n", 3, "while parsing a block mapping that starts in line 1"),
        ("a: 1\ninference: batch_size: 2\n", 2, "mapping values are not allowed here (column 22)"),
        ("a: 'never closed\n", 2, "while scanning a quoted scalar that starts in line 1"),
        ("a: *nowhere\n", 1, "found undefined alias 'nowhere'"),
        ("run_mode: train\n---\nrun_mode: predict\n", 2, "found another document"),
        ("a: b\nc: \x01\n", 2, "the character U+0001 is not allowed in YAML"),
        ("run_mode: !!python/object/apply:os.system ['true']\n", 1, "the tag !!python/object/apply:os.system"),
        ("model: !!set {a, b}\n", 1, "the tag !!set is not allowed"),
        ("model:\n  a: !mine 1\n", 2, "the tag !mine is not allowed"),
        ("model:\n  a: !!binary aGk=\n", 2, "the tag !!binary is not allowed"),
        ("training: {deterministic: !!bool maybe}\n", 1, "'maybe' cannot be read as bool"),
        ("training: {seed: !!int ''}\n", 1, "'' cannot be read as int"),
        ("training:\n  seed: " + "9" * 5000 + "\n", 2, "cannot be read as int"),
        ("training:\n  seed: 0x" + "f" * 5000 + "\n", 2, "this integer does not fit in 64 bits"),
        ('model:\n  a: "\\ud800"\n', 2, "half of a surrogate pair"),
        ("training:\n  <<: 5\n", 2, "'<<' must be followed by an alias of a mapping"),
        ("a: 1\non: 2\n", 2, "the key 'on' is not text to YAML; put it in quotes"),
        ("a: 1\n~: 2\n", 2, "the key '~' is not text to YAML; put it in quotes"),
        ("a: 1\n[b]: 2\n", 2, "a key must be one word"),
        ("a: 1\n1.5: 2\n", 2, "the key '1.5' is not text to YAML"),
    ],
)
def test_unreadable_yaml_names_file_and_line(text, line, part, refuse):
    message = refuse(text)
    assert message.startswith(f"run.yaml:{line}: ")
    assert part in message


def test_a_duplicate_key_is_refused_with_both_lines(refuse):
    text = "inference:\n  batch_size: 1\n  output: a\n  batch_size: 2\n"
    assert refuse(text) == "run.yaml:4: inference.batch_size: this key is given twice, first in line 2; remove one"
    assert "run.yaml:4: run_mode: this key is given twice, first in line 1" in refuse(PREDICT + "run_mode: train\n")


@pytest.mark.parametrize("pair", ["a: 1, 'a': 2", "1: a, 0x1: b", "a: {b: 1, b: 2}"])
def test_duplicates_are_found_in_free_parts_too(pair, refuse):
    assert "is given twice" in refuse(f"{PREDICT}model: {{{pair}}}\n")


def test_bytes_that_are_not_utf8_name_their_line(refuse):
    assert refuse(b"a: 1\nb: \xff\xfe\n") == "run.yaml:2: is not UTF-8 text; save the file as UTF-8"
    assert "is not UTF-8" in refuse("run_mode: predict\n".encode("utf-16"))


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(load, refuse):
    text = PREDICT.replace("\n", "\r\n")
    assert load(b"\xef\xbb\xbf" + text.encode()).inference.input_data == "hi"
    assert refuse(text + "inference: {}\r\n").startswith("run.yaml:4: inference: this key is given twice")


def test_a_missing_file_is_also_a_file_not_found_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nope\.yaml: there is no such file") as caught:
        load_config(tmp_path / "nope.yaml")
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("path", ["a\0b", "pyproject.toml/x", "a\nb"])
def test_an_impossible_path_is_a_missing_file(path):
    with pytest.raises(ConfigFileNotFoundError) as caught:
        load_config(path)
    assert str(caught.value).isprintable()


def test_what_is_not_a_regular_file_is_not_opened(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a directory; give the YAML file itself"):
        load_config(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")  # opening it would wait for a writer
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_config(tmp_path / "pipe.yaml")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch):
    def deny(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)  # root, whom tests may run as, is never denied for real
    (tmp_path / "secret.yaml").touch()
    with pytest.raises(ConfigError, match=r"secret\.yaml: cannot be read: Permission denied"):
        load_config(tmp_path / "secret.yaml")


def test_size_depth_and_expansion_are_limited(refuse):
    assert f"is larger than {MAX_BYTES} bytes" in refuse("#" * MAX_BYTES + "\n")
    for text in ("x-a: " + "[" * 5000, "x-a: " + "{a: " * 5000):
        assert refuse(text) == "run.yaml:1: is nested deeper than 32 levels"
    bomb = "x-0: &0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    bomb += "".join(f"x-{i}: &{i} [{', '.join([f'*{i - 1}'] * 10)}]\n" for i in range(1, 30))
    assert "more than 100000 values, aliases counted as often as used" in refuse(bomb)


def test_depth_reached_through_aliases_is_limited(refuse):
    chain = "x-0: &0 [1]\n" + "".join(f"x-{i}: &{i} [*{i - 1}]\n" for i in range(1, 200))
    assert "nests deeper than 32 levels" in refuse(chain)


@pytest.mark.parametrize("text", ["x-a: &a [*a]\n", "x-a: &a {b: *a}\n", "x-a: &a\n  <<: *a\n"])
def test_an_alias_inside_itself_is_refused(text, refuse):
    assert "an alias contains itself" in refuse(text)


def test_anchors_and_merge_keys_work_and_own_keys_win(load):
    config = load(
        PREDICT + "x-a: &a {steps: 3, seed: 1}\nx-b: &b {steps: 4, max_norm: 2}\n"
        "training:\n  seed: 9\n  <<: [*a, *b]\nx-c: {<<: *a}\n"
    )
    assert (config.training.steps, config.training.seed, config.training.max_norm) == (3, 9, 2.0)
    assert config.extra["x-c"] == {"steps": 3, "seed": 1}


def test_an_error_in_merged_content_names_the_line_where_it_is_written(refuse):
    text = PREDICT + "x-a: &a\n  steps: none\ntraining:\n  <<: *a\n"
    assert refuse(text).startswith("run.yaml:5: training.steps: expected an integer >= 1")


def test_json_is_yaml_and_its_surrogate_pairs_are_one_character(load):
    config = load(
        '{"run_mode": "predict", "checkpoint": {"load_path": "w"}, "inference": {"input_data": "\\ud83d\\ude00"}}'
    )
    assert config.inference.input_data == "\U0001f600"


def test_dates_stay_text(load):
    assert load(PREDICT + "predict: {dataset_field: 2026-01-31}\n").predict.dataset_field == "2026-01-31"
    assert load(PREDICT + "model: {released: 2026-99-99}\n").model.extra == {"released": "2026-99-99"}


def test_the_line_of_every_key_is_known(data: Path):
    tree, source = read_yaml(data / "pretrain_mla.yaml")
    lines = (data / "pretrain_mla.yaml").read_text().splitlines()
    assert tree["optimizer"]["betas"] == [0.9, 0.95]
    for path, line in source.lines.items():
        if isinstance(path[-1], str):
            assert lines[line - 1].strip().startswith(f"{path[-1]}:"), path


@pytest.mark.parametrize("wrong", [None, 3, b"run.yaml", ["a"]])
def test_a_source_that_is_neither_path_nor_mapping_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="must be a path or a mapping"):
        load_config(wrong)

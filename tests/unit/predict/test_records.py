import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindformers_ext.predict import Record, input_files, normalize_input, record_count, sources

per_test_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def prompts(input_data, **options):
    return [record.prompt for record in normalize_input(input_data, **options)]


def read(tmp_path, content, name="in.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return list(normalize_input(str(path)))


def test_all_input_forms_give_the_same_records(tmp_path):
    text = 'def f(x):  # "two" \\n spaces'
    (tmp_path / "in.txt").write_text(text + "\n")
    (tmp_path / "in.jsonl").write_text(json.dumps({"instruction": text}) + "\n")
    (tmp_path / "in.json").write_text(json.dumps([text]))
    forms = [text, {"instruction": text}, [text], [{"instruction": text}], (text,)]
    forms += [str(tmp_path / f"in.{kind}") for kind in ("txt", "jsonl", "json")] + [tmp_path / "in.jsonl"]
    for form in forms:
        assert list(normalize_input(form)) == [Record(0, {"instruction": text}, text)]


def test_dataset_field_names_the_prompt_in_every_form(tmp_path):
    (tmp_path / "in.txt").write_text("q\n")
    (tmp_path / "in.jsonl").write_text('{"question": "q", "id": 7}\n')
    for form in ("q", ["q"], {"question": "q"}, str(tmp_path / "in.txt"), str(tmp_path / "in.jsonl")):
        assert prompts(form, dataset_field="question") == ["q"]
    (record,) = normalize_input(str(tmp_path / "in.jsonl"), "question")
    assert record.fields == {"question": "q", "id": 7}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"instruction": "a", "input": "b"}, "a\nb"),
        ({"instruction": "a", "input": ""}, "a"),
        ({"instruction": "a", "input": None}, "a"),
        ({"instruction": "a", "input": {"k": 1}}, "a"),
        ({"instruction": "", "input": "b"}, "b"),
        ({"instruction": "   "}, "   "),
    ],
)
def test_input_field_is_appended_only_when_it_is_text(fields, expected):
    assert prompts(fields) == [expected]


def test_a_prompt_taken_from_the_input_field_is_not_doubled():
    assert prompts({"input": "b"}, dataset_field="input") == ["b"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "no field 'instruction'"),
        ({"input": "b"}, "no field 'instruction'"),
        ({"instruction": ""}, "empty"),
        ({"instruction": None}, "null"),
        ({"instruction": 3}, "a number"),
        ({"instruction": True}, "a boolean"),
        ({"instruction": ["a"]}, "an array"),
    ],
)
def test_a_record_without_a_usable_prompt_is_a_schema_error_that_keeps_its_fields(fields, word):
    (record,) = normalize_input(fields)
    assert record.prompt is None and record.error.type == "schema" and word in record.error.message
    assert record.fields == fields


@pytest.mark.parametrize(
    ("line", "kind", "word"),
    [
        (b"{", "parse", "not valid JSON"),
        (b'{"instruction": "a"} x', "parse", "column 22"),
        (b'{"instruction": "\xff"}', "parse", "not UTF-8"),
        (b'{"instruction": "a\x00"}', "parse", "not valid JSON"),
        (b'{"instruction": "a", "v": NaN}', "parse", "NaN"),
        (b'{"instruction": "a", "v": -Infinity}', "parse", "Infinity"),
        (b'{"instruction": "a", "v": 1e999}', "parse", "range"),
        (b'{"instruction": "a", "v": ' + b"9" * 5000 + b"}", "parse", "not valid JSON"),
        (b'{"instruction": "a", "instruction": "b"}', "parse", "'instruction' is there twice"),
        (b'{"instruction": "a", "v": ' + b"[" * 300 + b"]" * 300 + b"}", "parse", "nested"),
        (b'{"instruction": "a", "v": ' + b"[" * 90000 + b"]" * 90000 + b"}", "parse", "nested"),
        (b"[1]", "schema", "an array"),
        (b"3", "schema", "a number"),
        (b'"text"', "schema", "a string"),
        (b"null", "schema", "null"),
    ],
)
def test_a_bad_line_is_one_error_record_and_its_neighbours_live(tmp_path, line, kind, word):
    before, bad, after = read(tmp_path, b'{"instruction": "p"}\n\n' + line + b'\n{"instruction": "q"}')
    assert (before.prompt, after.prompt, after.index) == ("p", "q", 2)
    assert bad.index == 1 and bad.error.type == kind
    assert word in bad.error.message and "in.jsonl:3: " in bad.error.message


def test_line_ends_marks_and_blank_lines_do_not_matter(tmp_path):
    mark = b"\xef\xbb\xbf"
    line = '{"instruction": "a\u2028b"}'.encode()
    content = mark + line + b"\r\n\r\n \t \n" + mark + line + b"\n\n" + line
    result = read(tmp_path, content)
    assert [record.prompt for record in result] == ["a\u2028b"] * 3
    assert [record.index for record in result] == [0, 1, 2]
    assert [record.prompt for record in read(tmp_path, mark + b"a \r\n\r\n  b", "in.txt")] == ["a ", "  b"]


def test_an_escaped_lone_surrogate_and_nul_are_read_as_they_are(tmp_path):
    (record,) = read(tmp_path, b'{"instruction": "\\ud800\\u0000"}')
    assert record.prompt == "\ud800\x00"


def test_a_line_beyond_the_limit_is_skipped_as_one_record(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 8)
    result = read(tmp_path, b"1234567\n123456789\nabcdefgh\nxy\n" + b"z" * 40, "in.txt")
    assert [record.prompt for record in result] == ["1234567", None, None, "xy", None]
    assert {record.error.type for record in result if record.error} == {"parse"}


def test_a_line_of_ten_megabytes_is_a_record_like_any_other(tmp_path):
    text = "\u20ac\\" * 2_500_000
    line = json.dumps({"instruction": text}, ensure_ascii=False).encode()
    assert len(line) > 10_000_000
    assert [record.prompt for record in read(tmp_path, line + b"\n" + line)] == [text, text]
    assert [record.prompt for record in read(tmp_path, b"[" + line + b"," + line + b"]", "in.json")] == [text, text]


def test_a_file_is_read_only_as_far_as_it_is_needed(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("line\n" * 100_000)
    source = normalize_input(path)
    assert next(source).prompt == "line"
    path.write_text("")
    assert sum(1 for _ in source) < 99_999


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.JSON", "my prompts.txt", "no/such/file", "./x"])
def test_a_missing_path_is_an_error_at_the_call(name):
    with pytest.raises(FileNotFoundError, match="put it in a list"):
        normalize_input(name)
    assert prompts([name]) == [name]


def test_a_missing_path_object_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        normalize_input(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="is a directory"):
        normalize_input(str(tmp_path))


@pytest.mark.parametrize("text", ["What is 12/4 minus 1?", "a\nb/c.txt\nd", "hello", "1 + 1 =", "x\x00y", "\ud800"])
def test_text_that_only_holds_a_slash_is_a_prompt(text):
    assert input_files(text) is None
    assert prompts(text) == [text]


@pytest.mark.parametrize("data", [["a", {"instruction": "b"}], [{"instruction": "b"}, "a"], ["a", 1], [None], 3, b"x"])
def test_other_types_are_refused_at_the_call(data):
    with pytest.raises(TypeError, match="input_data must be"):
        normalize_input(data)


def test_no_input_is_refused_and_an_empty_one_is_not(tmp_path):
    with pytest.raises(ValueError, match="no input_data"):
        normalize_input(None)
    assert list(normalize_input([])) == []
    assert read(tmp_path, b"") == []


def test_values_of_data_frames_become_json(tmp_path):
    (record,) = normalize_input({"instruction": "a", "label": np.int64(3), "v": np.array([1.5, 2.0]), 5: "x"})
    assert record.fields == {"instruction": "a", "label": 3, "v": [1.5, 2.0], "5": "x"}


@pytest.mark.parametrize("value", [{1}, object(), float("nan"), np.float32("inf"), {(1, 2): 3}, {1: 0, "1": 0}])
def test_a_value_that_is_no_json_is_an_error_record(value):
    good, bad = normalize_input([{"instruction": "a"}, {"instruction": "b", "v": value}])
    assert good.prompt == "a" and bad.prompt is None and bad.error.type in ("schema", "parse")


def test_a_value_that_holds_itself_is_an_error_record():
    loop: list = []
    loop.append(loop)
    (record,) = normalize_input({"instruction": "b", "v": loop})
    assert record.error.type == "schema"


def test_json_file_elements(tmp_path):
    result = read(tmp_path, b'[{"instruction": "a", "id": 1}, "b", 3, {"x": 1}]', "in.json")
    assert [record.prompt for record in result] == ["a", "b", None, None]
    assert "element 2 is a number" in result[2].error.message
    assert [record.prompt for record in read(tmp_path, b'{"instruction": "a"}', "in.json")] == ["a"]
    for content, word in ((b"{", "not valid"), (b"3", "a number"), (b'{"a": 1}\n{"a": 2}', "Extra"), (b"", "empty")):
        (record,) = read(tmp_path, content, "in.json")
        assert "in.json: element 0" in record.error.message and word in record.error.message


@pytest.mark.parametrize(
    ("data", "count"), [(["a", "b"], 2), ("a", 1), ({"x": 1}, 1), ([], 0), ("-", None), (None, None)]
)
def test_records_are_counted_where_nothing_has_to_be_read(tmp_path, data, count):
    assert record_count(data) == count
    (tmp_path / "in.txt").write_text("a")
    assert record_count(str(tmp_path / "in.txt")) is None


@per_test_folder
@given(st.lists(st.binary(max_size=60).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.booleans())
def test_any_bytes_give_one_record_for_each_line_that_is_not_blank(tmp_path, lines, as_text):
    result = read(tmp_path, b"\n".join(lines), "in.txt" if as_text else "in.jsonl")
    marks = [line.removesuffix(b"\r").removeprefix(b"\xef\xbb\xbf") for line in lines]
    assert len(result) == sum(1 for line in marks if line.strip())
    assert [record.index for record in result] == list(range(len(result)))
    assert all((record.prompt is None) != (record.error is None) for record in result)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@per_test_folder
@given(st.lists(json_values, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_any_json_lines_give_one_record_each_with_their_fields(tmp_path: Path, values, end):
    content = "".join(json.dumps(value) + end for value in values).encode()
    result = read(tmp_path, content)
    assert len(result) == len(values)
    for record, value in zip(result, values, strict=True):
        if record.error is None or record.fields:
            assert record.fields == value


@per_test_folder
@given(st.dictionaries(st.text(), json_values), st.text(st.characters()))
def test_a_dict_and_its_line_in_a_file_give_the_same_record(tmp_path: Path, fields, prompt):
    fields["instruction"] = prompt
    (from_dict,), (from_file,) = normalize_input(fields), read(tmp_path, json.dumps(fields).encode())
    assert (from_dict.prompt, from_dict.fields) == (from_file.prompt, from_file.fields)

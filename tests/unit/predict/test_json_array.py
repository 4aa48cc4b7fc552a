"""A JSON array is read element by element: in little memory, and past whatever is wrong with one of them."""

import io
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_ext.predict import json_array, normalize_input
from mindformers_ext.predict.json_array import Fault, split_elements

quick = settings(max_examples=150, deadline=None)


def split(data, limit=1 << 20):
    return list(split_elements(io.BytesIO(data), limit))


def messages(data):
    return [element.message for element in split(data) if isinstance(element, Fault)]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters())
    | st.sampled_from(['"', "\\", "[,]", "{", "\\u"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@quick
@given(st.lists(values), st.integers(1, 9), st.sampled_from([None, 0, 2]), st.booleans())
def test_any_array_is_cut_into_its_elements_wherever_the_chunks_end(elements, size, indent, ascii_only):
    text = " \r\n" + json.dumps(elements, indent=indent, ensure_ascii=ascii_only) + "\n\t"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "CHUNK_BYTES", size)
        found = split(text.encode("utf-8", "surrogatepass"))
    assert [json.loads(element.decode("utf-8", "surrogatepass")) for element in found] == elements


@quick
@given(st.lists(values, min_size=1), st.data())
def test_a_broken_element_costs_no_other_one(elements, data):
    texts = [json.dumps(element).encode() for element in elements]
    place = data.draw(st.integers(0, len(texts)))
    broken = data.draw(
        st.sampled_from([b"{]}", b"nul", b'{"a" 1}', b"\xff\xfe", b"}", b"{}{}", b"1 2", b'"\\x"', b"NaN"])
    )
    found = split(b"[" + b",".join([*texts[:place], broken, *texts[place:]]) + b"]")
    assert found == [*texts[:place], broken, *texts[place:]]


@quick
@given(st.binary(max_size=80) | st.text('[]{},":\\ a1\n').map(str.encode), st.integers(1, 9))
def test_any_bytes_are_elements_and_faults(data, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "CHUNK_BYTES", size)
        found = split(data)
    assert found == split(data)
    assert all(isinstance(element, bytes | Fault) for element in found)


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (b"[]", 0, []),
        (b" [ \n ] \n", 0, []),
        (b"[1,]", 1, ["a comma too many"]),
        (b"[,]", 0, ["a comma too many", "a comma too many"]),
        (b"[1,,2]", 2, ["a comma too many"]),
        (b"[1] x", 1, ["more text after the end"]),
        (b"[1]]", 1, ["more text after the end"]),
        (b'[{"a": 1}, {"b": 2}', 2, ["ends before the array"]),
        (b'[{"a": 1}, {"b": "2', 1, ["ends before the array"]),
        (b"[12, 34", 1, ["ends before the array"]),
        (b"[", 0, ["ends before the array"]),
        (b" \n", 0, ["is empty"]),
    ],
)
def test_what_is_wrong_with_an_array_is_said_once(data, count, words):
    found = split(data)
    assert sum(isinstance(element, bytes) for element in found) == count
    assert len(messages(data)) == len(words)
    for message, word in zip(messages(data), words, strict=True):
        assert word in message


def test_an_element_beyond_the_limit_is_one_fault_and_is_not_kept():
    long = b'"' + b"x" * 5000 + b'"'
    found = split(b"[1," + long + b",2]", limit=1000)
    assert found == [b"1", Fault("has more than 1000 bytes"), b"2"]


def test_a_long_array_is_read_in_the_memory_of_one_element(tmp_path):
    path = tmp_path / "long.json"
    record = json.dumps({"instruction": "x" * 1000}).encode()
    with open(path, "wb") as file:
        file.write(b"[" + record)
        for _ in range(20_000):  # 20 MB
            file.write(b",\n" + record)
        file.write(b"]")
    tracemalloc.start()
    count = sum(record.prompt is not None for record in normalize_input(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_001
    assert peak < 1 << 20


def test_the_first_record_is_there_before_the_file_is_read_on(tmp_path):
    path = tmp_path / "in.json"
    path.write_text(json.dumps(["x" * 100] * 10_000))
    source = normalize_input(str(path))
    assert next(source).prompt == "x" * 100
    path.write_text("")
    rest = list(source)
    assert len(rest) < 9_999 and "ends before the array" in rest[-1].error.message

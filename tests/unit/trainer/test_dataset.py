import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_ext.trainer.dataset import IGNORE_INDEX, Batch, assign_blocks, build_dataset, shuffled

EOS = 0


class ByteTokenizer:
    """One token a byte; ``bos`` is put before every text, and "ab" merges into one token."""

    def __init__(self, bos=(), eos=(EOS,)):
        self.bos, self.eos_token_ids = list(bos), eos

    def encode(self, text):
        return self.bos + list(text.replace("ab", "\u00ff").encode("latin-1"))


def ids(text):
    return list(text.encode())


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def rows(dataset):
    """(input ids, labels) of every document of every block, padding left out."""
    batch = dataset.batch(0, len(dataset))
    found = []
    for inputs, labels, numbers in zip(batch.input_ids, batch.labels, batch.documents, strict=True):
        for number in range(1, numbers.max() + 1):
            found.append((inputs[numbers == number].tolist(), labels[numbers == number].tolist()))
    return found


def test_labels_are_the_next_tokens_and_eos_ends_each_document(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "cde"}, {"text": "fg"}])
    assert rows(build_dataset("JsonlDataset", path, ByteTokenizer(), 8)) == [
        (ids("cde"), [*ids("de"), EOS]),
        (ids("fg"), [*ids("g"), EOS]),
    ]


def test_padding_has_no_label_and_no_document(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "cde"}])
    batch = build_dataset("JsonlDataset", path, ByteTokenizer(), 5).batch(0, 1)
    assert batch.labels[0, 3:].tolist() == [IGNORE_INDEX, IGNORE_INDEX]
    assert batch.documents.tolist() == [[1, 1, 1, 0, 0]]
    assert (batch.num_counted, batch.num_tokens) == (3, 3)


def test_only_the_response_is_learned_when_a_prompt_field_is_given(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"q": "1+1=", "a": "2"}])
    dataset = build_dataset("JsonlDataset", path, ByteTokenizer(), 8, prompt_field="q", response_field="a")
    assert rows(dataset) == [(ids("1+1=2"), [IGNORE_INDEX] * 3 + [*ids("2"), EOS])]


def test_prompt_tokens_are_those_of_prediction_even_if_a_token_spans_the_seam(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"q": "xa", "a": "bc"}])
    dataset = build_dataset("JsonlDataset", path, ByteTokenizer(bos=[7]), 8, prompt_field="q", response_field="a")
    assert rows(dataset) == [([7, *ids("xabc")], [IGNORE_INDEX] * 2 + [*ids("bc"), EOS])]


def test_long_documents_are_cut_without_losing_a_label(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "cdefghi"}])
    found = rows(build_dataset("JsonlDataset", path, ByteTokenizer(), 3))
    assert sorted(found) == [(ids("cde"), ids("def")), (ids("fgh"), ids("ghi")), (ids("i"), [EOS])]


def test_pieces_of_a_long_prompt_without_a_label_are_left_out(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"q": "cdefgh", "a": "i"}])
    dataset = build_dataset("JsonlDataset", path, ByteTokenizer(), 3, prompt_field="q", response_field="a")
    assert rows(dataset) == [(ids("fgh"), [IGNORE_INDEX] * 2 + ids("i")), (ids("i"), [EOS])]


def test_without_packing_each_block_holds_one_document_and_needs_no_mask(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "cd"}, {"text": "e"}])
    dataset = build_dataset("JsonlDataset", path, ByteTokenizer(), 8, packing=False)
    assert len(dataset) == 2
    assert dataset.batch(0, 2).attention_mask is None


def test_text_file_lines_are_documents(tmp_path):
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbfcd\r\n\r\n  \nef\xc2\x85gh")
    dataset = build_dataset("TextDataset", str(tmp_path / "d.txt"), ByteTokenizer(), 16)
    assert [inputs for inputs, _ in rows(dataset)] == [ids("cd"), [*b"ef", 0x85, *b"gh"]]


def test_positions_and_mask_separate_documents():
    documents = np.array([[1, 1, 2, 2, 2, 0]], np.int32)
    batch = Batch(np.zeros_like(documents), np.zeros_like(documents), documents)
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0]]
    visible = batch.attention_mask[0, 0] == 0
    assert batch.attention_mask.shape == (1, 1, 6, 6)
    for query in range(6):
        for key in range(6):
            assert visible[query, key] == (key <= query and documents[0, key] == documents[0, query])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.booleans())
def test_packing_never_overfills_a_block_and_leaves_none_empty(sizes, in_order):
    blocks = assign_blocks(sizes, 12, in_order)
    used = np.bincount(blocks, weights=sizes)
    assert used.min() > 0
    assert used.max() <= 12
    if in_order:
        assert blocks == sorted(blocks)
    else:
        assert np.count_nonzero(2 * used <= 12) <= 1  # best fit: two blocks that are half empty would be one


def test_stream_visits_every_sample_once_an_epoch_in_an_order_of_its_own(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": chr(ord("c") + i) * 4} for i in range(20)])
    dataset = build_dataset("JsonlDataset", path, ByteTokenizer(), 4, shuffle=True, seed=3)
    epochs = [dataset.batch(20 * epoch, 20).input_ids[:, 0].tolist() for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_stream_can_be_entered_anywhere(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": chr(ord("c") + i) * 4} for i in range(7)])
    options = {"shuffle": True, "seed": 5}
    whole = build_dataset("JsonlDataset", path, ByteTokenizer(), 4, **options).batch(0, 21).input_ids
    for start in (13, 5, 6):  # backwards too, and across the end of an epoch
        part = build_dataset("JsonlDataset", path, ByteTokenizer(), 4, **options).batch(start, 3).input_ids
        assert np.array_equal(part, whole[start : start + 3])


def test_order_of_a_seed_is_fixed():
    assert shuffled(8, seed=42, epoch=0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]


def test_order_is_kept_without_shuffle(tmp_path):
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name * 3}, {"text": name * 2}]) for name in "cd"]
    found = rows(build_dataset("JsonlDataset", files, ByteTokenizer(), 6))
    assert [inputs for inputs, _ in found] == [ids("ccc"), ids("cc"), ids("ddd"), ids("dd")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"txt": "a"}', "field 'text' must be a text that is not empty; the record has txt"),
        (b'{"text": ""}', "it is ''"),
        (b'{"text": 5}', "it is 5"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
        (b'{"text": "\\ud800"}', "field 'text' holds half of a surrogate pair"),
        (b'{"text": "a", "text": "b"}', "the key 'text' is there twice"),
        (b'{"text": "a", "n": NaN}', "NaN is not JSON"),
        (b'{"text": "a", "n": 1e999}', "a number is beyond the range of a float"),
        (b"[" * 100_000, "nested deeper than 200 levels"),
        (b'{"text": "z"}', "token id 122 does not fit the model's vocab_size 120"),
    ],
)
def test_bad_lines_are_refused_with_file_and_line(tmp_path, line, problem):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "ok"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"d\.jsonl:3: ") as raised:
        build_dataset("JsonlDataset", str(path), ByteTokenizer(), 8, vocab_size=120)
    assert problem in str(raised.value)


def test_a_byte_order_mark_may_begin_any_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "cc"}\n\xef\xbb\xbf{"text": "dd"}\n')
    found = rows(build_dataset("JsonlDataset", str(path), ByteTokenizer(), 3))
    assert [inputs for inputs, _ in found] == [ids("cc"), ids("dd")]


def test_unusable_options_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "cd"}])
    with pytest.raises(ValueError, match="MindDataset"):
        build_dataset("MindDataset", path, ByteTokenizer(), 8)
    with pytest.raises(ValueError, match="prompt_field and response_field go together"):
        build_dataset("JsonlDataset", path, ByteTokenizer(), 8, prompt_field="q")
    with pytest.raises(ValueError, match="prompt_field needs type JsonlDataset"):
        build_dataset("TextDataset", path, ByteTokenizer(), 8, prompt_field="q", response_field="a")
    with pytest.raises(ValueError, match="no EOS token"):
        build_dataset("JsonlDataset", path, ByteTokenizer(eos=()), 8)
    with pytest.raises(ValueError, match="is a directory"):
        build_dataset("JsonlDataset", str(tmp_path), ByteTokenizer(), 8)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        build_dataset("JsonlDataset", str(tmp_path / "none.jsonl"), ByteTokenizer(), 8)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"no documents in .*empty\.jsonl"):
        build_dataset("JsonlDataset", str(tmp_path / "empty.jsonl"), ByteTokenizer(), 8)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=4))
def test_unpacking_gives_every_document_a_row_and_loses_nothing(blocks):
    width = max(sum(sizes) for sizes in blocks) + 1
    shape = (len(blocks), width)
    documents = np.zeros(shape, np.int32)
    for row, sizes in zip(documents, blocks, strict=True):
        numbers = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        row[: len(numbers)] = np.unique(numbers, return_inverse=True)[1] + 1
    values = np.arange(documents.size, dtype=np.int32).reshape(shape)
    batch = Batch(values, np.where(documents > 0, values + 1, IGNORE_INDEX), documents)
    expected = [
        values[row][documents[row] == number].tolist()
        for row in range(len(blocks))
        for number in range(1, documents[row].max() + 1)
    ]
    if not expected:
        return
    single = batch.unpacked()
    assert [row[mark > 0].tolist() for row, mark in zip(single.input_ids, single.documents, strict=True)] == expected
    assert [row[row >= 0].tolist() for row in single.labels] == [[v + 1 for v in row] for row in expected]
    assert (single.num_counted, single.num_tokens, single.attention_mask) == (batch.num_counted, batch.num_tokens, None)

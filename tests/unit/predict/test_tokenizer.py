import json
import os
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mindformers_ext.predict import Tokenizer

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
EOS, PAD, IM_END = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(DATA)


@pytest.fixture
def folder(tmp_path):
    """A copy of the tokenizer whose files a test may change."""
    shutil.copytree(DATA, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def change(path, **changes):
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def bos_template(token="<|im_end|>", token_id=IM_END):
    sequence = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": sequence,
        "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def sentencepiece_like():
    """Words with a leading space mark, byte fallback and a decoder that drops the first space, as Llama 2 has it."""
    words = ["<s>", "\u2581Hello", "\u2581world", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def test_special_tokens_come_from_tokenizer_config(tokenizer):
    assert tokenizer.eos_token_ids == (EOS,)
    assert tokenizer.pad_token_id == PAD
    assert tokenizer.bos_token_id is None
    assert tokenizer.vocab_size == 300


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The quick brown fox", [291, 223, 83, 87, 75, 299, 267, 84, 81, 89, 80, 223, 274, 90]),
        ("1 + 1 =", [19, 260, 261, 262]),
        ("def add(a, b):\n    return", [70, 71, 72, 263, 272, 10, 67, 14, 267, 271, 287, 269, 71, 86, 87, 84, 80]),
        ("\u4eca\u5929\u5929\u6c14", [279, 235, 280, 280, 165, 111, 245]),
    ],
)
def test_ids_are_those_of_transformers(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids


def test_a_folder_without_tokenizer_config_has_no_special_roles(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id, tokenizer.bos_token_id) == ((), None, None)


@settings(deadline=None)
@given(st.text())
def test_text_survives_encode_and_decode(text):
    tokenizer = Tokenizer.from_folder(DATA)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_ids_without_a_token_decode_to_nothing(tokenizer):
    ids = tokenizer.encode("a b")
    assert tokenizer.decode([310, *ids, 300, 319, 10**6]) == "a b"
    assert tokenizer.decode_new(ids, [310, *ids, 319]) == "a b"


def test_special_tokens_are_dropped_or_shown(tokenizer):
    ids = [EOS, *tokenizer.encode("hi"), IM_END]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|endoftext|>hi<|im_end|>"
    assert tokenizer.decode_new([EOS], ids[1:], skip_special_tokens=False) == "hi<|im_end|>"


def test_spaces_before_punctuation_are_kept(tokenizer):
    text = "hello ! it 's { 'a' : 1 } ."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_a_value_error(tokenizer):
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_padding_and_truncation_of_the_file_are_not_applied(folder):
    change(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": PAD,
            "pad_type_id": 0,
            "pad_token": "<|pad|>",
        },
    )
    assert Tokenizer.from_folder(folder).encode("Hello world") == Tokenizer.from_folder(DATA).encode("Hello world")


def test_a_bos_is_added_once_even_when_the_text_begins_with_it(folder):
    change(folder / "tokenizer.json", post_processor=bos_template())
    tokenizer = Tokenizer.from_folder(folder)
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [IM_END, *plain]
    assert tokenizer.encode("<|im_end|>hi") == [IM_END, *plain]
    assert tokenizer.encode("<|im_end|><|im_end|>hi") == [IM_END, IM_END, *plain]
    assert tokenizer.encode("<|pad|>hi") == [IM_END, PAD, *plain]
    assert tokenizer.encode("") == [IM_END]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("template", [True, False])
def test_tokenizer_json_decides_about_the_bos_and_a_disagreeing_flag_is_logged(folder, log, flag, template):
    change(folder / "tokenizer.json", post_processor=bos_template() if template else None)
    change(folder / "tokenizer_config.json", bos_token="<|im_end|>", add_bos_token=flag)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.encode("hi")[0] == IM_END) is template
    assert ("add_bos_token" in log.text) is (flag != template)


@pytest.mark.parametrize(
    "value",
    ["<|im_end|>", {"content": "<|im_end|>"}, {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": True}],
)
def test_a_special_token_may_be_a_string_or_an_object(folder, value):
    change(folder / "tokenizer_config.json", eos_token=value)
    assert Tokenizer.from_folder(folder).eos_token_ids == (IM_END,)


def test_tokens_that_only_the_config_names_get_new_ids_and_are_special(folder):
    change(
        folder / "tokenizer_config.json",
        unk_token="<unk>",
        image_token="<image>",
        extra_special_tokens=["<x>"],
        added_tokens_decoder={"300": {"content": "<think>", "special": False}, "0": {"content": "<|endoftext|>"}},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 304
    assert sorted(tokenizer.encode("<think><unk><image><x>")) == [300, 301, 302, 303]
    assert tokenizer.decode(tokenizer.encode("a<think><unk><image><x>")) == "a<think>"


def test_special_tokens_map_is_read_where_the_config_lists_no_added_tokens(folder):
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (IM_END,)
    change(folder / "tokenizer_config.json", added_tokens_decoder={})
    assert Tokenizer.from_folder(folder).eos_token_ids == (EOS,)


def test_a_sentencepiece_answer_keeps_its_leading_space():
    tokenizer = sentencepiece_like()
    assert tokenizer.decode([2]) == "world"
    assert tokenizer.decode_new([0, 1], [2]) == " world"
    assert tokenizer.decode_new([0, 1], [3, 3, 3, 3, 2]) == "     world"
    assert tokenizer.decode_new([0, 1], []) == ""


def test_bytes_that_are_no_character_do_not_hide_the_answer():
    tokenizer = sentencepiece_like()
    e_acute = [4 + 0xC3, 4 + 0xA9]
    assert tokenizer.decode_new([1, *e_acute], e_acute) == "\u00e9"
    # The broken byte joins the prompt's bytes, so the prompt no longer decodes to what it was.
    assert tokenizer.decode_new([1, *e_acute], [4 + 0xFF, 2]) == "\ufffd world"


def test_a_missing_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must hold the model's tokenizer files"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ValueError, match=r"vocab\.json, merges\.txt without a tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\x00" * 99, b"[" * 9999, b'{"model": {"type": "BPE"}}', b"version https"]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_file_is_named(folder, name, content):
    if name != "tokenizer.json" and content.endswith(b"}"):
        content = b"[]"
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as caught:
        Tokenizer.from_folder(folder)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token", 3),
        ("pad_token", ["<|pad|>"]),
        ("bos_token", ""),
        ("unk_token", {"text": "<unk>"}),
        ("extra_special_tokens", "<x>"),
        ("extra_special_tokens", [3]),
        ("added_tokens_decoder", ["<x>"]),
        ("added_tokens_decoder", {"zero": "<x>"}),
        ("added_tokens_decoder", {"0": 5}),
    ],
)
def test_a_wrong_type_in_tokenizer_config_names_file_and_key(folder, key, value):
    change(folder / "tokenizer_config.json", **{key: value})
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {key}"):
        Tokenizer.from_folder(folder)


def test_a_truncated_tokenizer_file_is_refused(folder):
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a usable tokenizer file"):
        Tokenizer.from_folder(folder)


def test_a_regular_expression_without_end_costs_one_text_and_not_the_run(folder):
    split = {"type": "Split", "pattern": {"Regex": "^(a|a|aa)+$"}, "behavior": "Isolated", "invert": False}
    change(folder / "tokenizer.json", pre_tokenizer=split)
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(ValueError, match="the tokenizer gives up"):
        tokenizer.encode("a" * 40 + "!")
    assert tokenizer.encode("b!")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_huge_file_is_refused_before_it_is_read(folder, name):
    os.truncate(folder / name, 1 << 40)  # has no blocks on the disk
    with pytest.raises(ValueError, match=f"{name} has {1 << 40} bytes".replace(".", r"\.")):
        Tokenizer.from_folder(folder)


def test_pre_tokenizer_of_other_kinds_work_too():
    backend = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "!": 1, "[UNK]": 2}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("hello ! x") == [0, 1, 2]
    assert tokenizer.decode([0, 1]) == "hello !"

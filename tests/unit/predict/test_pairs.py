"""Contexts, continuations and windows as lm-evaluation-harness makes them."""

from pathlib import Path

import pytest

from mindformers_ext.predict import Tokenizer
from mindformers_ext.predict.pairs import cut_left, encode_pair, prefix_token, rolling_windows

DATA = Path(__file__).parents[2] / "data" / "tokenizer"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(DATA)


def test_context_and_continuation_are_encoded_as_one_text(tokenizer):
    context, continuation = encode_pair(tokenizer, "the ca", "t and")
    assert context == tokenizer.encode("the ca")
    assert continuation == tokenizer.encode("the cat and")[len(context) :]


@pytest.mark.parametrize("spaces", [" ", "  ", "\n", " \t\n"])
def test_white_space_at_the_end_of_a_context_goes_to_the_continuation(tokenizer, spaces):
    assert encode_pair(tokenizer, "the" + spaces, "cat") == encode_pair(tokenizer, "the", spaces + "cat")


def test_before_an_empty_context_stands_bos_or_else_eos(tokenizer):
    backend = tokenizer._backend
    assert prefix_token(Tokenizer(backend, {"bos_token": "a", "eos_token": "b"})) == backend.token_to_id("a")
    only_eos = Tokenizer(backend, {"eos_token": "b"})
    eos = backend.token_to_id("b")
    for context in ("", " "):
        pair = encode_pair(only_eos, context, "cat")
        assert pair == ([eos], tokenizer.encode(context + "cat", add_special_tokens=False))
    with pytest.raises(ValueError, match="neither a bos_token nor an eos_token"):
        encode_pair(Tokenizer(backend), "", "cat")


def test_a_continuation_that_begins_with_the_prefix_has_it_once(tokenizer):
    only = Tokenizer(tokenizer._backend, {"eos_token": "c"})
    ids = tokenizer.encode("c z", add_special_tokens=False)
    assert ids[0] == prefix_token(only)
    assert encode_pair(only, "", "c z") == (ids[:1], ids[1:])


@pytest.mark.parametrize(("context", "continuation"), [("the", ""), ("", "")])
def test_nothing_to_score_is_refused(tokenizer, context, continuation):
    with pytest.raises(ValueError, match="the continuation gives no tokens"):
        encode_pair(Tokenizer(tokenizer._backend, {"eos_token": "c"}), context, continuation)


def test_a_pair_is_cut_on_the_left_until_all_but_its_last_token_fit():
    assert cut_left(([1, 2, 3], [4, 5]), 4) == ([1, 2, 3], [4, 5])
    assert cut_left(([1, 2, 3], [4, 5]), 3) == ([2, 3], [4, 5])
    assert cut_left(([1, 2, 3], [4, 5]), 2) == ([3], [4, 5])
    with pytest.raises(ValueError, match="2 tokens of the continuation exceed the model's length 1"):
        cut_left(([1, 2, 3], [4, 5]), 1)


def test_windows_are_those_of_the_worked_example():
    # get_rolling_token_windows of 0 to 9 with prefix 99, max_seq_len 4 and context_len 1, made disjoint.
    assert rolling_windows(range(10), 99, 4) == [
        ([99], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]


@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize("count", range(0, 20, 3))
def test_windows_predict_every_token_once_and_read_what_the_model_can(count, length):
    windows = rolling_windows(range(count), 99, length)
    assert [token for _, continuation in windows for token in continuation] == list(range(count))
    assert all(context and len(context) + len(continuation) - 1 <= length for context, continuation in windows)
    assert all(len(context) + len(continuation) - 1 == length for context, continuation in windows[1:])

"""Streamers get what the rows get, and text comes in whole characters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stubs import BOS, EOS, PAD, A, B, Bigram, C

from mindformers_ext.generate import GenerationConfig, Streamer, TextStreamer, generate_rows


class Recorder(Streamer):
    def __init__(self):
        self.calls = []

    def put(self, tokens):
        self.calls.append(tokens.tolist())

    def end(self):
        self.calls.append("end")


def decode_bytes(prompt, new):
    return bytes(new).decode("utf-8", "replace")


def stream(tokens, decode=decode_bytes):
    pieces = []
    streamer = TextStreamer(decode, pieces.append, stop_ids=[256])
    streamer.put(np.array([[65, 66]]))
    for token in tokens:
        streamer.put(np.array([token]))
    streamer.end()
    return pieces


def test_prompts_come_first_then_a_token_of_each_row_then_the_end():
    recorder = Recorder()
    config = GenerationConfig(max_new_tokens=3, eos_token_id=EOS, pad_token_id=PAD)
    generate_rows(Bigram(), [[BOS], [A, B]], config, streamer=recorder)
    assert recorder.calls == [[[PAD, BOS], [A, B]], [A, C], [EOS, EOS], "end"]


def test_a_finished_row_streams_pads():
    recorder = Recorder()
    config = GenerationConfig(max_new_tokens=3, eos_token_id=EOS, pad_token_id=PAD)
    generate_rows(Bigram(), [[A], [BOS], [B], [B, B]], config, streamer=recorder)
    assert recorder.calls[2] == [PAD, EOS, EOS, EOS]


def test_the_end_is_told_after_an_error_too():
    recorder = Recorder()
    table = np.full((6, 6), np.nan, np.float32)
    with pytest.raises(FloatingPointError):
        generate_rows(Bigram(table), [[BOS]], GenerationConfig(max_new_tokens=3), streamer=recorder)
    assert recorder.calls[-1] == "end"


@given(st.text(max_size=20))
def test_pieces_are_whole_characters_and_add_up(text):
    pieces = stream(text.encode("utf-8", "ignore"))
    assert "".join(pieces) == text
    assert all(len(piece) == 1 for piece in pieces)  # as soon as it is complete


@given(st.lists(st.integers(0, 255), max_size=200))
def test_bytes_that_are_no_characters_are_neither_lost_nor_held_for_ever(tokens):
    pieces = stream(tokens)
    assert "".join(pieces) == decode_bytes((), tokens)


def test_endless_invalid_bytes_are_passed_on_in_bounded_work():
    lengths = []

    def decode(prompt, new):
        lengths.append(len(prompt) + len(new))
        return decode_bytes(prompt, new)

    assert stream([255] * 500, decode) != []
    assert max(lengths) <= 40


def test_half_a_character_is_never_emitted_after_much_invalid_text():
    pieces = stream([255] * 30 + list("🙂".encode()) + [65])
    assert "".join(pieces).endswith("🙂A")


def test_ids_without_text_are_left_out():
    assert stream([72, 256, 105, 256]) == ["H", "i"]


def test_a_text_streamer_follows_one_row_only():
    with pytest.raises(ValueError, match="follows one row, not 2"):
        generate_rows(Bigram(), [[BOS], [B]], GenerationConfig(max_new_tokens=1), streamer=TextStreamer(decode_bytes))


def test_the_streamed_text_is_that_of_the_answer():
    pieces = []
    streamer = TextStreamer(lambda _, new: "".join("_^$abc"[t] for t in new), pieces.append, stop_ids=[EOS])
    (row,) = generate_rows(Bigram(), [[BOS]], GenerationConfig(max_new_tokens=4, eos_token_id=EOS), streamer=streamer)
    assert row.token_ids == [A, EOS] and pieces == ["a"]

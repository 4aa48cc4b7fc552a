"""The generation section: users' numbers, all mistakes at once, and options without effect."""

from __future__ import annotations

import pytest

BASE = "run_mode: predict\ncheckpoint: {load_path: w}\ninference: {}\n"


def test_numbers_as_users_write_them(load):
    section = load(
        BASE
        + "generation: {do_sample: true, temperature: 2, top_k: 5.0, top_p: 1, repetition_penalty: 2, min_p: 1e-3}\n"
    ).generation
    assert (section.temperature, section.top_k, section.top_p, section.repetition_penalty) == (2.0, 5, 1.0, 2.0)
    assert section.min_p == 0.001
    assert isinstance(section.temperature, float) and isinstance(section.top_k, int)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature: 0.0", "temperature: expected a number from 1e-38 to 1e38 (greedy decoding is do_sample: false)"),
        ("top_p: 1.5", "top_p: expected a number from 0 to 1, got the number 1.5"),
        ("top_k: true", "top_k: expected an integer >= 1, or 0 or -1 for all tokens, got true"),
        ("seed: '7'", "seed: expected an integer from 0 to 2**32 - 1, or null, got the text '7'; remove the quotes"),
        ("seed: -1", "seed: expected an integer from 0 to 2**32 - 1, or null, got the number -1"),
        ("num_return_sequences: 2", "num_return_sequences: 2 answers need do_sample: true or num_beams of at least 2"),
        ("logits_processor: [x]", "logits_processor: an option of GenerationConfig in Python, not of the YAML"),
        ("sequence_bias: [[3, 1.0]]", "sequence_bias: expected a list of pairs [[token ids], bias], or null"),
    ],
)
def test_an_option_out_of_range_is_refused_before_anything_is_loaded(text, message, refuse):
    # The options themselves are right in the line before, so do_sample is no reason to pass over a value.
    assert f"run.yaml:6: generation.{message}" in refuse(BASE + "generation:\n  do_sample: false\n  " + text + "\n")


def test_all_mistakes_are_told_at_once_a_line_each(refuse):
    message = refuse(BASE + "generation:\n  top_p: 2\n  top_k: 1.5\n  nonsense: 1\n  temperature: 0\n")
    lines = message.split("\n")
    assert [line.split(": ")[1] for line in lines] == [
        "generation.top_p",
        "generation.top_k",
        "generation.nonsense",
        "generation.temperature",
    ]


def test_many_mistakes_are_counted(refuse):
    lines = refuse(BASE + "generation:\n" + "".join(f"  nonsense{i}: 1\n" for i in range(25))).split("\n")
    assert len(lines) == 11 and lines[-1] == "and 15 more"


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        ("{top_p: 0.5}", ["generation: top_p has no effect without do_sample: true"]),
        ("{top_p: 0.5, top_k: 3}", ["generation: top_k, top_p have no effect without do_sample: true"]),
        ("{do_sample: true, top_p: 0.5}", []),
        ("{early_stopping: true}", ["generation: early_stopping has no effect without num_beams above 1"]),
        ("{num_beams: 4, early_stopping: never}", []),
    ],
)
def test_options_without_effect_are_named(text, warnings, load):
    assert load(BASE + f"generation: {text}\n").warnings == warnings

"""Dotted keys: from the command line to a value, and into the tree."""

from __future__ import annotations

from typing import Any

import pytest

from mindformers_ext.config import ConfigError, load_config, parse_overrides

PREDICT: dict[str, Any] = {"run_mode": "predict", "checkpoint": {"load_path": "w"}, "inference": {}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-1", -1),
        ("1.5", 1.5),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", ""),
        ("hello", "hello"),
        ("two words: and a colon # not a comment", "two words: and a colon # not a comment"),
        ("12 # twelve", "12 # twelve"),
        ("- a", "- a"),
        ("*x", "*x"),
        ("!!int x", "!!int x"),
        ("a\nb", "a\nb"),
        ("'12'", "12"),
        ('"a\\tb"', "a\tb"),
        ('"open', '"open'),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
        ("{a: [1], b: null}", {"a": [1], "b": None}),
        ("[INST] hello", "[INST] hello"),
        ("[1, 2", "[1, 2"),
        ("{a: 1, a: 2}", "{a: 1, a: 2}"),
        ("[" * 3000, "[" * 3000),
        ("2026-01-31", "2026-01-31"),
        ("a=b", "a=b"),
        ("\U0001f600", "\U0001f600"),
    ],
)
def test_a_value_is_what_yaml_takes_it_for_else_the_text_itself(text, value):
    for tokens in (["--a.b", text], [f"--a.b={text}"]):
        result = parse_overrides(tokens)["a.b"]
        assert result == value and type(result) is type(value)


def test_options_come_in_both_forms_and_keep_their_order():
    assert list(parse_overrides(["--b.c=1", "--a.b", "2", "--a.c", "-3"]).items()) == [
        ("b.c", 1),
        ("a.b", 2),
        ("a.c", -3),
    ]
    assert parse_overrides([]) == {}
    assert parse_overrides(["--a.b=--c.d"]) == {"a.b": "--c.d"}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--a.b"], "--a.b: has no value; write --a.b value or --a.b=value"),
        (["--a.b", "--c.d", "1"], "--a.b: has no value"),
        (["-a.b", "1"], "-a.b: not a known option; an override is written --section.key value"),
        (["a.b=1"], "a.b: not a known option"),
        (["--a.b", "1", "2"], "2: not a known option"),
        (["--seed", "1"], "--seed: not a known option"),
        (["--seed=1.5"], "--seed: not a known option"),
        (["--"], "--: not a known option"),
        (["--a..b", "1"], "--a..b: a part of the key is empty"),
        (["--.a", "1"], "--.a: a part of the key is empty"),
        (["--a.b", "1", "--a.b=2"], "--a.b: is given twice; give it once"),
    ],
)
def test_what_is_no_override_is_refused(tokens, message):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(tokens)
    assert str(caught.value).startswith(message)


def test_an_override_wins_over_the_file_and_makes_missing_sections(data):
    config = load_config(data / "predict.yaml", {"inference.batch_size": 3, "model.rope_scaling.factor": "2e0"})
    assert config.inference is not None and config.inference.batch_size == 3
    assert config.inference.input_data == "prompts.jsonl"
    assert config.model.extra == {"rope_scaling": {"factor": 2.0}}


def test_a_section_that_is_null_can_be_filled():
    assert load_config({**PREDICT, "training": None}, {"training.seed": 3}).training.seed == 3


def test_an_entry_of_a_list_is_addressed_by_its_number(data):
    assert load_config(data / "train.yaml", {"callbacks.0.every": 7}).callbacks[0].extra == {"every": 7}
    for key in ("callbacks.1.every", "callbacks.-1.every", "callbacks.x.every", "callbacks.9999999999999.every"):
        with pytest.raises(ConfigError, match="callbacks is a list of 1 without entry"):
            load_config(data / "train.yaml", {key: 7})


@pytest.mark.parametrize("tree", [PREDICT, {**PREDICT, "callbacks": None}])
def test_a_missing_list_is_made_entry_by_entry(tree):
    overrides = {"callbacks.0.type": "A", "callbacks.1.type": "B", "callbacks.0.every": 7}
    config = load_config(tree, overrides)
    assert [(entry.type, entry.extra) for entry in config.callbacks] == [("A", {"every": 7}), ("B", {})]
    with pytest.raises(ConfigError, match="callbacks is a list of 1 without entry 2"):
        load_config(tree, {"callbacks.0.type": "A", "callbacks.2.type": "B"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"inference.batch_size": 0}, "override inference.batch_size: expected an integer >= 1, got the number 0"),
        ({"inference.batchsize": 1}, "override inference.batchsize: unknown key; did you mean inference.batch_size?"),
        ({"foo.bar": 1}, "override foo: unknown key"),
        ({"run_mode.x": 1}, "override run_mode.x: run_mode is the text 'predict', not a section"),
        ({"model.a.b": object()}, "override model.a.b: an object of type object"),
        ({"a..b": 1}, "override 'a..b': the key must be names joined by dots"),
        ({"": 1}, "override '': the key must be names"),
        ({3: 1}, "override 3: the key must be names"),
        ({".".join("a" * 40): 1}, "override a.a."),
        ({"lora_config.target_modules": "x"}, "override lora_config: adapters are not supported yet"),
    ],
)
def test_a_wrong_override_is_told_as_such(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(PREDICT, overrides)
    assert str(caught.value).startswith(message)


def test_the_callers_value_is_not_shared():
    prompts = ["a"]
    config = load_config(PREDICT, {"inference.input_data": prompts})
    assert config.inference is not None and isinstance(config.inference.input_data, list)
    config.inference.input_data.append("b")
    assert prompts == ["a"]


def test_command_line_text_reaches_the_configuration(data):
    overrides = parse_overrides(
        ["--optimizer.betas", "[0.8, 0.9]", "--optimizer.eps", "1e-6", "--inference.output=a.txt"]
    )
    config = load_config(data / "predict.yaml", overrides)
    assert config.optimizer.betas == [0.8, 0.9] and config.optimizer.eps == 1e-6
    assert config.inference is not None and config.inference.output == "a.txt"

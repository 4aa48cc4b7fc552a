"""Whatever is thrown at it: a configuration or one line of ConfigError, never another exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindformers_ext.config import ConfigError, TrainConfig, load_config, parse_overrides
from mindformers_ext.config.build import all_keys

KEYS = all_keys()
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["1e-6", "x.txt"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
# Pieces that make YAML interesting, so that random texts get past the first line.
PIECES = st.sampled_from(
    [
        "run_mode",
        "inference",
        "model",
        "callbacks",
        ": ",
        ":\n  ",
        "\n",
        "- ",
        "{",
        "}",
        "[",
        "]",
        ",",
        "&a ",
        "*a",
        "<<",
    ]
    + [
        "!!int ",
        "!!map ",
        "!x ",
        "'",
        '"',
        "\t",
        "#",
        "|",
        ">",
        "1e-6",
        "0x",
        "0b",
        "1:2",
        ".inf",
        "2026-01-01",
        "~",
        "yes",
    ]
    + ["\\ud800", "\\n", "%", "---", "...", "? ", "\x00", "\u2028", "\ufeff", "=", "\r", "@", "`"]
)
fast = settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def outcome(source: Any, overrides: dict[str, Any] | None = None) -> TrainConfig | str:
    try:
        config = load_config(source, overrides)
    except ConfigError as error:
        message = str(error)
        lines = message.split("\n")
        assert all(line and line.isprintable() and len(line) < 1000 for line in lines) and len(lines) <= 11
        return message
    config.to_dict()
    return config


@fast
@given(text=st.lists(PIECES | st.text(max_size=2), max_size=30).map("".join))
def test_any_text_file_loads_or_is_refused_in_one_line(text: str, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(path)


@fast
@given(content=st.binary(max_size=60))
def test_any_bytes_load_or_are_refused_in_one_line(content: bytes, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    outcome(path)


@fast
@given(overrides=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3), mode=st.sampled_from(["train", "predict"]))
def test_any_value_for_any_key_is_accepted_or_refused_by_name(overrides: dict[str, Any], mode: str, tmp_path: Path):
    base = {"run_mode": mode, "checkpoint": {"load_path": "w"}, "inference": {}}
    result = outcome(base, overrides)
    if isinstance(result, TrainConfig):
        again = load_config(result.to_dict())
        assert again == result


@fast
@given(tree=st.dictionaries(st.sampled_from([key for key in KEYS if "." not in key]) | st.text(max_size=5), VALUES))
def test_any_mapping_loads_or_is_refused(tree: dict[str, Any]):
    outcome(tree)


@fast
@given(
    tokens=st.lists(
        st.text(max_size=6) | st.sampled_from(["--a.b", "--c.d=1", "--e", "-f", "--x.y=[", "--g.h", "--i.j={a: *b}"]),
        max_size=6,
    )
)
def test_any_command_line_is_read_or_refused(tokens: list[str]):
    try:
        parse_overrides(tokens)
    except ConfigError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("key", KEYS)
def test_every_key_refuses_an_object_of_the_wrong_kind_by_its_name(key: str):
    base = {"run_mode": "predict", "checkpoint": {"load_path": "w"}, "inference": {}}
    message = outcome(base, {key: -7.5})
    if isinstance(message, TrainConfig):  # a number without lower bound
        assert key in (
            "training.max_norm",
            "generation.length_penalty",
            *(name for name in KEYS if name.endswith("_threshold")),
        )
    else:
        assert message.startswith(f"override {key}: expected ")
        assert message.count("-7.5") == 1

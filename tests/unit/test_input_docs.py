"""docs/input.md and docs/robustness.md are true."""

import ast
import pathlib
import re
from typing import get_args

import pytest
import yaml

from mindformers_ext.config import load_config
from mindformers_ext.predict import PromptTemplates, normalize_input, sources, strict_json, templates
from mindformers_ext.predict.records import ErrorType

ROOT = pathlib.Path(__file__).parents[2]
INPUT = (ROOT / "docs" / "input.md").read_text(encoding="utf-8")
ROBUSTNESS = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", INPUT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_yaml_loads_without_a_warning(number):
    assert load_config(yaml.safe_load(BLOCKS[number])).warnings == []


def test_the_prompt_template_of_the_page_does_what_it_shows():
    (text,) = [
        block["predict"]["prompt_template"] for block in map(yaml.safe_load, BLOCKS) if "prompt_template" in str(block)
    ]
    data = {"question": "Which?", "choices": ["this", "that"]}
    (record,) = normalize_input(data, make_prompt=PromptTemplates(text).prompt_maker("instruction"))
    assert record.prompt == "Question: Which?\n1. this\n2. that\nAnswer:"


def test_the_limits_of_the_page_are_the_real_ones():
    limits = templates.LIMITS
    assert f"{templates.MAX_TEMPLATE_CHARACTERS:,} characters of template" in INPUT
    assert f"{limits['steps']:,} turns" in INPUT and f"{limits['characters']:,} characters of prompt" in INPUT
    assert f"{limits['seconds']} seconds" in INPUT and f"{limits['memory'] >> 30} GiB" in INPUT
    assert INPUT.count(f"{sources.MAX_LINE_BYTES >> 20} MiB") == 2
    assert f"{strict_json.MAX_NESTING} levels" in INPUT


def test_the_page_names_every_class_of_error_that_a_record_brings_about():
    named = set(re.findall(r"^\| `(\w+)` \|", INPUT, re.MULTILINE)) - {"none", "auto"}
    assert named == set(get_args(ErrorType)) - {"forward", "oom"}


def test_every_test_that_the_table_names_exists():
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    named = re.findall(r"`(test_\w+)`", ROBUSTNESS)
    assert len(named) > 60
    assert not set(named) - found


def test_every_row_of_the_table_has_a_test_or_a_reason():
    rows = [line for line in ROBUSTNESS.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    for row in rows:
        assert "`test_" in row or "no test:" in row, row

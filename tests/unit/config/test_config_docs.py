"""docs/yaml.md is complete and true: every key, every default, every YAML, every quoted error."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from mindformers_ext.config import UNSET, TrainConfig, load_config
from mindformers_ext.config.generation import NEVER_USED
from mindformers_ext.config.rules import NO_EFFECT, TRAINING_ONLY
from mindformers_ext.config.schema import LoraSection
from mindformers_ext.config.section import Section, yaml_fields

PAGE = (Path(__file__).parents[3] / "docs" / "yaml.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def subsection(hint: Any) -> type[Section] | None:
    parts = (part for part in (hint, *get_args(hint)) if isinstance(part, type) and issubclass(part, Section))
    return next(parts, None)


def fields_by_section(cls: type[Section] = TrainConfig, name: str = "") -> Iterator[tuple[str, type[Section]]]:
    """("top level", TrainConfig), ("checkpoint", CheckpointSection), ("monitor.tensorboard", ...), ..."""
    if any(subsection(hint) is None for hint in yaml_fields(cls).values()):
        yield name or "top level", cls
    for key, hint in yaml_fields(cls).items():
        inner = subsection(hint)
        if inner is not None:
            yield from fields_by_section(inner, f"{name}.{key}".lstrip("."))


def documented() -> dict[str, dict[str, str]]:
    """Section -> key -> default, as the tables of the page have them."""
    result: dict[str, dict[str, str]] = {}
    for title, body in re.findall(
        r"^### (.+?)\n(.*?)(?=^### |\Z)", PAGE.split("\n## Keys\n")[1], re.DOTALL | re.MULTILINE
    ):
        result[title] = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", body, re.MULTILINE))
    return result


SECTIONS = dict(fields_by_section())


def test_the_page_has_exactly_the_sections_that_exist():
    assert documented().keys() == SECTIONS.keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_is_documented_with_its_true_default(name):
    cls = SECTIONS[name]
    defaults = cls()
    keys = [key for key, hint in yaml_fields(cls).items() if subsection(hint) is None]
    table = documented()[name]
    assert sorted(table) == sorted(keys)
    for key in keys:
        value = getattr(defaults, key)
        if value is UNSET:
            assert table[key] == "unset"
            continue
        written = yaml.safe_load(table[key].strip("`"))
        assert (float(written) if isinstance(value, float) else written) == value, key


def test_defaults_pass_their_own_checks():
    defaults = Section.to_dict(TrainConfig(run_mode="predict"))
    defaults |= {"checkpoint": {"load_path": "w"}, "inference": {}}
    assert defaults["training"]["steps"] == 1000
    assert load_config(defaults).training == TrainConfig().training


def chapters() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(section, the text above its table, key -> meaning), as the page has them."""
    for title, body in re.findall(
        r"^### (.+?)\n(.*?)(?=^### |\Z)", PAGE.split("\n## Keys\n")[1], re.DOTALL | re.MULTILINE
    ):
        yield title, body.split("\n|")[0], dict(re.findall(r"^\| `(\w+)` \| .+? \| (.*)\|$", body, re.MULTILINE))


def test_exactly_the_keys_of_the_table_are_documented_as_without_effect():
    no_effect = {key for keys in NO_EFFECT.values() for key in keys} | {f"generation.{key}" for key in NEVER_USED}
    documented_so, in_table = set(), set()
    for section, intro, meanings in chapters():
        for key, meaning in meanings.items():
            path = f"{section}.{key}"
            if intro.strip().lower().startswith("no effect") or meaning.startswith("no effect"):
                documented_so.add(path)
            if any(path == known or path.startswith(f"{known}.") for known in no_effect):
                in_table.add(path)
    assert documented_so == in_table and len(in_table) > 30
    assert "`eval_dataset` is accepted without effect" in PAGE


def test_the_tables_of_rules_name_keys_that_exist():
    names = {"eval_dataset"}
    for section in SECTIONS:
        parts = section.split(".")
        names |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        names |= {f"{section}.{key}" for key in yaml_fields(SECTIONS[section])}
    assert {*TRAINING_ONLY, *(key for keys in NO_EFFECT.values() for key in keys)} <= names


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_yaml_on_the_page_loads_without_a_warning(number, load):
    assert load(BLOCKS[number]).warnings == []


def test_the_page_shows_both_modes():
    assert {yaml.safe_load(block)["run_mode"] for block in BLOCKS} == {"train", "predict"}


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("run_mode: predict\n\ninference:\n  batch_size: '8'\n", {}),
        ("run_mode: predict\ninference:\n  max_new_token: 3\n", {}),
        ("run_mode: predict\ninference: {}\n\nbatch_size: 8\n", {}),
        ("run_mode: predict\n" + "\n" * 5 + "run_mode: train\n", {}),
        ("inference:\n\tbatch_size: 8\n", {}),
        ("run_mode: predict\n\n\ngeneration:\n  token_healing: true\n", {}),
        ("run_mode: predict\n", {}),
        ("run_mode: predict\n", {"inference.batch_size": 0}),
    ],
)
def test_the_errors_on_the_page_are_the_real_ones(text, overrides, refuse):
    message = refuse(text, overrides=overrides)
    assert f"`{message}`" in PAGE


def test_every_dataclass_field_of_a_section_can_be_set_in_yaml_or_says_that_it_cannot():
    for cls in (*SECTIONS.values(), LoraSection):
        hidden = {field.name for field in dataclasses.fields(cls)} - yaml_fields(cls).keys()
        assert hidden <= {"given", "extra", "warnings"}

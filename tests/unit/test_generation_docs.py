"""docs/generation.md names every option, with its true default, and its YAMLs run."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from mindformers_ext.config import load_config
from mindformers_ext.config.generation import UNSUPPORTED
from mindformers_ext.generate import GenerationConfig
from mindformers_ext.trainer import Trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GenerationConfig)])
def test_every_option_is_named(name):
    assert f"`{name}`" in PAGE or f"`{name}: " in PAGE


def test_defaults_of_the_tables_are_true():
    config = GenerationConfig()
    tables = PAGE.split("## What differs from transformers")[0]
    rows = re.findall(r"^\| (?:\d+ \| )?`(\w+)`[^|]*\| ([^|]+) \|", tables, re.MULTILINE)
    checked = {}
    for name, default in rows:
        if hasattr(config, name) and default not in ("from the files", "50 in the YAML, 256 in Python"):
            value = yaml.safe_load(default.strip().strip("`"))
            expected = getattr(config, name)
            assert (None if value == "none" else value) == (expected if expected != () else None), name
            checked[name] = value
    assert len(checked) > 25


def test_the_steps_are_in_the_order_of_the_code():
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \| `", PAGE, re.MULTILINE)]
    assert numbers == list(range(1, 22))


def test_options_that_it_calls_refused_are():
    named = re.findall(r"guidance_scale|diversity_penalty|constraints|penalty_alpha|forced_bos_token_id", PAGE)
    assert set(named) <= set(UNSUPPORTED) and len(set(named)) == 5


def test_there_is_an_example_for_each_mode():
    modes = [yaml.safe_load(text)["generation"] for text in EXAMPLES]
    assert [(mode.get("do_sample", False), "num_beams" in mode) for mode in modes] == [
        (False, False),
        (True, False),
        (False, True),
        (True, False),
        (False, False),
    ]
    assert [mode["prompt_lookup_num_tokens"] for mode in modes[4:]] == [8]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"instruction": "the cat"}\n{"instruction": "a dog and"}\n', encoding="utf-8")
    tree = yaml.safe_load(EXAMPLES[number])
    config = load_config(tree, {"checkpoint.load_path": str(CHECKPOINT), "inference.max_new_tokens": 5})
    assert config.warnings == []
    Trainer(config).inference()
    rows = [json.loads(line) for line in Path(tree["inference"]["output"]).read_text(encoding="utf-8").splitlines()]
    count = tree["generation"].get("num_return_sequences", 1)
    assert [row["sample_idx"] for row in rows] == [0] * count + [1] * count
    assert all("error" not in row and row["num_new_tokens"] >= 1 for row in rows)
    if count > 1:
        assert [row["sequence_idx"] for row in rows] == [*range(count)] * 2

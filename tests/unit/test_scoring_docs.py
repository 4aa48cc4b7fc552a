"""docs/scoring.md: its YAMLs give its rows, its Python runs, and it names every field and number."""

import json
import re
from pathlib import Path

import pytest
import yaml

from mindformers_ext.config import load_config
from mindformers_ext.predict.pairs import rolling_windows
from mindformers_ext.predict.score_sums import score_metrics
from mindformers_ext.predict.scoring import SCORE_NAMES
from mindformers_ext.trainer import Trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8")
EXAMPLES = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]
FILES = dict(re.findall(r"^`(\w+\.jsonl)`:\n\n```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
SUMS = {"answers", "acc", "acc_norm", "acc_bytes", "targets", "greedy", "target_loglikelihood", "tokens"}
SUMS |= {"loglikelihood", "rolled", "words", "bytes"}


def rows(text):
    return [json.loads(line) for line in text.splitlines()]


def check(found, shown):
    """The same values in the same order, floats but for the last digit."""
    if isinstance(shown, dict):
        assert list(found) == list(shown)
        for name, value in shown.items():
            check(found[name], value)
    elif isinstance(shown, list):
        assert len(found) == len(shown)
        for ours, theirs in zip(found, shown, strict=True):
            check(ours, theirs)
    else:
        assert found == pytest.approx(shown, rel=1e-3, abs=2e-4) if isinstance(shown, float) else found == shown


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_writes_the_rows_that_the_page_shows(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = EXAMPLES[number]
    source, output = tree["inference"]["input_data"], tree["inference"]["output"]
    Path(source).write_text(FILES[source], encoding="utf-8")
    config = load_config(tree, {"checkpoint.load_path": str(ROOT / tree["checkpoint"]["load_path"])})
    assert config.warnings == []
    Trainer(config).inference()
    check(rows(Path(output).read_text(encoding="utf-8")), rows(FILES[output]))


def test_there_is_an_example_for_each_use():
    keys = [set(tree["predict"]) & {"target_field", "answer_field", "rolling"} for tree in EXAMPLES]
    assert keys == [{"target_field", "answer_field"}, {"target_field"}, set(), {"rolling"}]


def test_the_python_of_the_page_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    (text,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names = {}
    exec(text, names)
    shown = rows(FILES["rolled.jsonl"])[0]["loglikelihood"]
    assert names["loglikelihood"] == pytest.approx(shown, abs=1e-3)


def test_the_table_of_windows_is_true():
    table = re.findall(r"^\| ([\w, ]+) \| ([\d, ]+) \|$", PAGE, re.MULTILINE)
    assert len(table) == 3
    for (reads, predicts), (context, continuation) in zip(table, rolling_windows(range(10), -1, 4), strict=True):
        assert reads.replace("prefix", "-1") == ", ".join(map(str, [*context, *continuation[:-1]]))
        assert predicts == ", ".join(map(str, continuation))


def test_every_field_and_every_number_is_named():
    for name in SCORE_NAMES - {"generated_ids"}:
        assert f"`{name}`" in PAGE, name
    for name in score_metrics(dict.fromkeys(SUMS, 2.0)):
        assert f"`{name.removesuffix('_stderr')}`" in PAGE, name

"""docs/evaluation.md: its YAMLs run, its tables have every key with its true default, its JSON has the real form."""

import json
import re
from pathlib import Path

import pytest
import yaml

from mindformers_ext.config import UNSET, load_config
from mindformers_ext.config.evaluation import METRICS, EvaluationSection
from mindformers_ext.config.section import Section, yaml_fields
from mindformers_ext.trainer import Trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"
SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "seq_length": 64,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    Path("my_metrics.py").write_text(code, encoding="utf-8")
    records = [{"instruction": f"{a} + 1 =", "answer": a + 1, "choices": ["1", "2"], "label": 0} for a in range(3)]
    for name in ("dev.jsonl", "choices.jsonl"):
        Path(name).write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    Path("train.jsonl").write_text("\n".join(json.dumps({"text": f"{a} + 1 = {a + 1}"}) for a in range(20)))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_runs(number, folder):
    tree = yaml.safe_load(EXAMPLES[number])
    predicts = tree["run_mode"] == "predict"
    if predicts:
        overrides = {"checkpoint.load_path": str(CHECKPOINT), "inference.max_new_tokens": 3}
    else:
        overrides = {"train_dataset.dataloader.tokenizer_path": str(CHECKPOINT), "training.steps": 1}
        overrides |= {f"model.{name}": value for name, value in SMALL.items()}
    config = load_config(tree, overrides)
    assert config.warnings == []
    trainer = Trainer(config)
    if predicts:
        trainer.inference()
        found = json.loads(Path("answers.jsonl.metrics.json").read_text())["answers"]
        assert found == trainer.last_summary.metrics
        assert found["records"] == 3 and len(found["metrics"]) == len(tree["predict"]["metrics"])
        assert all(value["records"] == 3 for value in found["metrics"].values())
        return
    trainer.train()
    for callback in tree["callbacks"]:
        (line,) = map(json.loads, Path(callback["output_dir"], "eval_metrics.jsonl").read_text().splitlines())
        shown = re.search(r"`eval_metrics.jsonl` \| a line for each evaluation: (.*) \|", PAGE)[1]
        assert list(line) == re.findall(r"`(\w+)`", shown)
        assert line["step"] == 1 and line["metrics"] and Path(callback["output_dir"], line["output"]).is_file()
        if "metric_for_best_model" in callback:
            assert (Path(callback["output_dir"]) / "best" / "best.json").is_file()


def test_the_table_of_the_callback_has_every_key_with_its_true_default():
    table = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", PAGE.split("## Evaluate while training")[1], re.MULTILINE))
    defaults = EvaluationSection()
    assert table.keys() == yaml_fields(EvaluationSection).keys()
    for name, written in table.items():
        value = getattr(defaults, name)
        value = {} if isinstance(value, Section) else value
        assert value is not UNSET and yaml.safe_load(written) == value, name


def test_the_table_of_metrics_has_every_type_with_its_options():
    table = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", PAGE.split("\n## Metrics\n")[1], re.MULTILINE))
    table = {name: options for name, options in table.items() if name in METRICS}
    assert table.keys() == METRICS.keys()
    table["contains"] = table["contains"].replace("those of `exact_match`", table["exact_match"])
    for name, options in table.items():
        section = METRICS[name]
        shown = [option.partition(": ") for option in re.findall(r"`([^`]+)`", options)]
        assert {key for key, _, _ in shown} == yaml_fields(section).keys() - {"name"}, name
        for key, _, default in shown:
            assert not default or yaml.safe_load(default) == getattr(section(), key), (name, key)

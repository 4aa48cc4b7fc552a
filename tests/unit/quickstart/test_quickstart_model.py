"""The shipped checkpoint knows its answers."""

from __future__ import annotations

from pathlib import Path

import yaml

from mindformers_ext.trainer import Trainer
from scripts.check_quickstart import answer_of, is_right, read_rows

ROOT = Path(__file__).parents[3]


def test_every_prompt_is_answered_right_by_predict_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load((ROOT / "configs" / "quickstart" / "predict.yaml").read_text(encoding="utf-8"))
    config["inference"]["output"] = str(tmp_path / "result.jsonl")
    Trainer(config).inference()
    rows = read_rows(tmp_path / "result.jsonl")
    assert len(rows) >= 24
    assert [(row["instruction"], answer_of(row)) for row in rows if not is_right(row)] == []


def test_checkpoint_is_small():
    files = list((ROOT / "configs" / "quickstart" / "checkpoint").glob("*.safetensors"))
    assert files
    assert sum(file.stat().st_size for file in files) <= 8 * 1024**2

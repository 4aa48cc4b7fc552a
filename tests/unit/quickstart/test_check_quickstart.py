"""The quickstart's verdict: right only if it is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import check_quickstart
from scripts.check_quickstart import display_width, fit

RIGHT = {"instruction": "2 + 3 =", "answer": "5", "kind": "sum", "generated_text": " 5", "finish_reason": "eos"}


def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], *options: str) -> int:
    result = tmp_path / "result.jsonl"
    result.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["check_quickstart.py", str(result), *options])
    return check_quickstart.main()


def test_all_right_gives_zero(tmp_path, monkeypatch, capsys):
    assert verdict(tmp_path, monkeypatch, [RIGHT, RIGHT]) == 0
    assert "2 of 2 answers are right: sum 2/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"generated_text": " 6"},
        {"generated_text": " 5 5"},
        {"generated_text": ""},
        {"finish_reason": "length"},
        {"error": "the prompt is too long", "error_type": "too_long"},
    ],
)
def test_one_wrong_answer_gives_one_and_is_marked(tmp_path, monkeypatch, capsys, change):
    assert verdict(tmp_path, monkeypatch, [RIGHT, RIGHT | change]) == 1
    output = capsys.readouterr().out
    assert output.count("WRONG") == 1
    assert "1 of 2 answers are right" in output


def test_wrong_only_leaves_out_the_right_rows(tmp_path, monkeypatch, capsys):
    wrong = RIGHT | {"instruction": "4 + 4 =", "answer": "8"}
    assert verdict(tmp_path, monkeypatch, [RIGHT, wrong], "--wrong-only") == 1
    output = capsys.readouterr().out
    assert "4 + 4" in output
    assert "2 + 3" not in output


@pytest.mark.parametrize("content", [None, "", "{\n", "[]\n", '{"generated_text": " 5"}\n'])
def test_a_file_that_is_no_result_gives_two_and_a_sentence(tmp_path, monkeypatch, capsys, content):
    result = tmp_path / "result.jsonl"
    if content is not None:
        result.write_text(content, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["check_quickstart.py", str(result)])
    assert check_quickstart.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_columns_stay_aligned_with_wide_characters_and_long_texts():
    assert display_width("床前 moon") == 9
    for text in ("", "moon", "床前明月光", "a" * 40, "床" * 40, "two\nlines"):
        assert display_width(fit(text, 12)) == 12

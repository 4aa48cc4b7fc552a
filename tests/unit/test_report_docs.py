"""docs/report.md: its commands work, and it names every flag and every kind of difference."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import get_args

import pytest

from mindformers_ext.predict.report import collect, compare, page
from mindformers_ext.predict.writers import write_rows

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]


def run(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_writes_a_page(tmp_path, command):
    own = {"instruction": "1 + 1 =", "answer": "2", "kind": "sum"}
    ends = {"finish_reason": "eos", "num_prompt_tokens": 2, "num_new_tokens": 1}
    for name, text in (("result", " 2"), ("other", " 3")):
        rows = [{"sample_idx": 0, "generated_ids": [5, 6, 7], "generated_text": text, **own, **ends}]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    result = run(shlex.split(command)[1:], tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    html = (tmp_path / result.stdout.strip()).read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>") and "equal to answer" in html


def test_making_a_page_needs_no_mindspore(tmp_path):
    code = "import sys, mindformers_ext.predict.report.__main__; sys.exit('mindspore' in sys.modules)"
    assert run(["-c", code], tmp_path).returncode == 0


def test_the_page_names_every_flag(tmp_path):
    shown = run(["-m", "mindformers_ext.predict.report", "--help"], tmp_path).stdout
    flags = set(re.findall(r"--\w+", shown)) - {"--help"}
    assert flags == set(re.findall(r"^\| `(--\w+)", PAGE, re.MULTILINE))


def test_the_page_names_every_kind_of_difference():
    table = PAGE.split("| kind |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([^`]+)`", table)) - {"skip_special_tokens"} == set(get_args(compare.Kind)) - {"same"}


def test_the_limits_of_the_page_are_the_real_ones():
    assert f"its first {collect.ANSWER_CHARACTERS:,} characters and other fields {collect.FIELD_CHARACTERS}" in PAGE
    assert f"its {page.MAX_GROUPS} most frequent values" in PAGE and collect.EXAMPLES_OF_AN_ERROR == 3
    assert f"more than {compare.SCORE_TOLERANCE}" in PAGE and f"| rows in each table, {collect.Choice().rows} |" in PAGE

"""The commands, YAMLs and Python of the README work as written."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from mindformers_ext.config import load_config

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text, language):
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [body for name, body in fences if name == language]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with what the README's examples name."""
    for name in ("scripts", "run_mindformer.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "path" / "to").mkdir(parents=True)
    for name in ("model", "tokenizer"):
        shutil.copytree(CHECKPOINT, tmp_path / "path" / "to" / name)
    prompts = [{"instruction": "1 + 1 ="}, {"instruction": "The quick brown fox"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    texts = [{"text": f"{a} + {a} = {2 * a}, and so on, and so on"} for a in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, texts)))
    predict, train, score, judge, evaluate = blocks(README, "yaml")
    (tmp_path / "predict.yaml").write_text(predict)
    (tmp_path / "train.yaml").write_text(train + evaluate)
    (tmp_path / "score.yaml").write_text(score)
    (tmp_path / "judge.yaml").write_text(judge)
    questions = [{"instruction": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "dev.jsonl").write_text("\n".join(json.dumps(prompt | {"answer": "2"}) for prompt in prompts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, **environment):
    path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        command, shell=isinstance(command, str), env=variables, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_predict_yaml_and_its_command(folder):
    (command,) = (block for block in blocks(README, "bash") if "predict.yaml" in block)
    result = run(command)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (folder / "result.jsonl").read_text().splitlines()]
    shown = json.loads(blocks(README, "json")[0])
    assert [row["sample_idx"] for row in rows] == [0, 1]
    assert list(shown)[:3] == list(rows[0])[:3] and list(shown)[-3:] == list(rows[0])[-3:]


def test_the_yamls_that_score_and_judge(folder):
    for name, output, key in (("score", "scores.jsonl", "acc"), ("judge", "answers.jsonl", "exact_match")):
        result = run([sys.executable, "run_mindformer.py", "--config", f"{name}.yaml"])
        assert result.returncode == 0, result.stderr
        assert f'"{key}"' in (folder / f"{output}.metrics.json").read_text()
    result = run([sys.executable, "-m", "mindformers_ext.predict.report", "answers.jsonl"])
    assert result.returncode == 0, result.stderr


def test_the_train_yaml_the_folder_that_it_saves_and_its_evaluation(folder):
    result = run([sys.executable, "run_mindformer.py", "--config", "train.yaml", "--training.steps", "2"])
    assert result.returncode == 0, result.stderr
    assert (folder / "output" / "evaluation" / "eval_step_2.jsonl").exists()
    arguments = ["--load_checkpoint", "output/checkpoint", "--predict_data", "What is 2 + 3?"]
    result = run([sys.executable, "run_mindformer.py", "--config", "predict.yaml", *arguments])
    assert result.returncode == 0, result.stderr


def test_the_python_example(folder):
    (code,) = blocks(README, "python")
    result = run([sys.executable, "-c", code + "\nassert len(results) == 1 and results[0][0] == 0"])
    assert result.returncode == 0, result.stderr


def test_the_readme_shows_what_the_quickstart_prints(tmp_path):
    output = tmp_path / "result.jsonl"
    command = [sys.executable, "run_mindformer.py", "--config", "configs/quickstart/predict.yaml"]
    result = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    command = [sys.executable, "scripts/check_quickstart.py", str(output)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    (shown,) = (block for block in blocks(README, "") if "answers are right" in block)
    for line in filter(None, shown.splitlines()):
        assert line in printed.splitlines()
    shipped = json.loads(blocks(README, "json")[0])
    assert shipped in [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_yaml_of_the_docs_loads(page):
    for index, text in enumerate(blocks(page.read_text(encoding="utf-8"), "yaml")):
        if "run_mode" in text:
            import yaml

            assert load_config(yaml.safe_load(text)).run_mode in ("train", "predict"), index


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_of_the_docs_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:mindformers_ext|scripts|configs|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists() or (ROOT / path.rstrip("/")).exists(), path


def test_every_test_that_the_docs_name_is_there():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^ *def (test_\w+)\(", tests, re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))
        assert not [name for name in named if name not in defined], page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_that_the_docs_call_understand_their_flags(page):
    for block in blocks(page.read_text(encoding="utf-8"), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"python (scripts/\w+\.py|-m [\w.]+)(.*)", line)
            if match is None:
                continue
            program = match[1].split()
            shown = run([sys.executable, *(program if program[0] == "-m" else [str(ROOT / program[0])]), "--help"])
            for flag in re.findall(r"(--\w+)", match[2]):
                assert flag in shown.stdout, (line, flag)

"""Scores do not depend on the layout."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def job(tmp_path_factory, launch_job):
    """The module of the job, and the folder of its files."""
    folder = tmp_path_factory.mktemp("scores")
    return launch_job("scores_job", folder, 4)[0], folder


def rows(folder, family, layout, task):
    path = folder / f"{family}-{layout}-{task}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_nll_of_every_prompt_is_that_of_transformers_in_every_layout(job):
    module, folder = job
    cases = json.loads((DATA / "checkpoints" / "qwen3" / "reference.json").read_text())["cases"]
    for layout in module.LAYOUTS:
        for row, case in zip(rows(folder, "qwen3", layout, "prompts"), cases, strict=True):
            assert [-value for value in row["token_logprobs"]] == pytest.approx(case["nll"], abs=5e-4), layout


def test_choices_and_texts_are_those_of_transformers_in_every_layout(job):
    module, folder = job
    for family, layout, task in module.RUNS:
        if task == "prompts":
            continue
        expected = module.SCORES["families"][family]
        found = rows(folder, family, layout, task)
        if task == "texts":
            assert [row["loglikelihood"] for row in found] == pytest.approx(expected["texts"], abs=5e-3), layout
            continue
        for row, one in zip(found, expected["questions"], strict=True):
            assert row["loglikelihood"] == pytest.approx(one["loglikelihood"], abs=2e-4), (family, layout)
            assert (row["best"], row["best_norm"]) == (one["best"], one["best_norm"])
            assert row["is_greedy"] == one["is_greedy"]


def test_the_metrics_of_a_layout_are_those_of_one_process(job, tmp_path):
    module, folder = job
    for task in module.TASKS:
        module.run(tmp_path, "qwen3", "", task)
        alone = json.loads((tmp_path / f"qwen3--{task}.jsonl.metrics.json").read_text())["scores"]
        for layout in (layout for family, layout, made in module.RUNS if (family, made) == ("qwen3", task)):
            found = json.loads((folder / f"qwen3-{layout}-{task}.jsonl.metrics.json").read_text())["scores"]
            assert found == pytest.approx(alone, rel=1e-4)

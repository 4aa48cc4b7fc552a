"""Compares lm-evaluation-harness over this package with its own model of transformers.

    python scripts/compare_lm_eval.py [--checkpoint FOLDER ...] [--output compared.json]

Three small tasks (tests/data/lm_eval) go through the evaluator of lm-eval with both models: a choice among four, the
perplexity of texts longer than the model, and greedy answers. Needs lm-eval, torch and transformers beside this
package. The exit code is 0 if metrics and every log-likelihood agree within 0.001 and every answer is the same, else 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mindformers_ext.lm_eval_adapter import NAME, register

ROOT = Path(__file__).resolve().parent.parent
TASKS = ROOT / "tests" / "data" / "lm_eval"
CHECKPOINTS = ("configs/quickstart/checkpoint", "tests/data/checkpoints/qwen3", "tests/data/checkpoints/llama")
TOLERANCE = 1e-3
PACKAGES = ("lm_eval", "transformers", "torch", "mindspore")


def evaluate(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns lm-eval's results of the three tasks, with the answer to each request."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    tasks = [f"mindformers_ext_{path.stem}" for path in sorted(TASKS.glob("*.yaml"))]
    return simple_evaluate(model, arguments, tasks=tasks, batch_size=4, task_manager=manager, bootstrap_iters=0)


def metrics_of(results: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics of all tasks by name."""
    found = {}
    for task, values in results["results"].items():
        for name, value in values.items():
            metric = name.split(",")[0]
            if isinstance(value, int | float) and not metric.endswith("_stderr") and metric != "sample_len":
                found[f"{task.removeprefix('mindformers_ext_')} {metric}"] = float(value)
    return found


def answers_of(results: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns what each request of each task got, in the order of the documents."""
    return {
        task.removeprefix("mindformers_ext_"): [
            answer for sample in sorted(samples, key=lambda one: one["doc_id"]) for answer in sample["resps"]
        ]
        for task, samples in results["samples"].items()
    }


def numbers_and_rest(value: Any) -> tuple[list[float], list[Any]]:
    """Takes nested lists apart into their floats and everything else."""
    if isinstance(value, float):
        return [value], []
    if not isinstance(value, list | tuple):
        return [], [value]
    parts = [numbers_and_rest(one) for one in value]
    return [number for numbers, _ in parts for number in numbers], [one for _, rest in parts for one in rest]


def compare(checkpoint: str) -> dict[str, Any]:
    """Returns both models' metrics, and how far their answers to single requests lie apart."""
    theirs = evaluate("hf", {"pretrained": checkpoint, "dtype": "float32", "device": "cpu"})
    with TemporaryDirectory() as folder:
        config = Path(folder) / "predict.yaml"
        config.write_text(f"run_mode: predict\ncheckpoint: {{load_path: {checkpoint}}}\n")
        ours = evaluate(NAME, {"config": str(config)})
    distances, equal, counts = {}, {}, {}
    expected = answers_of(theirs)
    for task, answers in answers_of(ours).items():
        (numbers, rest), (their_numbers, their_rest) = numbers_and_rest(answers), numbers_and_rest(expected[task])
        counts[task] = len(answers)
        equal[task] = rest == their_rest and len(numbers) == len(their_numbers)
        distances[task] = max((abs(a - b) for a, b in zip(numbers, their_numbers, strict=False)), default=0.0)
    return {
        "checkpoint": checkpoint,
        "lm_eval_hf": metrics_of(theirs),
        NAME: metrics_of(ours),
        "requests": counts,
        "largest_distance": distances,
        "texts_and_flags_equal": equal,
    }


def agrees(found: dict[str, Any]) -> bool:
    """Tells whether two models gave the same."""
    ours, theirs = found[NAME], found["lm_eval_hf"]
    # A perplexity can be large: then it is the share of it that counts.
    near = ours.keys() == theirs.keys() and all(
        abs(ours[name] - theirs[name]) <= TOLERANCE * max(1.0, theirs[name]) for name in ours
    )
    return (
        near and max(found["largest_distance"].values()) <= TOLERANCE and all(found["texts_and_flags_equal"].values())
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", nargs="+", default=CHECKPOINTS, help="HuggingFace folders")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    options = parser.parse_args(arguments)
    output = None if options.output is None else options.output.resolve()
    checkpoints = [os.path.abspath(path) if Path(path).exists() else path for path in options.checkpoint]
    os.chdir(ROOT)  # the tasks name their data from here
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    register()
    results = [compare(os.path.relpath(path, ROOT)) for path in checkpoints]
    for found in results:
        print(f"\n{found['checkpoint']}\n{'':32}{'lm_eval hf':>16}{NAME:>18}")
        for name, value in found["lm_eval_hf"].items():
            print(f"{name:32}{value:16.7g}{found[NAME].get(name, float('nan')):18.7g}")
        for task, distance in found["largest_distance"].items():
            same = "the same" if found["texts_and_flags_equal"][task] else "NOT THE SAME"
            print(
                f"{task}: {found['requests'][task]} requests, largest distance {distance:.2g}, texts and flags {same}"
            )
    if output is not None:
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        output.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")
    return 0 if all(map(agrees, results)) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Scores prompts, choices and long texts in layouts of 4 ranks. Files are for the test.

python scores_job.py FOLDER
"""

import json
import sys
from pathlib import Path

from mindformers_ext.runtime import world_size
from mindformers_ext.trainer import Trainer

DATA = Path(__file__).parents[2] / "data"
SCORES = json.loads((DATA / "scores.json").read_text(encoding="utf-8"))
PROMPTS = [case["prompt"] for case in json.loads((DATA / "checkpoints/qwen3/reference.json").read_text())["cases"]]
TENSOR = {"tensor_parallel": 2, "sequence_parallel": True}
# What is left of the ranks are replicas.
LAYOUTS = {
    "dp4": {"data_parallel_shard": 1},
    "tp2": {"data_parallel_shard": 1, **TENSOR},
    "cp2": {"data_parallel_shard": 1, "context_parallel": 2},
    "pp2": {"data_parallel_shard": 1, "pipeline_parallel": 2},
    "fsdp2": {"data_parallel_shard": 2},
    "tp2pp2": {"data_parallel_shard": 1, "pipeline_parallel": 2, **TENSOR},
    "cp2pp2": {"data_parallel_shard": 1, "pipeline_parallel": 2, "context_parallel": 2},
    "fsdp4": {"data_parallel_shard": 4},
}
TASKS = {
    "prompts": ([{"instruction": prompt} for prompt in PROMPTS], {}),
    "choices": (
        [{"instruction": one["prompt"], "choices": one["choices"], "right": 0} for one in SCORES["questions"]],
        {"target_field": "choices", "answer_field": "right"},
    ),
    "texts": ([{"instruction": text} for text in SCORES["texts"]], {"rolling": True}),
}
RUNS = [("qwen3", layout, task) for layout in LAYOUTS for task in ("prompts", "choices")]
RUNS += [("qwen3", layout, "texts") for layout in ("dp4", "tp2pp2", "cp2pp2", "fsdp4")]
RUNS += [
    (family, layout, "choices")
    for family, layouts in {
        "qwen3_moe": ("tp2pp2", "fsdp4"),
        "qwen3_5": ("cp2pp2", "tp2pp2"),
        "deepseek_v3": ("cp2pp2", "fsdp4"),
        "deepseek_v4": ("tp2pp2", "fsdp2"),
    }.items()
    for layout in layouts
]


def run(folder, family, layout, task):
    """Scores the records of a task; with no layout on one process."""
    records, keys = TASKS[task]
    trainer = Trainer(
        {
            "run_mode": "predict",
            "checkpoint": {"load_path": str(DATA / "checkpoints" / family)},
            "parallelism": LAYOUTS[layout] if layout else {},
            "inference": {
                "input_data": records,
                "batch_size": 2,
                "output": str(folder / f"{family}-{layout}-{task}.jsonl"),
            },
            "predict": {"task": "score", "progress": False, **keys},
        }
    )
    return trainer.inference(), trainer


def check_ids(trainer):
    """Every rank gets what `Trainer.score` gives."""
    pairs = [([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4], [7]), ([9], [3, 3, 3])]
    found = [(one.total, one.is_greedy) for one in trainer.score(pairs)]
    everywhere = trainer._context.world.all_gather_object([*found, trainer.score_rolling([[5, 6, 7]], max_length=2)])
    assert everywhere[1:] == everywhere[:-1]


if __name__ == "__main__":
    assert world_size() == 4
    for each in RUNS:
        outputs, used = run(Path(sys.argv[1]), *each)
        assert used._context.world.all_gather_object(outputs) == [json.loads(json.dumps(outputs))] * 4
        if each[2] == "texts":
            check_ids(used)

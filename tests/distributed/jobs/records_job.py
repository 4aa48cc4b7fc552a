"""Records that do not divide, answers of different lengths and different seeds, on 4 ranks. Files are for the test.

python records_job.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

import mindspore as ms
import numpy as np

from mindformers_ext.runtime import rank, world_size
from mindformers_ext.trainer import Trainer

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"
NINE = [{"instruction": f"{'word ' * (1 + 2 * (index % 4))}{index} is", "id": index} for index in range(9)]
SEEDED = {"do_sample": True, "seed": 11, "top_k": 20}
# name: family, parallelism, number of records, batch_size, generation
RUNS = {
    "nine-on-replicas": ("qwen3_moe", {"data_parallel_shard": 1}, 9, 2, SEEDED),
    "one-on-replicas": ("qwen3_moe", {"data_parallel_shard": 1}, 1, 2, {}),
    "none-on-replicas": ("qwen3_moe", {"data_parallel_shard": 1}, 0, 2, {}),
    # With so many ids that end an answer, ranks that share parameters end at different steps.
    "lengths-on-shards": (
        "qwen3_moe",
        {"data_parallel_shard": 4, "expert_parallel": 4},
        9,
        2,
        {"eos_token_id": list(range(0, 320, 4)), **SEEDED},
    ),
    "lengths-on-shared-sequences": (
        "qwen3_5",
        {"data_parallel_shard": 1, "context_parallel": 2},
        9,
        2,
        {"eos_token_id": list(range(0, 320, 8)), **SEEDED},
    ),
    "lengths-on-heads-and-stages": (
        "deepseek_v3",
        {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
        9,
        3,
        {"eos_token_id": list(range(0, 320, 8)), "stop_strings": ["a"]},
    ),
    "tied-on-stages": ("qwen3", {"data_parallel_shard": 1, "pipeline_parallel": 2}, 5, 2, SEEDED),
    "seeded-on-stages": ("qwen3", {"pipeline_parallel": 4}, 5, 2, SEEDED),
}


def run(folder, name, parallelism=None):
    """One of the runs; without `parallelism` as in the table, with {} on one process."""
    family, layout, count, batch_size, generation = RUNS[name]
    source = folder / f"{count}.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in NINE[:count]))
    trainer = Trainer(
        {
            "run_mode": "predict",
            "checkpoint": {"load_path": str(CHECKPOINTS / family)},
            "parallelism": layout if parallelism is None else parallelism,
            "inference": {
                "input_data": str(source),
                "max_new_tokens": 8,
                "batch_size": batch_size,
                "output": str(folder / f"{name}.jsonl"),
            },
            "generation": generation,
            # Everywhere as one process answers in batches.
            "predict": {"progress": False, "refill": world_size() > 1},
        }
    )
    trainer.inference()
    return trainer


def check_unseeded():
    """Ranks whose generators of random numbers differ choose the same tokens all the same."""
    trainer = Trainer(
        {
            "run_mode": "predict",
            "checkpoint": {"load_path": str(CHECKPOINTS / "qwen3_moe")},
            "parallelism": {"tensor_parallel": 4, "sequence_parallel": True},
            "inference": {"max_new_tokens": 8},
            "generation": {"do_sample": True},
            "predict": {"progress": False},
        }
    )
    random.seed(rank())
    np.random.seed(rank())
    ms.set_seed(rank() + 1)
    found = trainer.inference([record["instruction"] for record in NINE], output="")
    everywhere = trainer._context.world.all_gather_object(found)
    assert everywhere[1:] == everywhere[:-1] and len(everywhere[0]) == len(NINE)
    again = trainer.inference([record["instruction"] for record in NINE], output="")
    assert again != found, "two runs without a seed drew the same"
    print("ranks with different generators drew the same tokens", flush=True)


if __name__ == "__main__":
    assert world_size() == 4
    for each in RUNS:
        run(Path(sys.argv[1]), each)
    check_unseeded()

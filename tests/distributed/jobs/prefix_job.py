"""Shared prefixes and prompt lookup on 2 ranks, in every layout and with every kind of state. Files are for the test.

python prefix_job.py FOLDER
"""

import sys
from pathlib import Path

from mindformers_ext.runtime import world_size
from mindformers_ext.trainer import Trainer

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"
HEADER = "Answer in one word. The sky is blue, the sun is warm, the sea is deep, the snow is cold. Now, what is this?"
RESTS = ("a", "one and two", "the quick brown fox", "b", "x y", "it")
TENSORS = {"tensor_parallel": 2, "sequence_parallel": True}
STAGES = {"pipeline_parallel": 2}
MICRO_BATCHES = STAGES | {"pipeline_parallel_microbatch_size": 2}
SHARDS = {"data_parallel_shard": 2, "expert_parallel": 2}
CONTEXT = {"context_parallel": 2}
SEVERAL, ONE = 2, 1  # prompts in a batch
SAMPLED = {"do_sample": True, "seed": 3, "top_k": 4, "temperature": 0.2}
# family, layout, parallelism, prompts in a batch with prompt lookup
RUNS = [
    ("qwen3_moe", "tensors", TENSORS, SEVERAL),
    ("qwen3_moe", "micro-batches", MICRO_BATCHES, SEVERAL),
    ("qwen3_moe", "shards", SHARDS, SEVERAL),
    ("qwen3_moe", "context", CONTEXT, ONE),
    ("deepseek_v3", "tensors", TENSORS, SEVERAL),
    ("qwen3_5", "stages", STAGES, ONE),
    ("qwen3_5", "tensors", TENSORS, ONE),
    ("deepseek_v4", "stages", STAGES, ONE),
    ("qwen3_5_moe", "shards", SHARDS, ONE),
]


def predict(folder, name, family, parallelism, batch_size, generation, share):
    """One run, whose rows go to ``<name>.jsonl``."""
    Trainer(
        {
            "run_mode": "predict",
            "checkpoint": {"load_path": str(CHECKPOINTS / family)},
            "parallelism": {"data_parallel_shard": 1, **parallelism} if parallelism else {},
            "inference": {
                "input_data": [f"{HEADER} {rest}" for rest in RESTS],
                "max_new_tokens": 8,
                "batch_size": batch_size,
                "output": str(folder / f"{name}.jsonl"),
            },
            "generation": {"eos_token_id": [*range(0, 320, 16)], **SAMPLED, **generation},
            "predict": {"progress": False, "resume": False, "share_prefix": share},
        }
    ).inference()


if __name__ == "__main__":
    assert world_size() == 2
    for family, layout, parallelism, rows in RUNS:
        name = f"{family}-{layout}"
        predict(Path(sys.argv[1]), f"{name}-shared", family, parallelism, SEVERAL, {}, True)
        lookup = {"prompt_lookup_num_tokens": 3}
        predict(Path(sys.argv[1]), f"{name}-lookup", family, parallelism, rows, lookup, False)
    try:
        predict(Path(sys.argv[1]), "refused", "qwen3_moe", CONTEXT, SEVERAL, {"prompt_lookup_num_tokens": 3}, False)
    except ValueError as error:
        print(f"refused: {error}", flush=True)

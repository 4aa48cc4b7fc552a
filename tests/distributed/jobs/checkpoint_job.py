"""Runs on 2 ranks: saves from layouts, reads in others, lets one rank fail. Prints a line for all that is right.

Argument: an empty folder that both ranks see.
"""

import pathlib
import sys
import time

from mindformers_ext.checkpoint import distributed, load_weights
from mindformers_ext.runtime import rank
from mindformers_ext.trainer import Trainer

SOURCE = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3_moe"
FOLDER = pathlib.Path(sys.argv[1])
LAYOUTS = {
    "fsdp2": {"data_parallel_shard": 2},
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "ep2": {"data_parallel_shard": 2, "expert_parallel": 2},
}


def trainer_of(load_path, layout):
    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(load_path), "remove_redundancy": layout == "tp2"},
        "parallelism": {"data_parallel_shard": 1, **LAYOUTS[layout]},
        "inference": {"input_data": ["a"], "max_new_tokens": 1},
        "predict": {"progress": False},
    }
    return Trainer(config)


def same_weights(trainer, whole):
    regions = trainer.model.weight_regions()
    return all(
        trainer.model.weight(name).tobytes() == part.take(whole[name]).tobytes() for name, part in regions.items()
    )


def failure(action):
    """The text of what an action raises, which has to come soon."""
    start = time.perf_counter()
    try:
        action()
    except (OSError, ValueError, RuntimeError) as error:
        assert time.perf_counter() - start < 25, "a collective timed out"
        return str(error)
    raise AssertionError("nothing failed")


def check_reading_and_writing():
    source, whole = SOURCE, {}
    for layout in (*LAYOUTS, "fsdp2"):
        trainer = trainer_of(source, layout)
        trainer.inference(output="", collect=False)
        if not whole:
            load_weights(SOURCE, trainer.model.weight_layout(), whole.__setitem__)
        assert same_weights(trainer, whole), (source, layout)
        source = FOLDER / f"after-{source.name}"
        assert trainer.save_checkpoint(source) == source / "iteration_00000000"
        assert (source / "config.json").is_file() and (source / "tokenizer.json").is_file()
    print("layouts are right", flush=True)


def check_a_file_that_one_rank_cannot_read():
    folder = trainer_of(SOURCE, "pp2").save_checkpoint(FOLDER / "damaged")
    trainer = trainer_of(FOLDER / "damaged", "pp2")
    file = folder / "checkpoint-model-0000001-0000002.safetensors"
    trainer._context.world.barrier()
    if rank() == 1:
        file.write_bytes(file.read_bytes()[:-100])
    text = failure(lambda: trainer.inference(output="", collect=False))
    assert f"{file} is truncated" in text, text
    assert rank() == 1 or text.startswith("rank 1 failed: "), text
    print("reading fails together", flush=True)


def check_a_rank_that_cannot_write():
    trainer = trainer_of(SOURCE, "tp2")
    saved = trainer.save_checkpoint(FOLDER / "full")
    trainer._context.world.barrier()
    before = sorted(path.name for path in saved.parent.rglob("*"))
    trainer._context.world.barrier()
    if rank() == 1:

        def full(path, *rest):
            raise OSError(28, "No space left on device")

        distributed.write_tensors = full
    text = failure(lambda: trainer.save_checkpoint(FOLDER / "full"))
    assert text.startswith("rank 1: ") and text.endswith("0000001-0000002.safetensors: No space left on device"), text
    trainer._context.world.barrier()  # rank 0 has removed the half-written folder
    assert sorted(path.name for path in saved.parent.rglob("*")) == before
    print("writing fails together", flush=True)


if __name__ == "__main__":
    check_reading_and_writing()
    check_a_file_that_one_rank_cannot_read()
    check_a_rank_that_cannot_write()

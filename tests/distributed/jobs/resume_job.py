"""A job of two ranks that is stopped again and again, each time because of one rank; rank 0 prints what all saw.

Arguments: the checkpoint, the input, the output.
"""

import errno
import json
import os
import signal
import sys

from mindformers_ext.config.schema import ParallelismSection
from mindformers_ext.parallel.groups import init_parallel
from mindformers_ext.parallel.parallel_dims import ParallelDims
from mindformers_ext.runtime import rank
from mindformers_ext.trainer import Trainer, inference

CHECKPOINT, INPUT, OUTPUT = sys.argv[1:]
DP = {"data_parallel_shard": 1}
TP = {"data_parallel_shard": 1, "tensor_parallel": 2, "sequence_parallel": True}
generate_rows, pwrite = inference.generate_rows, os.pwrite


def run(layout, batch_size=4, **generation):
    """Returns the class and message of what the run raised, or its number of errors."""
    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": CHECKPOINT},
        "parallelism": layout,
        "inference": {"input_data": INPUT, "max_new_tokens": 6, "batch_size": batch_size, "output": OUTPUT},
        "generation": {"do_sample": True, "seed": 11, "top_k": 20} | generation,
        "predict": {"progress": False, "refill": False},  # what follows is done to batches
    }
    trainer = Trainer(config)
    try:
        trainer.inference()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return [trainer.last_summary.num_errors, trainer.last_summary.num_resumed]


def full_disk(descriptor, data, offset):
    if offset > 6000:
        raise OSError(errno.ENOSPC, "No space left on device")
    return pwrite(descriptor, data, offset)


class OnThisRank:
    """Does something in place of the decoding of some batches."""

    def __init__(self, action, calls):
        self.action = action
        self.calls = calls
        self.count = 0

    def __call__(self, model, prompts, *rest, **options):
        self.count += 1
        if self.count in self.calls:
            self.action(prompts)
        return generate_rows(model, prompts, *rest, **options)


def no_memory(prompts):
    if len(prompts) > 1:
        raise MemoryError


def main():
    seen = {}
    if rank() == 0:
        os.pwrite = full_disk
    seen["full disk"] = run(DP)
    os.pwrite = pwrite
    if rank() == 1:
        inference.generate_rows = OnThisRank(lambda prompts: os.kill(os.getpid(), signal.SIGTERM), [2])
    seen["signal"] = run(TP)
    inference.generate_rows = generate_rows
    seen["another job"] = run(TP, top_k=21)
    if rank() == 1:
        inference.generate_rows = OnThisRank(no_memory, range(100))
    seen["no memory"] = run(DP, batch_size=3)
    seen["complete"] = run(TP)
    world = init_parallel(ParallelDims.from_config(ParallelismSection(**DP), 2)).world
    both = world.all_gather_object(seen)
    if rank() == 0:
        print(json.dumps(both), flush=True)


if __name__ == "__main__":
    main()

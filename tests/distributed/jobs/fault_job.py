"""Faults of one of 2 ranks, injected. Prints one line for each that ended as it should.

python fault_job.py FOLDER            every fault that leaves the processes alive
python fault_job.py FOLDER raise      rank 1 meets a mistake of the program in a forward
python fault_job.py FOLDER kill       rank 1 is killed in a forward
python fault_job.py FOLDER stop       rank 1 is stopped in a forward
"""

import json
import os
import signal
import sys
from pathlib import Path

from mindformers_ext.generate.refill import RefilledBatch
from mindformers_ext.models import block
from mindformers_ext.runtime import rank
from mindformers_ext.trainer import Trainer, inference
from run_mindformer import guarded, leave

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"
FOLDER = Path(sys.argv[1])
PROMPTS = [f"{'word ' * (1 + index % 3)}{index} is" for index in range(5)]
BAD = 3
# The rank that answers the record, where records are shared.
HOLDER = None
LAYOUTS = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 2},
    "fsdp2": {"data_parallel_shard": 2, "expert_parallel": 2},
}


class Fault:
    """Makes layer 2 of one rank fail at a forward of the batches that hold the record `BAD`."""

    def __init__(self, failing_rank, forward, act):
        self.failing_rank, self.forward, self.act = failing_rank, forward, act
        self.records, self.seen = [], 0

    def __enter__(self):
        self.originals = inference.generate_batch, block.TransformerLayer._attend, RefilledBatch.advance
        generate_batch, attend, advance = self.originals

        def watched_batch(model, prompts, config, stats, records, *others):
            self.records, self.seen = records, 0
            return generate_batch(model, prompts, config, stats, records, *others)

        def failing_attend(layer, normed, context, state):
            if layer is self.layer and BAD in self.records and self.failing_rank in (rank(), HOLDER):
                self.seen += 1
                if self.seen == self.forward:
                    self.act()
            return attend(layer, normed, context, state)

        def watched_stretch(batch, prompts, records, *others):
            self.records, self.seen = {*batch._records, *records}, 0
            return advance(batch, prompts, records, *others)

        inference.generate_batch, block.TransformerLayer._attend = watched_batch, failing_attend
        RefilledBatch.advance = watched_stretch
        return self

    def __exit__(self, *error):
        inference.generate_batch, block.TransformerLayer._attend, RefilledBatch.advance = self.originals

    def watch(self, model):
        """The layer that fails is the last but one of this rank."""
        self.layer = [cell for _, cell in model.cells_and_names() if isinstance(cell, block.TransformerLayer)][-2]


def build(layout, **predict):
    return Trainer(
        {
            "run_mode": "predict",
            "checkpoint": {"load_path": str(CHECKPOINTS / "qwen3_moe")},
            "parallelism": {"data_parallel_shard": 1, **LAYOUTS[layout]},
            "inference": {"max_new_tokens": 4, "batch_size": 2},
            "predict": {"progress": False, **predict},
        }
    )


def raising(error):
    def act():
        raise error

    return act


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_record(layout, failing_rank, forward, error, kind, refill):
    """One record fails on one rank in the middle of a forward: it alone becomes an error, the others are answered."""
    output, expected = FOLDER / "result.jsonl", FOLDER / "expected.jsonl"
    trainer = build(layout, refill=refill)
    with Fault(failing_rank, forward, raising(error)) as fault:
        fault.watch(trainer.model)
        trainer.inference(PROMPTS, output=output, resume=False)
    assert trainer.last_summary.num_errors == 1
    trainer.inference(PROMPTS, output=expected, resume=False)
    if rank() == 0:
        found, wanted = rows(output), rows(expected)
        assert found[BAD]["error_type"] == kind, found[BAD]
        assert found[BAD]["error"] == f"{type(error).__name__}: injected", found[BAD]
        assert found[:BAD] + found[BAD + 1 :] == wanted[:BAD] + wanted[BAD + 1 :]
    how = "refilled" if refill else "in batches"
    print(f"{layout}, {how}: one record failed on rank {failing_rank}, forward {forward}, {kind}", flush=True)


def check_records():
    fault, memory = RuntimeError("injected"), MemoryError("injected")
    for layout, failing_rank, forward, error, kind, refill in (
        ("tp2", 1, 1, fault, "forward", False),
        ("tp2", 0, 3, fault, "forward", True),
        ("tp2", 1, 2, memory, "oom", True),
        ("pp2", 1, 2, fault, "forward", True),
        ("fsdp2", HOLDER, 2, fault, "forward", False),
        ("fsdp2", HOLDER, 2, fault, "forward", True),
    ):
        check_record(layout, failing_rank, forward, error, kind, refill)


def check_settings():
    """A rank with another batch size: all refuse, and say which."""
    trainer = build("tp2")
    try:
        trainer.inference(PROMPTS, output=FOLDER / "unused.jsonl", batch_size=2 + rank())
        raise AssertionError("different batch sizes were not refused")
    except ValueError as error:
        assert str(error).endswith("batch_size is 2 on rank 0, 3 on rank 1"), error
    assert not (FOLDER / "unused.jsonl.journal").exists()
    print("batch_size was refused", flush=True)


def check_input():
    """A rank that does not see the input: all refuse, and say which."""
    trainer = build("tp2")
    try:
        trainer.inference(FOLDER / f"input_{rank()}.jsonl", output=FOLDER / "unused.jsonl")
        raise AssertionError("a missing input was not noticed")
    except (FileNotFoundError, RuntimeError) as error:
        assert (rank() == 1) == isinstance(error, FileNotFoundError), error
        assert rank() == 1 or str(error).startswith("rank 1 failed: ") and "input_1.jsonl" in str(error), error
    print("the missing input was noticed", flush=True)


def check_unreadable():
    """A rank that cannot read its part of the checkpoint: all end, with its reason."""
    from mindformers_ext.trainer import trainer as module

    original = module.load_model_weights

    def load(model, path, *options):
        if rank() == 1:
            raise PermissionError(13, "Permission denied", f"{path}/model.safetensors")
        return original(model, path, *options)

    trainer = build("tp2")
    module.load_model_weights = load
    try:
        trainer.inference(PROMPTS, output="")
        raise AssertionError("an unreadable checkpoint was not noticed")
    except (OSError, RuntimeError) as error:
        assert "Permission denied" in str(error) and "model.safetensors" in str(error)
        assert (rank() == 1) == isinstance(error, PermissionError)
        assert rank() == 1 or str(error).startswith("rank 1 failed")
    finally:
        module.load_model_weights = original
    print("unreadable weights were noticed", flush=True)


def end_in(act, **predict):
    """Runs into a fault that ends the job, with an older output in place."""
    trainer = build("tp2", refill=False, **predict)
    with Fault(1, 3, act) as fault:
        fault.watch(trainer.model)
        trainer.inference(PROMPTS, output=FOLDER / "result.jsonl")
    return 0


def main():
    (FOLDER / "input_0.jsonl").write_text('{"instruction": "one"}\n')
    action = sys.argv[2] if len(sys.argv) > 2 else ""
    if action == "raise":
        return end_in(raising(TypeError("injected mistake")))
    if action == "kill":
        return end_in(lambda: os.kill(os.getpid(), signal.SIGKILL))
    if action == "stop":
        return end_in(lambda: os.kill(os.getpid(), signal.SIGSTOP), step_timeout=8)
    check_records()
    check_settings()
    check_input()
    check_unreadable()
    return 0


if __name__ == "__main__":
    leave(lambda: guarded(main))

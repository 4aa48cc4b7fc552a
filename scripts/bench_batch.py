"""Measures what a job costs beside its model: reading, tokenising, journal, publishing, going on.

    python scripts/bench_batch.py --records 200000

The model is a function that gives every prompt the same few tokens. Prints records a second of each part, the resident
memory at the start and at most, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import tempfile
import time
from typing import Any

from mindformers_ext.predict import Completion, Tokenizer, normalize_input, open_job, run_generation

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "tests" / "data" / "tokenizer"
_IDENTITY: dict[str, Any] = {"job": "bench"}
_KIB = 1024


def answer(prompts: list[list[int]], indices: list[int]) -> list[Completion]:
    """Gives every prompt eight tokens."""
    return [Completion([20, 30, 40, 50, 60, 70, 80, 90], "length") for _ in prompts]


def write_input(path: pathlib.Path, count: int) -> None:
    """Writes short records."""
    with open(path, "w", encoding="utf-8") as file:
        for index in range(count):
            file.write(json.dumps({"id": index, "instruction": f"question {index} of many"}) + "\n")


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(folder: pathlib.Path, count: int) -> dict[str, Any]:
    """Runs the parts of a job; returns what was measured."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write_input(source, count)
    tokenizer = Tokenizer.from_folder(TOKENIZER)
    before = resident()
    options = {"batch_size": 32, "max_new_tokens": 8, "collect": False}
    seconds = {}
    start = time.perf_counter()
    with open_job(output, _IDENTITY) as job:
        run_generation(normalize_input(source), tokenizer, answer, job, **options)  # type: ignore[arg-type]
        seconds["answer"] = time.perf_counter() - start
    # As after a kill at the very end: everything is in the journal.
    start = time.perf_counter()
    with open_job(output, _IDENTITY) as job:
        seconds["read journal"] = time.perf_counter() - start
        start = time.perf_counter()
        finished = job.finished
        run_generation(
            normalize_input(source),
            tokenizer,
            answer,
            job,
            finished=finished,
            **options,  # type: ignore[arg-type]
        )
        seconds["pass over finished"] = time.perf_counter() - start
        start = time.perf_counter()
        job.publish(count)
        seconds["publish"] = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _KIB
    return {
        "records": count,
        "records/s": {name: round(count / value) for name, value in seconds.items()},
        "records/s of a job": round(count / (seconds["answer"] + seconds["publish"])),
        "MiB before": round(before, 1),
        "MiB at most": round(peak, 1),
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(pathlib.Path(name), arguments.records)
    for part, rate in result["records/s"].items():
        print(f"{part}: {rate:,} records/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

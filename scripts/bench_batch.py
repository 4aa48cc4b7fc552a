"""Measures what a job costs beside its model: reading, tokenising, journal, publishing, going on.

    python scripts/bench_batch.py --records 200000

The model is a function that gives every prompt the same few tokens. Prints records a second of each part, by the clock
and by the time that a core worked for it (they differ where other programs use the machine), the resident memory at the
start and at most, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import tempfile
import time
from typing import Any

from mindformers_ext.predict import Completion, OutputJob, Tokenizer, normalize_input, open_job, run_generation

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


class _Clock:
    """Seconds of each part, by the clock and of a core."""

    def __init__(self) -> None:
        self._laps: dict[str, tuple[float, float]] = {}
        self.start()

    def start(self) -> None:
        """Begins a part."""
        self._before = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        """Ends a part and begins the next."""
        now = time.perf_counter(), time.process_time()
        self._laps[name] = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now

    def rates(self, count: int, kind: int) -> dict[str, int]:
        """Records a second of each part, and of a job that is not stopped: answer and publish."""
        job = self._laps["answer"][kind] + self._laps["publish"][kind]
        return {name: round(count / lap[kind]) for name, lap in self._laps.items()} | {"job": round(count / job)}


def measure(folder: pathlib.Path, count: int) -> dict[str, Any]:
    """Runs the parts of a job; returns what was measured."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write_input(source, count)
    tokenizer = Tokenizer.from_folder(TOKENIZER)
    before = resident()
    clock = _Clock()

    def run(job: OutputJob) -> None:
        records = normalize_input(source)
        run_generation(
            records, tokenizer, answer, job, batch_size=32, max_new_tokens=8, collect=False, finished=job.finished
        )

    with open_job(output, _IDENTITY) as job:
        run(job)
        clock.lap("answer")
    # As after a kill at the very end: everything is in the journal.
    clock.start()
    with open_job(output, _IDENTITY) as job:
        clock.lap("read journal")
        run(job)
        clock.lap("pass over finished")
        job.publish(count)
        clock.lap("publish")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _KIB
    return {
        "records": count,
        "records/s": clock.rates(count, 0),
        "records/s of a core": clock.rates(count, 1),
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
        print(f"{part}: {rate:,} records/s, {result['records/s of a core'][part]:,} of a core's time")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

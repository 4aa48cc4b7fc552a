"""Kills prediction jobs at random moments, lets them go on, and compares their files with that of an undisturbed job.

    python scripts/check_resume.py --kills 20                      # a small model on one process
    python scripts/check_resume.py --kills 5 --ranks 2
    python scripts/check_resume.py --kills 2 --ranks 2 --stop      # SIGTERM to the launcher; the job must end with 4
    python scripts/check_resume.py --model none --kills 200        # no model: the kills hit the files alone
    python scripts/check_resume.py --layouts                       # dp4 is killed; other layouts go on

With a model, the job is watched from outside and gets SIGKILL once its journal has a random number of lines; with
``--model none`` it kills itself inside a random write, rename or removal, half of a write being done. Each job is
killed up to twice before it may end. Prints a line a job and, last, one line of JSON; the exit code is 1 if any file
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"
_POLL_SECONDS = 0.01
_END_SECONDS = 60.0
_KILLS_OF_A_JOB = 2
# Exit codes; some records of the input have no answer.
_DONE, _STOPPED = 3, 4
# What goes on with a job of four replicas: number of processes, batch size, parallelism.
_LAYOUTS: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("one process", 1, 8, {}),
    ("tp2", 2, 8, {"tensor_parallel": 2, "sequence_parallel": True}),
    ("dp4, batch size 3", 4, 3, {}),
)


def write_input(path: pathlib.Path, count: int) -> None:
    """Writes records of several lengths, some of them without an answer."""
    lines = []
    for index in range(count):
        text = "" if index % 19 == 7 else "word " * (1 + index * 7 % 11) + str(index)
        lines.append("{broken" if index % 23 == 5 else json.dumps({"instruction": text, "id": index}))
    path.write_text("\n".join(lines) + "\n")


# A job without a model


def run_without_model(folder: pathlib.Path, output: pathlib.Path, deadly: int | None) -> int:
    """Answers the input by turning prompts round; gets SIGKILL inside the ``deadly``-th write, rename or removal."""
    from mindformers_ext.predict import Completion, Tokenizer, normalize_input, open_job, run_generation

    tokenizer = Tokenizer.from_folder(CHECKPOINT)

    def decode(prompts: list[list[int]], indices: list[int]) -> list[Completion]:
        return [Completion([*ids[::-1], index % 300], "length") for ids, index in zip(prompts, indices, strict=True)]

    if deadly is not None:
        _arm(deadly)
    with open_job(output, {"job": "turned round"}) as job:
        if job.manifest is None:
            result = run_generation(
                normalize_input(folder / "in.jsonl"),
                tokenizer,
                decode,
                job,
                batch_size=8,
                max_new_tokens=64,
                collect=False,
                finished=job.finished,
            )
            job.publish(result.summary.num_records + result.summary.num_resumed)
    return 0


def _arm(deadly: int) -> None:
    count = 0

    def dies() -> bool:
        nonlocal count
        count += 1
        return count == deadly

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pwrite, replace, unlink = os.pwrite, os.replace, os.unlink

    def deadly_pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if dies():
            pwrite(descriptor, data[: random.randrange(len(data) + 1)], offset)
            kill()
        return pwrite(descriptor, data, offset)

    def wrapped(action: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            if dies():
                if random.random() < 0.5:
                    action(*arguments, **options)
                kill()
            action(*arguments, **options)

        return call

    os.pwrite, os.replace, os.unlink = deadly_pwrite, wrapped(replace), wrapped(unlink)  # type: ignore[assignment]


# A job with one


def start(
    folder: pathlib.Path, output: pathlib.Path, ranks: int, batch_size: int, layout: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """Starts a job through the launcher."""
    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(CHECKPOINT)},
        "parallelism": {"data_parallel_shard": 1, **layout},
        "inference": {"input_data": "in.jsonl", "max_new_tokens": 4, "batch_size": batch_size, "output": str(output)},
        "generation": {"do_sample": True, "seed": 11, "top_k": 20},
        "predict": {"progress": False},
    }
    yaml = folder / f"{output.name}.yaml"
    yaml.write_text(json.dumps(config))
    program = f"{sys.executable} {ROOT / 'run_mindformer.py'} --config {yaml}"
    command = ["bash", str(ROOT / "scripts" / "msrun_launcher.sh"), program, str(ranks)]
    command += ["", str(folder / "log"), "True", "300"]
    environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    with open(folder / "job.log", "ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def kill_tree(root: int) -> None:
    """Sends SIGKILL to a process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = pathlib.Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    doomed = [root]
    for pid in doomed:
        doomed += [child for child, parent in parents.items() if parent == pid]
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + _END_SECONDS
    while any(_is_running(pid) for pid in doomed) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_killed(job: subprocess.Popen[bytes], output: pathlib.Path, lines: int, stop: bool = False) -> bool:
    """Kills a job once its journal has so many lines; returns whether it was still running.

    With ``stop`` it is asked to stop instead.

    Raises:
        SystemExit: a job that was asked to stop ended with another code than 4, and not because it was done.
    """
    journal = output.with_name(f"{output.name}.journal")
    while job.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
            if not stop:
                kill_tree(job.pid)
                job.wait()
                return True
            job.send_signal(signal.SIGTERM)
            if job.wait() not in (_STOPPED, _DONE):
                raise SystemExit(f"a job that was asked to stop ended with code {job.returncode}")
            return job.returncode == _STOPPED
        time.sleep(_POLL_SECONDS)
    return False


# The checks


def check_kills(arguments: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Kills and resumes jobs; returns what became of each."""
    expected = folder / "expected.jsonl"
    _complete(arguments, folder, expected)
    results = []
    for number in range(arguments.kills):
        output = folder / f"job{number}.jsonl"
        kills = sum(_kill_once(arguments, folder, output) for _ in range(random.randint(1, _KILLS_OF_A_JOB)))
        _complete(arguments, folder, output)
        results.append({"job": number, "kills": kills, "result": _compare(output, expected)})
        print(json.dumps(results[-1]), flush=True)
    return results


def check_layouts(arguments: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Kills a job of four replicas and lets each other layout go on with a copy of its journal."""
    expected, killed = folder / "expected.jsonl", folder / "killed.jsonl"
    _finish(start(folder, expected, 1, 8, {}), folder)
    if not run_killed(start(folder, killed, 4, 8, {}), killed, random.randint(10, arguments.records // 2)):
        raise SystemExit(f"the job of four processes was not there to be killed:\n{(folder / 'job.log').read_text()}")
    journal = killed.with_name(f"{killed.name}.journal").read_bytes()
    results = []
    for number, (name, ranks, batch_size, layout) in enumerate(_LAYOUTS):
        output = folder / f"layout{number}.jsonl"
        output.with_name(f"{output.name}.journal").write_bytes(journal)
        _finish(start(folder, output, ranks, batch_size, layout), folder)
        lines = journal.count(b"\n")
        results.append({"job": name, "kills": 1, "records before": lines - 1, "result": _compare(output, expected)})
        print(json.dumps(results[-1]), flush=True)
    return results


def _complete(arguments: argparse.Namespace, folder: pathlib.Path, output: pathlib.Path) -> None:
    if arguments.model == "none":
        _finish(_start_without_model(folder, output, None), folder, (0,))
    else:
        _finish(start(folder, output, arguments.ranks, 8, {}), folder)


def _kill_once(arguments: argparse.Namespace, folder: pathlib.Path, output: pathlib.Path) -> bool:
    if arguments.model == "none":
        # A line a record and the first one, the draft, two renames, the journal's removal.
        deadly = random.randint(1, arguments.records + 6)
        return _start_without_model(folder, output, deadly).wait() == -signal.SIGKILL
    job = start(folder, output, arguments.ranks, 8, {})
    # Before it has finished a record, a job that gets a signal may end as any program does.
    return run_killed(job, output, random.randint(2 * arguments.stop, arguments.records), arguments.stop)


def _start_without_model(folder: pathlib.Path, output: pathlib.Path, deadly: int | None) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(pathlib.Path(__file__).resolve()), "--worker", str(folder), str(output)]
    with open(folder / "job.log", "ab") as log:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen([*words, str(deadly or 0)], env=environment, stdout=log, stderr=log)


def _finish(job: subprocess.Popen[bytes], folder: pathlib.Path, codes: tuple[int, ...] = (_DONE,)) -> None:
    if job.wait() not in codes:
        raise SystemExit(f"a job ended with code {job.returncode}:\n{(folder / 'job.log').read_text()[-4000:]}")


def _compare(output: pathlib.Path, expected: pathlib.Path) -> str:
    if output.with_name(f"{output.name}.journal").exists():
        return "journal left"
    return "equal" if output.read_bytes() == expected.read_bytes() else "DIFFERENT"


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="jobs that are killed")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--model", choices=("tiny", "none"), default="tiny")
    parser.add_argument("--stop", action="store_true", help="ask jobs to stop instead of killing them")
    parser.add_argument("--layouts", action="store_true", help="go on in other layouts instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        folder, output, deadly = arguments.worker
        return run_without_model(pathlib.Path(folder), pathlib.Path(output), int(deadly) or None)
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_input(folder / "in.jsonl", arguments.records)
        results = (check_layouts if arguments.layouts else check_kills)(arguments, folder)
    bad = [result["job"] for result in results if result["result"] != "equal"]
    print(json.dumps({"jobs": len(results), "kills": sum(result["kills"] for result in results), "bad": bad}))
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())

"""Predicts in every parallel layout and compares the files with those of one process.

    python scripts/check_layouts.py --ranks 4
    python scripts/check_layouts.py --ranks 2 --families qwen3 deepseek_v3 --layouts tp2 pp2

One job walks all layouts of a number of ranks. A layout is written as its degrees, e.g. ``tp2pp2`` or ``fsdp4ep2``;
what is left of the ranks are replicas, and ``pp2mb2`` has two micro-batches. Prints what each process kept, sent and
waited as lines of JSON, and then a Markdown table; the exit code is 1 if any file differs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_SCORE_TOLERANCE = 1e-4
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "deepseek_v3", "deepseek_v4")
LAYOUTS = {
    2: ("dp2", "fsdp2", "tp2", "pp2", "cp2", "cp2ulysses", "ep2fsdp2", "tp2ep2"),
    4: (
        *("dp4", "fsdp4", "tp4", "cp4", "cp4ulysses", "pp4", "ep4fsdp4", "tp2", "tp2pp2", "tp2cp2", "cp2pp2"),
        *("tp2ep2pp2", "fsdp2tp2", "fsdp2pp2"),
    ),
    8: ("dp8", "fsdp8", "tp4fsdp2", "pp2tp2", "fsdp4", "ep8fsdp8", "pp4tp2", "ep2pp2fsdp2"),
}
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 11, "top_k": 20},
    "penalty": {"repetition_penalty": 1.3},
    "beams": {"num_beams": 4},
    "greedy_to_the_end": {"eos_token_id": None},
    "sampled_to_the_end": {"do_sample": True, "seed": 11, "top_k": 20, "eos_token_id": None},
}
DEFAULT_DECODINGS = ("greedy", "sampled", "penalty", "beams")
KEYS = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_parallel",
    "ep": "expert_parallel",
    "fsdp": "data_parallel_shard",
    "mb": "pipeline_parallel_microbatch_size",
}


def parallelism(layout: str) -> dict[str, Any]:
    """The ``parallelism`` section of a layout such as ``tp2pp2``."""
    degrees = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", layout)}
    section: dict[str, Any] = {KEYS[name]: size for name, size in degrees.items() if name in KEYS}
    if layout.endswith("ulysses"):
        section["context_parallel_method"] = "ulysses"
    return {"data_parallel_shard": 1, "sequence_parallel": section.get("tensor_parallel", 1) > 1, **section}


def prompts() -> list[str]:
    cases = json.loads((CHECKPOINTS / "qwen3" / "reference.json").read_text())["cases"]
    return [case["prompt"] for case in cases]


def predict(checkpoint: str, decoding: str, output: pathlib.Path, layout: dict[str, Any]) -> None:
    """Runs one prediction in this process."""
    from mindformers_ext.trainer import Trainer

    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": checkpoint},
        "parallelism": layout,
        "inference": {"input_data": prompts(), "max_new_tokens": 12, "batch_size": 3, "output": str(output)},
        "generation": DECODINGS[decoding],
        "predict": {"progress": False},
    }
    Trainer(config).inference(collect=False)


def metrics(output: pathlib.Path) -> dict[str, Any]:
    """What a run measured."""
    return json.loads(pathlib.Path(f"{output}.metrics.json").read_text())


def measures(output: pathlib.Path, single: pathlib.Path) -> dict[str, Any]:
    """What processes kept, ran, sent and waited, beside one process that does everything."""
    ours, whole = metrics(output), metrics(single)["ranks"][0]
    ranks = ours["ranks"]
    return {
        "weights": [rank["weight_bytes"] for rank in ranks],
        "cache_shares": [round(rank["cache_bytes"] / whole["cache_bytes"], 4) for rank in ranks],
        "forward_shares": [round(rank["forwards"] / whole["forwards"], 4) for rank in ranks],
        "idle_shares": [rank["idle_share"] and round(rank["idle_share"], 3) for rank in ranks],
        "sent": {name: round(counts["bytes_per_new_token"], 2) for name, counts in ours["traffic"].items()},
    }


def run_worker(arguments: argparse.Namespace) -> int:
    """Walks the layouts on one rank; rank 0 notes the results."""
    rank = int(os.environ.get("RANK_ID", "0"))
    folder = pathlib.Path(arguments.folder)
    results = []
    for layout in arguments.layouts:
        for family in arguments.families:
            for decoding in arguments.decodings:
                output, single = (folder / f"{name}-{family}-{decoding}.jsonl" for name in (layout, "single"))
                start = time.perf_counter()
                try:
                    predict(f"{arguments.checkpoints}/{family}", decoding, output, parallelism(layout))
                    found = {} if rank else measures(output, single)
                    result = "ok" if rank else _compare(output, single)
                except (ValueError, NotImplementedError) as error:
                    found, result = {}, f"refused: {error}"
                entry = {"layout": layout, "family": family, "decoding": decoding, "result": result, **found}
                results.append(entry | {"seconds": round(time.perf_counter() - start, 2)})
                if rank == 0:
                    print(json.dumps(results[-1]), flush=True)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    return 0


def _compare(output: pathlib.Path, expected: pathlib.Path) -> str:
    """``equal`` if the files are, byte by byte; ``equal ids`` if they differ in the digits of scores only."""
    if output.read_bytes() == expected.read_bytes():
        return "equal"
    pairs = zip(_rows(output), _rows(expected), strict=False)
    same = all(_same(ours, theirs) for ours, theirs in pairs) and len(_rows(output)) == len(_rows(expected))
    return "equal ids" if same else "DIFFERENT"


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    floats = {name for name, value in theirs.items() if isinstance(value, float)}
    return all(
        abs(ours[name] - theirs[name]) < _SCORE_TOLERANCE if name in floats else ours[name] == theirs[name]
        for name in theirs
    )


def table(results: Iterable[dict[str, Any]]) -> str:
    """The results as Markdown: a row a layout, a column a family."""
    rows: dict[str, dict[str, list[str]]] = {}
    for result in results:
        rows.setdefault(result["layout"], {}).setdefault(result["family"], []).append(result["result"])
    families = list(dict.fromkeys(result["family"] for result in results))
    lines = ["| layout | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
    for layout, cells in rows.items():
        shown = [", ".join(dict.fromkeys(cells.get(family, ["-"]))) for family in families]
        lines.append(f"| {layout} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--decodings", nargs="+", default=DEFAULT_DECODINGS)
    parser.add_argument("--checkpoints", default=str(CHECKPOINTS), help="folder with one folder a family")
    parser.add_argument("--layouts", nargs="+")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.layouts = arguments.layouts or LAYOUTS[arguments.ranks]
    if arguments.folder:
        return run_worker(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for family in arguments.families:
            for decoding in arguments.decodings:
                output = pathlib.Path(folder, f"single-{family}-{decoding}.jsonl")
                predict(f"{arguments.checkpoints}/{family}", decoding, output, {})
        words = [
            sys.executable,
            str(pathlib.Path(__file__).resolve()),
            "--folder",
            folder,
            "--checkpoints",
            arguments.checkpoints,
        ]
        for name in ("families", "decodings", "layouts"):
            words += [f"--{name}", *getattr(arguments, name)]
        launcher = str(ROOT / "scripts" / "msrun_launcher.sh")
        command = ["bash", launcher, " ".join(words), str(arguments.ranks), "", f"{folder}/log", "True", "300"]
        environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
        code = subprocess.run(command, env=environment, cwd=folder, check=False).returncode
        if code:
            return code
        results = json.loads(pathlib.Path(folder, "results.json").read_text())
    print(table(results))
    return int(any(result["result"] == "DIFFERENT" for result in results))


if __name__ == "__main__":
    raise SystemExit(main())

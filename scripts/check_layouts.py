"""Predicts in every parallel layout and compares the files with those of one process.

    python scripts/check_layouts.py --ranks 8
    python scripts/check_layouts.py --ranks 2 --families qwen3 deepseek_v3 --layouts tp2 pp2
    python scripts/check_layouts.py --ranks 8 --folder results

One job walks all layouts of a number of ranks, with small models of 8 heads whose weights follow from a seed. A layout
is written as its degrees, e.g. ``tp2pp2`` or ``fsdp4ep2``; what is left of the ranks are replicas. ``cp4ulysses``
exchanges heads, ``cp4hybrid`` does so in pairs, ``pp2uneven`` has stages of several sizes, ``pp2mb2`` two
micro-batches. Prints what each process kept, sent and waited as lines of JSON, and then a Markdown table; the exit code
is 1 if any file differs. ``--checkpoints`` takes other models, and answers longer prompts. With ``--folder`` files stay
there, and what stands in its ``results.jsonl`` is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "models"))
from boundary_cases import cases, write_checkpoint  # type: ignore[import-not-found]  # noqa: E402

# Written scores have 4 decimals: those near the middle between two numbers may be rounded either way.
_SCORE_TOLERANCE = 1.5e-4
CASE = "eight_heads"
TOKENIZER = ROOT / "tests" / "data" / "checkpoints" / "qwen3"
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "deepseek_v3", "deepseek_v4")
# The first batch is shorter than some degrees of context parallelism; there are fewer prompts than 8 replicas.
PROMPTS = ("1", "a:", "The quick brown fox", "今天天气")
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 11, "top_k": 20},
    "penalty": {"repetition_penalty": 1.3},
    "beams": {"num_beams": 4},
    "logprobs": {"repetition_penalty": 1.3, "output_logprobs": 2},
    "greedy_to_the_end": {"eos_token_id": None},
    "sampled_to_the_end": {"do_sample": True, "seed": 11, "top_k": 20, "eos_token_id": None},
}
DEFAULT_DECODINGS = ("greedy", "sampled", "penalty", "beams")
KEYS = {
    "pp": "pipeline_parallel",
    "fsdp": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "ep": "expert_parallel",
    "mb": "pipeline_parallel_microbatch_size",
}


def layouts(ranks: int) -> list[str]:
    """Every degree of one axis, and every product of several axes of 2, that so many ranks hold.

    Experts are shared by all that can share them, and by some of them in two layouts that share parameters too.
    """
    powers = [2**exponent for exponent in range(1, ranks.bit_length())]
    axes = ("fsdp", "tp", "cp", "pp")
    degrees = [{axis: size} for axis in axes for size in powers]
    for count in range(2, len(powers) + 1):
        degrees += [dict.fromkeys(chosen, 2) for chosen in itertools.combinations(axes, count)]
    named = {"".join(f"{axis}{size}" for axis, size in layout.items()): layout for layout in degrees}
    blocks = {name: math.prod(size for axis, size in layout.items() if axis != "pp") for name, layout in named.items()}
    experts = [f"{name}ep{block}" for name, block in blocks.items() if block > 1]
    experts += ["fsdp4ep2", "fsdp2tp2ep2"] * (ranks >= 4)
    methods = [f"cp{size}ulysses" for size in powers] + [f"cp{size}hybrid" for size in powers if size > 2]
    methods += ["tp2cp2ulysses"] * (ranks >= 4) + ["tp2cp4hybrid"] * (ranks >= 8)
    return [f"dp{ranks}", *named, *methods, *(f"pp{size}uneven" for size in powers if size <= 4), *experts]


def parallelism(layout: str, layers: int) -> dict[str, Any]:
    """The ``parallelism`` section of a layout such as ``tp2pp2``, for a model of so many layers."""
    degrees = {
        name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", re.sub("ulysses|hybrid|uneven", "", layout))
    }
    section: dict[str, Any] = {KEYS[name]: size for name, size in degrees.items() if name in KEYS}
    if layout.endswith("ulysses"):
        section["context_parallel_method"] = "ulysses"
    if layout.endswith("hybrid"):
        section |= {"context_parallel_method": "hybrid", "ulysses_degree_in_cp": 2}
    if layout.endswith("uneven"):
        others = degrees["pp"] - 1
        bounds = [0, *(1 + (layers - 1) * stage // others for stage in range(others + 1))]
        section["pipeline_parallel_layers_per_stage"] = [
            f"{begin}-{end - 1}" for begin, end in itertools.pairwise(bounds)
        ]
    return {"data_parallel_shard": 1, "sequence_parallel": section.get("tensor_parallel", 1) > 1, **section}


def make_checkpoint(family: str, folder: pathlib.Path) -> None:
    """Writes the model of a family, and a tokenizer."""
    folder.mkdir(parents=True)
    write_checkpoint(folder, cases(family)[CASE])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TOKENIZER / name, folder)


def predict(checkpoint: pathlib.Path, decoding: str, output: pathlib.Path, long: bool, layout: str = "") -> None:
    """Runs one prediction in this process."""
    from mindformers_ext.trainer import Trainer

    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    prompts, new_tokens, batch_size = list(PROMPTS), 6, 2
    if long:
        stored = json.loads((TOKENIZER / "reference.json").read_text())["cases"]
        prompts, new_tokens, batch_size = [case["prompt"] for case in stored], 12, 3
    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(checkpoint)},
        "parallelism": parallelism(layout, layers),
        "inference": {
            "input_data": prompts,
            "max_new_tokens": new_tokens,
            "batch_size": batch_size,
            "output": str(output),
        },
        "generation": DECODINGS[decoding],
        # The shares of a cache are those of batches: a row that joins one brings a cache of its own.
        "predict": {"progress": False, "resume": False, "refill": not long},
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


def run_worker(folder: pathlib.Path, checkpoints: pathlib.Path | None) -> int:
    """Walks what is to do on one rank; rank 0 notes the results."""
    rank = int(os.environ.get("RANK_ID", "0"))
    for entry in json.loads((folder / "todo.json").read_text()):
        layout, family, decoding = entry["layout"], entry["family"], entry["decoding"]
        output = folder / f"{entry['ranks']}-{layout}-{family}-{decoding}.jsonl"
        single = folder / f"single-{family}-{decoding}.jsonl"
        start = time.perf_counter()
        try:
            predict((checkpoints or folder) / family, decoding, output, checkpoints is not None, layout)
            found = {} if rank else measures(output, single) | compare(output, single)
        except (ValueError, NotImplementedError) as error:
            found = {"result": f"refused: {error}"}
        if rank == 0:
            line = json.dumps(entry | found | {"seconds": round(time.perf_counter() - start, 2)})
            print(line, flush=True)
            with open(folder / "results.jsonl", "a") as file:
                file.write(line + "\n")
    return 0


def compare(output: pathlib.Path, expected: pathlib.Path) -> dict[str, Any]:
    """Tells how two files differ: ``equal`` byte by byte; ``equal ids`` if only scores differ, in the last digit."""
    if output.read_bytes() == expected.read_bytes():
        return {"result": "equal"}
    largest = _difference(*(list(map(json.loads, path.read_text().splitlines())) for path in (output, expected)))
    return {"result": "equal ids" if largest < _SCORE_TOLERANCE else "DIFFERENT", "difference": largest}


def _difference(ours: Any, theirs: Any) -> float:
    """The largest difference of floats; without bound where anything else differs."""
    if isinstance(theirs, float) and isinstance(ours, float):
        return abs(ours - theirs)
    if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        return max(map(_difference, ours, theirs), default=0.0)
    if isinstance(theirs, dict) and isinstance(ours, dict) and ours.keys() == theirs.keys():
        return _difference(list(ours.values()), list(theirs.values()))
    return 0.0 if ours == theirs else math.inf


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


def _read_results(folder: pathlib.Path) -> list[dict[str, Any]]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def walk(arguments: argparse.Namespace, folder: pathlib.Path) -> int:
    """Answers on one process, then in a job; returns the exit code."""
    walked = itertools.product(arguments.layouts or layouts(arguments.ranks), arguments.families, arguments.decodings)
    asked = [{"ranks": arguments.ranks, "layout": a, "family": b, "decoding": c} for a, b, c in walked]
    known = [{name: entry[name] for name in asked[0]} for entry in _read_results(folder)]
    (folder / "todo.json").write_text(json.dumps([entry for entry in asked if entry not in known]))
    for family in arguments.families:
        if arguments.checkpoints is None and not (folder / family).exists():
            make_checkpoint(family, folder / family)
        checkpoint = (arguments.checkpoints or folder) / family
        for decoding in arguments.decodings:
            single = folder / f"single-{family}-{decoding}.jsonl"
            predict(checkpoint, decoding, single, arguments.checkpoints is not None)
    script = f"{sys.executable} {pathlib.Path(__file__).resolve()} --one-rank --folder {folder}"
    if arguments.checkpoints is not None:
        script += f" --checkpoints {arguments.checkpoints.resolve()}"
    launcher = str(ROOT / "scripts" / "msrun_launcher.sh")
    command = ["bash", launcher, script, str(arguments.ranks), "", f"{folder}/log", "True", "300"]
    # Small models gain nothing from threads.
    defaults = {"OMP_NUM_THREADS": "1"}
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = defaults | os.environ | {"PATH": path}
    code = subprocess.run(command, env=environment, cwd=folder, check=False).returncode
    found = [entry for entry in _read_results(folder) if {name: entry[name] for name in asked[0]} in asked]
    print(table(found))
    return code or int(any(entry["result"] == "DIFFERENT" for entry in found))


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--decodings", nargs="+", default=DEFAULT_DECODINGS)
    parser.add_argument("--layouts", nargs="+")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="folder with one folder a family")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--one-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_rank:
        return run_worker(arguments.folder, arguments.checkpoints)
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        return walk(arguments, arguments.folder.resolve())
    with tempfile.TemporaryDirectory() as folder:
        return walk(arguments, pathlib.Path(folder))


if __name__ == "__main__":
    raise SystemExit(main())

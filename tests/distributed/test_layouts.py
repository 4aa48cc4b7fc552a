"""Parallel layouts give the answers of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_layouts.py"


def check(ranks, families, layouts, decodings):
    words = [sys.executable, str(SCRIPT), "--ranks", str(ranks), "--families", *families]
    words += ["--layouts", *layouts, "--decodings", *decodings]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(results) == len(families) * len(layouts) * len(decodings)
    return results


def by_layout(results, name):
    return {(entry["layout"], entry["family"]): entry.get(name) for entry in results}


def test_layouts_of_two_ranks_give_the_same_files():
    layouts = ["dp2", "fsdp2", "tp2", "cp2", "cp2ulysses", "pp2uneven", "fsdp2ep2", "tp2ep2"]
    results = check(2, ["qwen3_moe"], layouts, ["greedy", "sampled", "penalty", "beams"])
    exact = {"greedy", "sampled"}
    assert {entry["result"] for entry in results if entry["decoding"] in exact} == {"equal"}
    assert {entry["result"] for entry in results if entry["decoding"] not in exact} <= {"equal", "equal ids"}


def test_every_kind_of_layer_works_in_layouts_of_two_ranks():
    families = ["qwen3_5", "deepseek_v3", "deepseek_v4"]
    results = by_layout(check(2, families, ["fsdp2", "tp2", "cp2", "pp2"], ["greedy"]), "result")
    refused = results.pop(("cp2", "deepseek_v4"))
    assert refused.startswith("refused: parallelism: context_parallel 2: the compressed blocks of deepseek_v4")
    assert set(results.values()) == {"equal"}


def test_products_of_layouts_give_the_same_files_and_split_the_weights():
    layouts = ["tp2pp2", "fsdp2tp2", "cp2pp2", "tp2cp2", "cp4hybrid", "cp4ulysses", "fsdp4ep4", "tp2pp2ep2", "fsdp4"]
    families = ["qwen3_moe", "qwen3_5"]
    results = check(4, families, ["dp4", *layouts], ["greedy"])
    found = by_layout(results, "result")
    for layout in ("fsdp4ep4", "tp2pp2ep2"):
        assert "a qwen3_5_text has no experts" in found.pop((layout, "qwen3_5"))
    assert set(found.values()) == {"equal"}
    weights = by_layout(results, "weights")
    whole = weights["dp4", "qwen3_moe"]
    for layout in ("tp2pp2", "fsdp2tp2", "fsdp4ep4", "fsdp4", "tp2cp2"):
        assert weights[layout, "qwen3_moe"] < 1.15 * whole / 4


def test_layouts_of_eight_ranks_give_the_same_files():
    layouts = ["dp8", "tp8", "tp2cp2pp2", "fsdp2tp2cp2ep8"]
    results = check(8, ["qwen3_moe"], layouts, ["greedy"])
    assert {entry["result"] for entry in results} == {"equal"}

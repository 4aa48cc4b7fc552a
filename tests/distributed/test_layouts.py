"""Parallel layouts give the answers of one process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_layouts.py"
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"


def check(ranks, families, layouts, decodings, *options):
    words = [sys.executable, str(SCRIPT), "--ranks", str(ranks), "--families", *families]
    words += ["--layouts", *layouts, "--decodings", *decodings, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(results) == len(families) * len(layouts) * len(decodings)
    return results


def by_layout(results, name):
    return {(entry["layout"], entry["family"]): entry.get(name) for entry in results}


def test_layouts_of_two_ranks_give_the_same_files():
    layouts = ["tp2", "cp2ulysses", "pp2uneven", "fsdp2ep2"]
    results = check(2, ["qwen3_moe"], layouts, ["greedy", "sampled", "logprobs", "beams"])
    exact = {"greedy", "sampled"}
    assert {entry["result"] for entry in results if entry["decoding"] in exact} == {"equal"}
    assert {entry["result"] for entry in results if entry["decoding"] not in exact} <= {"equal", "equal ids"}


def test_every_kind_of_layer_works_in_layouts_of_two_ranks():
    families = ["qwen3_5", "deepseek_v3", "deepseek_v4"]
    results = by_layout(check(2, families, ["fsdp2", "tp2", "cp2", "pp2"], ["greedy"]), "result")
    refused = results.pop(("cp2", "deepseek_v4"))
    assert refused.startswith("refused: parallelism: context_parallel 2: the compressed blocks of deepseek_v4")
    assert set(results.values()) == {"equal"}


def test_products_with_layers_that_pass_a_state_on_give_the_same_files():
    results = check(4, ["qwen3_5"], ["cp2pp2", "tp2cp2", "cp4hybrid"], ["greedy"])
    assert {entry["result"] for entry in results} == {"equal"}


def test_layouts_of_eight_ranks_give_the_same_files():
    layouts = ["tp8", "tp2cp2pp2", "fsdp2tp2cp2ep8"]
    results = check(8, ["qwen3_moe"], layouts, ["greedy"])
    assert {entry["result"] for entry in results} == {"equal"}


def test_products_of_layouts_split_weights_cache_and_forwards():
    layouts = [
        "tp2pp2",
        "cp2pp2",
        "tp2cp2",
        "ep4fsdp4",
        "tp2ep2pp2",
        "fsdp4",
        "pp2",
        "pp2mb2",
        "pp4",
        "dp4",
    ]
    results = check(4, ["qwen3_moe"], layouts, ["greedy"], "--checkpoints", str(CHECKPOINTS))
    assert {entry["result"] for entry in results} == {"equal"}
    found = {entry["layout"]: entry for entry in results}
    whole = 437_056 * 4
    assert found["dp4"]["weights"] == [whole] * 4
    assert found["fsdp4"]["weights"] == [whole // 4] * 4
    for layout in ("tp2pp2", "ep4fsdp4", "tp2cp2"):
        assert max(found[layout]["weights"]) < 1.15 * whole / 4, layout
    assert sum(found["pp4"]["weights"]) == sum(found["pp2"]["weights"]) // 2 == whole
    # Under context parallelism a process has up to two slots more than its part.
    for layout, share, more in (("tp2pp2", 0.25, 0), ("pp4", 0.25, 0), ("cp2pp2", 0.25, 0.03), ("tp2cp2", 0.25, 0.03)):
        assert max(found[layout]["cache_shares"]) <= share + more, layout
        assert min(found[layout]["cache_shares"]) >= share, layout
    # Two pipelines share the batches that one runs alone, in one piece or in micro-batches.
    assert found["pp4"]["forward_shares"] == [1.0] * 4
    assert found["pp2"]["forward_shares"] == found["pp2mb2"]["forward_shares"] == [0.5] * 4
    assert found["pp2"]["sent"]["pp"] == 4  # one id for each new token
    assert found["pp2"]["sent"]["stages"] == found["pp2mb2"]["sent"]["stages"]


def with_vocabulary(folder, size):
    """The checkpoint of qwen3 with more token ids."""
    shutil.copytree(ROOT / "tests" / "data" / "checkpoints" / "qwen3", folder)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    more = np.random.default_rng(size).normal(scale=0.15, size=(size - len(table), table.shape[1]))
    tensors["model.embed_tokens.weight"] = np.concatenate((table, more.astype(np.float32)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))


def test_what_is_sent_for_a_token_does_not_depend_on_the_vocabulary(tmp_path):
    for size in (512, 4096):
        with_vocabulary(tmp_path / str(size), size)
    decodings = ["greedy_to_the_end", "sampled_to_the_end"]
    results = check(2, ["512", "4096"], ["tp2", "pp2"], decodings, "--checkpoints", str(tmp_path))
    assert {entry["result"] for entry in results} == {"equal"}
    sent = {(entry["layout"], entry["decoding"], entry["family"]): entry["sent"] for entry in results}
    for layout, axis in (("tp2", "tp"), ("pp2", "pp")):
        for decoding in decodings:
            small, large = (sent[layout, decoding, size][axis] for size in ("512", "4096"))
            assert small == large > 0, (layout, decoding)

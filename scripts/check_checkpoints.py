"""Trains on one process, predicts from that checkpoint in every layout, saves from layouts and predicts elsewhere.

    python scripts/check_checkpoints.py --ranks 4 --families qwen3_moe
    python scripts/check_checkpoints.py --ranks 8 --layouts tp2pp2 fsdp8

One job walks all layouts. In each it predicts from the folder that one process trained and saved, saves the model,
and predicts from what the layout before saved; at the end one process predicts from every folder, and from the
HuggingFace export of each. All files must be those of one process, byte by byte. The exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from check_layouts import ROOT, parallelism

CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"
LAYOUTS = {
    2: ("dp2", "fsdp2", "tp2", "pp2", "cp2", "cp2ulysses", "ep2fsdp2", "tp2ep2"),
    4: (
        *("dp4", "fsdp4", "tp4", "cp4", "cp4ulysses", "pp4", "ep4fsdp4", "tp2", "tp2pp2", "tp2cp2", "cp2pp2"),
        *("tp2ep2pp2", "fsdp2tp2", "fsdp2pp2"),
    ),
    8: ("dp8", "fsdp8", "tp4fsdp2", "pp2tp2", "fsdp4", "ep8fsdp8", "pp4tp2", "ep2pp2fsdp2"),
}
_STEPS = 20


def train(family: str, folder: pathlib.Path) -> None:
    """Trains a model of a family for some steps and saves it to ``folder``."""
    from mindformers_ext.trainer import Trainer

    data = folder.parent / f"{family}.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"{n} + {n} = {2 * n}, and so on"}) for n in range(80)))
    loader = {"type": "TextDataset", "path": str(data), "seq_length": 16, "tokenizer_path": str(CHECKPOINTS / family)}
    config = {
        "run_mode": "train",
        "checkpoint": {
            "load_path": str(CHECKPOINTS / family),
            "no_load_optim": True,
            "save_path": str(folder),
            "save_interleaved_steps": _STEPS,
        },
        "training": {"steps": _STEPS, "local_batch_size": 2, "global_batch_size": 2},
        "optimizer": {"type": "AdamW"},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3},
        "train_dataset": {"dataloader": loader},
    }
    Trainer(config).train()


def trainer_of(load_path: pathlib.Path, layout: dict[str, Any], redundant: bool = True) -> Any:
    """A Trainer that predicts from a folder in a layout."""
    from mindformers_ext.trainer import Trainer

    prompts = json.loads((CHECKPOINTS / "qwen3" / "reference.json").read_text())["cases"]
    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(load_path), "remove_redundancy": not redundant},
        "parallelism": layout,
        "inference": {"input_data": [case["prompt"] for case in prompts], "max_new_tokens": 12, "batch_size": 3},
        "predict": {"progress": False, "resume": False},
    }
    return Trainer(config)


def run_worker(arguments: argparse.Namespace) -> int:
    """Walks the layouts on one rank; rank 0 compares."""
    folder = pathlib.Path(arguments.folder)
    results = []
    for family in arguments.families:
        before = None
        layers = json.loads((CHECKPOINTS / family / "config.json").read_text())["num_hidden_layers"]
        for index, layout in enumerate(arguments.layouts):
            sources = {"trained on one process": folder / family}
            if before is not None:
                sources[f"saved from {before}"] = folder / f"{family}-{before}"
            for what, source in sources.items():
                trainer = trainer_of(source, parallelism(layout, layers), redundant=bool(index % 2))
                output = folder / f"{family}-{layout}.jsonl"
                trainer.inference(output=output, collect=False)
                if arguments.rank == 0:
                    results.append((family, layout, what, compare(output, folder / f"{family}.expected.jsonl")))
            trainer.save_checkpoint(folder / f"{family}-{layout}")
            before = layout
    if arguments.rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    return 0


def compare(output: pathlib.Path, expected: pathlib.Path) -> str:
    """``equal`` if two files are, byte by byte."""
    return "equal" if output.read_bytes() == expected.read_bytes() else "DIFFERENT"


def predict_alone(source: pathlib.Path, output: pathlib.Path) -> None:
    """Predicts from a folder on this one process."""
    trainer_of(source, {}).inference(output=output, collect=False)


def check_alone(folder: pathlib.Path, family: str, layout: str) -> list[tuple[str, str, str, str]]:
    """Predicts from what a layout saved on one process, directly and from its export."""
    from mindformers_ext.checkpoint import export

    saved, exported = folder / f"{family}-{layout}", folder / f"{family}-{layout}-hf"
    if export.main(["--load_path", str(saved), "--output", str(exported), "--dtype", "float32"]):
        raise SystemExit(1)
    found = []
    for what, source in (("saved from", saved), ("exported from", exported)):
        output = folder / "alone.jsonl"
        predict_alone(source, output)
        result = compare(output, folder / f"{family}.expected.jsonl")
        found.append((family, "one process", f"{what} {layout}", result))
    return found


def launch(arguments: argparse.Namespace, folder: str) -> int:
    """Starts the job and returns its exit code."""
    words = [sys.executable, str(pathlib.Path(__file__).resolve()), "--folder", folder]
    for name in ("families", "layouts"):
        words += [f"--{name}", *getattr(arguments, name)]
    launcher = str(ROOT / "scripts" / "msrun_launcher.sh")
    command = ["bash", launcher, " ".join(words), str(arguments.ranks), "", f"{folder}/log", "True", "300"]
    environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, env=environment, cwd=folder, check=False).returncode


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--families", nargs="+", default=["qwen3", "qwen3_moe", "deepseek_v3"])
    parser.add_argument("--layouts", nargs="+")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.layouts = arguments.layouts or LAYOUTS[arguments.ranks]
    arguments.rank = int(os.environ.get("RANK_ID", "0"))
    if arguments.folder:
        return run_worker(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for family in arguments.families:
            train(family, folder / family)
            predict_alone(folder / family, folder / f"{family}.expected.jsonl")
        code = launch(arguments, name)
        if code:
            return code
        results = json.loads((folder / "results.json").read_text())
        for family in arguments.families:
            for layout in arguments.layouts:
                results += check_alone(folder, family, layout)
    print("| family | predicted in | from what was | result |", "|---|---|---|---|", sep="\n")
    for result in results:
        print("| " + " | ".join(result) + " |")
    return int(any(result[-1] != "equal" for result in results))


if __name__ == "__main__":
    raise SystemExit(main())

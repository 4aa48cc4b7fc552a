"""Compares the hidden states after every layer of a checkpoint with transformers, and names the first that differs.

    python scripts/check_layers.py path/to/folder --peer_python /path/to/python/with/torch
    python scripts/check_layers.py path/to/folder --peer_python ... --prompt "Once upon a time" --chunk_size 16

The folder is a HuggingFace checkpoint of any family. Both sides run in float32 on the CPU, one after the other. Streams
of hyper-connections are compared as a whole. The exit code is 1 if a difference exceeds ``--limit``, of the logits five
times as much: the final norm and the head raise what the layers leave.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# What a model computes on its way, each [S, ...], in the order in which it is computed.
States = dict[str, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """One state of both sides.

    Attributes:
        name: ``embedding``, ``layer 0``, ..., ``logits``.
        kind: types of attention and MLP of the layer.
        largest: largest absolute value of the peer's state.
        difference: largest absolute difference, relative to ``largest``.
    """

    name: str
    kind: str
    largest: float
    difference: float


def compare(ours: States, peers: States, kinds: Sequence[str]) -> list[Comparison]:
    """Compares states one by one.

    Args:
        ours: states of this package.
        peers: states of transformers.
        kinds: types of each layer.

    Raises:
        ValueError: the sides have other states, or a state has another number of values.
    """
    if list(ours) != list(peers):
        raise ValueError(f"this package has the states {', '.join(ours)}, transformers {', '.join(peers)}")
    rows = []
    for name, peer in peers.items():
        if ours[name].size != peer.size:
            raise ValueError(f"{name} has shape {ours[name].shape} here and {peer.shape} in transformers")
        largest = float(np.abs(peer).max())
        difference = float(np.abs(ours[name].reshape(peer.shape) - peer).max()) / (largest or 1.0)
        kind = kinds[int(name.split()[1])] if name.startswith("layer ") else ""
        rows.append(Comparison(name, kind, largest, difference))
    return rows


def differing(rows: Sequence[Comparison], limit: float) -> list[Comparison]:
    """Returns the rows beyond the limit, logits beyond five times as much; a nan is beyond every limit."""
    return [row for row in rows if not row.difference <= limit * (5 if row.name == "logits" else 1)]


def report(rows: Sequence[Comparison], limit: float) -> str:
    """Returns the table and the line below it."""
    width = max(len(row.kind) for row in rows)
    lines = [f"{'after':<10}  {'kind':<{width}}  {'largest value':>13}  {'difference':>10}"]
    beyond = differing(rows, limit)
    for row in rows:
        mark = "  <-" if row in beyond else ""
        lines.append(f"{row.name:<10}  {row.kind:<{width}}  {row.largest:>13.4g}  {row.difference:>10.1e}{mark}")
    if beyond:
        lines.append(f"first difference above {limit:g}: {' '.join((beyond[0].name, beyond[0].kind)).strip()}")
    else:
        lines.append(f"no difference above {limit:g}; the largest is {max(row.difference for row in rows):.1e}")
    return "\n".join(lines)


def our_states(folder: pathlib.Path, ids: Sequence[int], chunk_size: int) -> tuple[States, list[str]]:
    """Runs this package; returns its states and the types of each layer."""
    import mindspore as ms
    from mindspore import Tensor

    from mindformers_ext.checkpoint import load_weights
    from mindformers_ext.models import transformer_config
    from mindformers_ext.models.gpt_model import GPTModel
    from mindformers_ext.runtime import setup_runtime

    setup_runtime("CPU")
    config = transformer_config({}, json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = GPTModel(config)
    load_weights(folder, model.weight_layout(), model.set_weight)
    model.set_train(False)
    pieces: dict[str, list[np.ndarray]] = {}

    def keep(name: str, output: Any) -> None:
        # A layer leaves the addition of its last update to the next one.
        parts = [part.asnumpy() for part in (output if isinstance(output, tuple) else (output,)) if part is not None]
        state = sum(parts[1:], parts[0].copy())
        pieces.setdefault(name, []).append(state)

    model.embedding.register_forward_hook(lambda _, inputs, output: keep("embedding", output[0]))
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_hook(lambda _, inputs, output, name=f"layer {number}": keep(name, output))
    with ms._no_grad():
        cache = model.new_cache(1, len(ids))
        for start in range(0, len(ids), chunk_size):
            piece = Tensor(np.array([ids[start : start + chunk_size]], np.int32))
            keep("logits", model(piece, past_key_values=cache)["logits"][0])
    kinds = [" + ".join(pair) for pair in zip(config.layer_types, config.mlp_layer_types, strict=True)]
    return {name: np.concatenate(parts) for name, parts in pieces.items()}, kinds


def peer_states(folder: pathlib.Path, ids: Sequence[int]) -> States:
    """Runs transformers; returns its states."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    states: States = {}

    def keep(name: str, output: Any) -> None:
        states[name] = (output[0] if isinstance(output, tuple) else output)[0].numpy().copy()

    model.get_input_embeddings().register_forward_hook(lambda _, inputs, output: keep("embedding", output))
    for number, layer in enumerate(model.base_model.layers):
        layer.register_forward_hook(lambda _, inputs, output, name=f"layer {number}": keep(name, output))
    with torch.inference_mode():
        keep("logits", model(torch.tensor([list(ids)]), use_cache=False).logits)
    return states


def ask_peer(python: str, folder: pathlib.Path, ids: Sequence[int]) -> States:
    """Runs `peer_states` with another interpreter."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = pathlib.Path(scratch) / "states.npz"
        command = [python, os.path.abspath(__file__), str(folder), "--serve_peer", str(answer)]
        code = subprocess.run([*command, "--ids", *map(str, ids)], check=False).returncode
        if code:
            raise SystemExit(f"the peer ended with exit code {code}; does {python} have transformers?")
        with np.load(answer) as states:
            return dict(states)


def prompt_ids(options: argparse.Namespace) -> list[int]:
    """Returns the ids of the prompt that the options ask for."""
    if options.ids:
        return list(options.ids)
    if options.prompt is not None:
        from mindformers_ext.predict.tokenizer import Tokenizer

        return Tokenizer.from_folder(options.folder).encode(options.prompt)
    config = json.loads((options.folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = config.get("text_config", config)["vocab_size"]
    return np.random.default_rng(0).integers(0, vocabulary, options.prompt_length).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="HuggingFace checkpoint")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text; needs the folder's tokenizer")
    prompt.add_argument("--ids", type=int, nargs="+", help="token ids of the prompt")
    prompt.add_argument("--prompt_length", type=int, default=70, help="so many random ids")
    parser.add_argument("--chunk_size", type=int, help="most tokens of one forward here; default: the whole prompt")
    parser.add_argument("--limit", type=float, default=1e-4, help="largest relative difference that passes")
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter that has torch and transformers")
    parser.add_argument("--serve_peer", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    ids = prompt_ids(options)
    if options.serve_peer:
        np.savez(options.serve_peer, **peer_states(options.folder, ids))
        return 0
    peers = ask_peer(options.peer_python, options.folder, ids)
    ours, kinds = our_states(options.folder, ids, options.chunk_size or len(ids))
    rows = compare(ours, peers, kinds)
    print(report(rows, options.limit))
    return 1 if differing(rows, options.limit) else 0


if __name__ == "__main__":
    raise SystemExit(main())

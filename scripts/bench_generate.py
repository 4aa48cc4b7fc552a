"""Measures prefill and decode of a random model of a given shape, beside transformers if that is asked for.

    python scripts/bench_generate.py --batch_sizes 1 8 --prompt_length 64 --new_tokens 32
    python scripts/bench_generate.py --compare transformers --peer_python /path/to/python/with/torch

Both sides run in the same process order on the same shape: for every batch size first ours, then the peer's, each after
one warm-up, and the median of ``--runs`` runs is reported. The peer may live in another environment, since torch is no
dependency of this package. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SHAPE: dict[str, Any] = {  # Qwen3-0.6B
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}

# One run: prompts of equal length -> (seconds of prefill, seconds of each decode step).
Run = Callable[[list[list[int]], int], tuple[float, list[float]]]


def our_run(shape: dict[str, Any]) -> tuple[Run, int]:
    """Returns a run of this package's model, and the bytes of the weights that a decode step reads."""
    from mindspore import _no_grad

    from mindformers_ext.generate.forward import BatchForward
    from mindformers_ext.models import transformer_config
    from mindformers_ext.models.gpt_model import GPTModel
    from mindformers_ext.runtime import setup_runtime

    setup_runtime("CPU")
    model = GPTModel(transformer_config({"model_type": "qwen3", **shape}))
    model.init_weights(0)
    model.set_train(False)

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, list[float]]:
        with _no_grad():
            batch = BatchForward(model, prompts, new_tokens, use_cache=True, chunk_size=512)
            started = time.perf_counter()
            scores = batch.prefill().whole()
            prefill = time.perf_counter() - started
            steps = []
            for _ in range(new_tokens - 1):
                started = time.perf_counter()
                scores = batch.step(scores.argmax(axis=1)).whole()
                steps.append(time.perf_counter() - started)
        return prefill, steps

    tied = shape["tie_word_embeddings"]
    head = model.embedding.word_embeddings.weight.size
    return run, 4 * (sum(p.size for p in model.get_parameters()) - (0 if tied else head))


def peer_run(shape: dict[str, Any]) -> Run:
    """Returns the same run of transformers in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, list[float]]:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        outputs = model(ids, use_cache=True, logits_to_keep=1)
        prefill = time.perf_counter() - started
        steps = []
        for _ in range(new_tokens - 1):
            started = time.perf_counter()
            token = outputs.logits[:, -1].argmax(-1, keepdim=True)
            outputs = model(token, past_key_values=outputs.past_key_values, use_cache=True)
            steps.append(time.perf_counter() - started)
        return prefill, steps

    return run


def prompts_of(batch_size: int, length: int, vocab_size: int) -> list[list[int]]:
    """Returns token ids that are the same in every process."""
    return [[(row * 7919 + column * 104729 + 17) % vocab_size for column in range(length)] for row in range(batch_size)]


def measure(run: Run, batch_size: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns tokens/s of prefill and decode, and the median decode step in ms."""
    prompts = prompts_of(batch_size, options.prompt_length, SHAPE["vocab_size"])
    run(prompts, 3)  # warm-up
    results = [run(prompts, options.new_tokens) for _ in range(options.runs)]
    prefill = statistics.median(seconds for seconds, _ in results)
    step = statistics.median(statistics.median(steps) for _, steps in results)
    return {
        "prefill_tokens_per_second": batch_size * options.prompt_length / prefill,
        "decode_tokens_per_second": batch_size / step,
        "decode_step_ms": step * 1e3,
    }


class Peer:
    """transformers in a process of its own, measured when it is asked."""

    def __init__(self, options: argparse.Namespace) -> None:
        command = [options.peer_python, os.path.abspath(__file__), "--serve_peer", *map(str, _arguments(options))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # until its model is built, it would disturb what is measured here

    def measure(self, batch_size: int) -> dict[str, float]:
        """Returns what `measure` returns there."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch_size}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with exit code {self._process.wait()}; does it have transformers?")
        return dict(json.loads(line))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate("", timeout=60)


def serve_peer(options: argparse.Namespace) -> None:
    """Answers batch sizes on stdin with measurements on stdout."""
    run = peer_run(SHAPE)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(run, int(line), options)), flush=True)


def _arguments(options: argparse.Namespace) -> list[object]:
    return [
        *("--prompt_length", options.prompt_length, "--new_tokens", options.new_tokens, "--runs", options.runs),
        *("--shape", json.dumps(SHAPE)),
    ]


def machine() -> str:
    """Returns processor and number of cores."""
    names = [
        line.split(":", 1)[1].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt_length", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON that overrides keys of the shape")
    parser.add_argument("--compare", choices=["transformers"])
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter that has torch and transformers")
    parser.add_argument("--serve_peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    SHAPE.update(options.shape)
    if options.serve_peer:
        serve_peer(options)
        return

    run, weight_bytes = our_run(SHAPE)
    peer = Peer(options) if options.compare else None
    print(f"{machine()}; float32, {weight_bytes / 1e9:.2f} GB read a step; prompt {options.prompt_length}, ", end="")
    print(f"{options.new_tokens} new tokens, median of {options.runs} runs")
    print(
        f"{'batch':>5}  {'who':<12}  {'prefill tokens/s':>16}  {'decode tokens/s':>15}  {'ms a step':>9}  {'GB/s':>6}"
    )
    table = []
    for batch_size in options.batch_sizes:
        rows = {"ours": measure(run, batch_size, options)}
        if peer is not None:
            rows["transformers"] = peer.measure(batch_size)
        for who, row in rows.items():
            rates = f"{row['prefill_tokens_per_second']:>16.1f}  {row['decode_tokens_per_second']:>15.2f}"
            bandwidth = weight_bytes / row["decode_step_ms"] / 1e6
            print(f"{batch_size:>5}  {who:<12}  {rates}  {row['decode_step_ms']:>9.1f}  {bandwidth:>6.1f}")
        entry: dict[str, Any] = {"batch_size": batch_size, **rows}
        if peer is not None:
            entry["ratio"] = {
                kind: rows["ours"][key] / rows["transformers"][key]
                for kind, key in (("prefill", "prefill_tokens_per_second"), ("decode", "decode_tokens_per_second"))
            }
            print(f"       ours / transformers: prefill {entry['ratio']['prefill']:.2f}", end="")
            print(f", decode {entry['ratio']['decode']:.2f}")
        table.append(entry)
    if peer is not None:
        peer.close()
    summary = {"machine": machine(), "shape": SHAPE, "runs": options.runs, "results": table}
    print(json.dumps(summary | {"prompt_length": options.prompt_length, "new_tokens": options.new_tokens}))


if __name__ == "__main__":
    main()

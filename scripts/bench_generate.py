"""Measures prefill and decode of random models of a given shape, beside transformers if that is asked for.

    python scripts/bench_generate.py --batch_sizes 1 8 32 --weight_dtypes float32 bfloat16 int8
    python scripts/bench_generate.py --compare transformers --peer_python /path/to/python/with/torch
    python scripts/bench_generate.py --families qwen3 qwen3_moe --prompt_lengths 64 256 --json out.json --plot out.png
    python scripts/bench_generate.py --profile --weight_dtypes bfloat16
    python scripts/bench_generate.py --startup

All sides run in turn on the same shape: for every batch size and prompt length first ours in every type of weights,
then the peer's, each after one warm-up; the median of ``--runs`` runs is reported. The last columns say how near a
decode step is to two limits of the machine, measured in the same run: the time of a plain read of the weights, and the
time in which its multiply-adds could be done at most. The peer may live in another environment, since torch is no
dependency of this package. Families other than ``qwen3`` have the small shapes of `bench_lengths.py`. ``--profile``
prints where a decode step goes, and ``--startup`` how long a command takes to its first token. The last line of the
output is one JSON object.
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
from collections.abc import Callable, Sequence
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

WEIGHT_DTYPES = ("float32", "bfloat16", "int8")
# One run: prompts of equal length -> (seconds of prefill, seconds of each decode step).
Run = Callable[[list[list[int]], int], tuple[float, list[float]]]
_MISSING = "--plot needs matplotlib: pip install 'mindformers_ext[bench]'"


def shape_of(family: str) -> dict[str, Any]:
    """Returns the shape that is measured for a family."""
    if family == "qwen3":
        return SHAPE
    from bench_lengths import SHAPES  # type: ignore[import-not-found]

    return dict(SHAPES[family])


def random_model(family: str, weight_dtype: str, **shape: Any) -> Any:
    """Returns a model with random weights, which it keeps as a prediction does.

    Args:
        family: the type of the model.
        weight_dtype: see ``checkpoint.weight_dtype``.
        shape: keys of its config.json.
    """
    from mindformers_ext.models import transformer_config
    from mindformers_ext.models.gpt_model import GPTModel
    from mindformers_ext.runtime import setup_runtime

    setup_runtime("CPU")
    model = GPTModel(transformer_config({"model_type": family, **shape}))
    model.prepare_prediction(weight_dtype)
    model.init_weights(0)
    model.set_train(False)
    return model


def add_weight_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the option of scripts that measure one type of weights."""
    parser.add_argument("--weight_dtype", choices=WEIGHT_DTYPES, default="float32", help="what weights are kept as")


class Ours:
    """This package's model with random weights in one type.

    Attributes:
        weight_bytes: bytes of weights that a decode step reads; of experts all, of which it may read fewer.
        row_flops: floating-point operations of a row's products with them.
    """

    def __init__(self, family: str, weight_dtype: str) -> None:
        self.shape = shape_of(family)
        self.model = random_model(family, weight_dtype, **self.shape)
        embedding = self.model.embedding.table
        read_whole = self.shape.get("tie_word_embeddings", False)
        self.packed = [w for w in self.model.packed_weights() if w is not embedding or read_whole]
        self.weight_bytes = sum(weight.nbytes for weight in self.packed)
        self.row_flops = 2 * sum(weight.shape[0] * weight.shape[1] for weight in self.packed)

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[float]]:
        """See `Run`."""
        from mindspore import _no_grad

        from mindformers_ext.generate.forward import BatchForward
        from mindformers_ext.generate.model_call import ModelCall

        with _no_grad():
            batch = BatchForward(ModelCall(self.model), prompts, new_tokens, use_cache=True, chunk_size=512)
            started = time.perf_counter()
            scores = batch.prefill().whole()
            prefill = time.perf_counter() - started
            steps = []
            for _ in range(new_tokens - 1):
                started = time.perf_counter()
                scores = batch.step(scores.argmax(axis=1)).whole()
                steps.append(time.perf_counter() - started)
        return prefill, steps

    def read_seconds(self, runs: int) -> float:
        """Returns the seconds that a plain read of the same bytes takes, the median of ``runs``."""
        from mindformers_ext.ops.native.packed import read_bytes

        seconds = []
        for _ in range(runs):
            started = time.perf_counter()
            total = sum(read_bytes(weight) for weight in self.packed)
            seconds.append((time.perf_counter() - started) * self.weight_bytes / max(total, 1))
        return statistics.median(seconds)


def flops_per_second(runs: int) -> float:
    """Returns the floating-point operations a second that all threads reach at most, the median of ``runs``."""
    from mindformers_ext.ops.native.packed import multiply_adds

    rates = []
    for _ in range(runs):
        started = time.perf_counter()
        count = multiply_adds(1 << 24)
        rates.append(count / (time.perf_counter() - started))
    return statistics.median(rates)


def peer_run(shape: dict[str, Any], dtype: str) -> Run:
    """Returns the same run of transformers, with weights and arithmetic in ``float32`` or ``bfloat16``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval().to(getattr(torch, dtype))

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


def medians_in_turn(sides: Sequence[Callable[[], float]], runs: int) -> list[float]:
    """Returns the median of what each side measures; they take turns, after one run each that does not count."""
    measured = [[side() for side in sides] for _ in range(runs + 1)][1:]
    return [statistics.median(values) for values in zip(*measured, strict=True)]


def prompts_of(batch_size: int, length: int, vocab_size: int) -> list[list[int]]:
    """Returns token ids that are the same in every process."""
    return [[(row * 7919 + column * 104729 + 17) % vocab_size for column in range(length)] for row in range(batch_size)]


def measure(run: Run, batch_size: int, length: int, vocab_size: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns tokens/s of prefill and decode, and the median decode step in ms."""
    prompts = prompts_of(batch_size, length, vocab_size)
    run(prompts, 3)  # warm-up
    results = [run(prompts, options.new_tokens) for _ in range(options.runs)]
    prefill = statistics.median(seconds for seconds, _ in results)
    step = statistics.median(statistics.median(steps) for _, steps in results)
    return {
        "prefill_tokens_per_second": batch_size * length / prefill,
        "decode_tokens_per_second": batch_size / step,
        "decode_step_ms": step * 1e3,
    }


class Peer:
    """transformers in a process of its own, measured when it is asked."""

    def __init__(self, options: argparse.Namespace, dtype: str) -> None:
        command = [options.peer_python, os.path.abspath(__file__), "--serve_peer", dtype, *_arguments(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # until its model is built, it would disturb what is measured here

    def measure(self, batch_size: int, length: int) -> dict[str, float]:
        """Returns what `measure` returns there."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch_size} {length}\n")
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
    """Answers pairs of batch size and prompt length on stdin with measurements on stdout."""
    run = peer_run(SHAPE, options.serve_peer)
    print("{}", flush=True)
    for line in sys.stdin:
        batch_size, length = map(int, line.split())
        print(json.dumps(measure(run, batch_size, length, SHAPE["vocab_size"], options)), flush=True)


def _arguments(options: argparse.Namespace) -> list[str]:
    return ["--new_tokens", str(options.new_tokens), "--runs", str(options.runs), "--shape", json.dumps(SHAPE)]


def machine() -> str:
    """Returns processor and number of cores."""
    names = [
        line.split(":", 1)[1].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def versions() -> str:
    """Returns the versions that matter to a measurement, and what computes."""
    import mindspore

    from mindformers_ext import ops

    used = ", ".join(f"{kind}: {value}" for kind, value in ops.describe().items())
    return f"Python {platform.python_version()}, MindSpore {mindspore.__version__}; {used}"


def compare(family: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures a family in all types of weights and prints a line a measurement."""
    ours = {dtype: Ours(family, dtype) for dtype in options.weight_dtypes}
    wanted = options.peer_dtypes if options.compare and family == "qwen3" else []
    peers = {dtype: Peer(options, dtype) for dtype in wanted}
    entries = []
    for length in options.prompt_lengths:
        for batch_size in options.batch_sizes:
            rows = []
            for dtype, model in ours.items():
                row: dict[str, Any] = {"who": "ours", "dtype": dtype, "weight_bytes": model.weight_bytes}
                row |= measure(model.run, batch_size, length, model.shape["vocab_size"], options)
                if model.weight_bytes:
                    seconds = model.read_seconds(options.runs)
                    row["read_gb_per_second"] = model.weight_bytes / seconds / 1e9
                    row["share_of_memory_limit"] = seconds * 1e3 / row["decode_step_ms"]
                    row["gflops_limit"] = flops_per_second(options.runs) / 1e9
                    least_ms = batch_size * model.row_flops / row["gflops_limit"] / 1e6
                    row["share_of_arithmetic_limit"] = least_ms / row["decode_step_ms"]
                rows.append(row)
            rows += [
                {"who": "transformers", "dtype": dtype} | peer.measure(batch_size, length)
                for dtype, peer in peers.items()
            ]
            for row in rows:
                row |= {"family": family, "batch_size": batch_size, "prompt_length": length}
                print(table_line(row), flush=True)
            for line in ratio_lines(rows):
                print(line, flush=True)
            entries += rows
    for peer in peers.values():
        peer.close()
    return entries


HEADER = (
    f"{'family':<12}  {'prompt':>6}  {'batch':>5}  {'who':<12}  {'weights':<8}  {'prefill t/s':>11}  "
    f"{'decode t/s':>10}  {'ms a step':>9}  {'GB/s':>5}  {'of a plain read':>15}  {'of arithmetic':>13}"
)


def table_line(row: dict[str, Any]) -> str:
    """Returns the line of a measurement, in the columns of `HEADER`."""
    line = (
        f"{row['family']:<12}  {row['prompt_length']:>6}  {row['batch_size']:>5}  {row['who']:<12}  {row['dtype']:<8}  "
    )
    line += f"{row['prefill_tokens_per_second']:>11.1f}  {row['decode_tokens_per_second']:>10.2f}  "
    line += f"{row['decode_step_ms']:>9.1f}"
    if "share_of_memory_limit" in row:
        achieved = row["weight_bytes"] / row["decode_step_ms"] / 1e6
        line += f"  {achieved:>5.1f}  {row['share_of_memory_limit']:>15.0%}  {row['share_of_arithmetic_limit']:>13.0%}"
    return line


def ratio_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns one line for every type of ours: how many times the speed of the peer it has, in each of its types."""
    peers = [row for row in rows if row["who"] == "transformers"]
    lines = []
    for row in rows if peers else ():
        if row["who"] == "ours":
            ratios = [
                f"{peer['dtype']} {kind} x {row[f'{kind}_tokens_per_second'] / peer[f'{kind}_tokens_per_second']:.2f}"
                for peer in peers
                for kind in ("prefill", "decode")
            ]
            lines.append(f"    ours {row['dtype']} / transformers {', '.join(ratios)}")
    return lines


def profile(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints which operations a decode step consists of, and returns them."""
    from mindformers_ext import ops

    spent: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                spent.setdefault(name, []).append(time.perf_counter() - started)

        return call

    entries = []
    for dtype in options.weight_dtypes:
        model = Ours(options.families[0], dtype)
        for batch_size in options.batch_sizes:
            prompts = prompts_of(batch_size, options.prompt_lengths[0], model.shape["vocab_size"])
            model.run(prompts, 3)
            originals = {name: getattr(ops, name) for name in ops.__all__ if not isinstance(getattr(ops, name), type)}
            first_step: dict[str, int] = {}
            try:
                for name, function in originals.items():
                    setattr(ops, name, timed(name, function))
                model.run(prompts, 1)
                first_step = {name: len(times) for name, times in spent.items()}
                _, steps = model.run(prompts, options.new_tokens)
            finally:
                for name, function in originals.items():
                    setattr(ops, name, function)
            total = sum(steps) / len(steps) * 1e3
            rows: list[dict[str, Any]] = []
            for name, times in spent.items():
                own = times[2 * first_step.get(name, 0) :]  # without two prefills
                if own:
                    rows.append({"operation": name, "calls": len(own) / len(steps), "ms": sum(own) / len(steps) * 1e3})
            spent.clear()
            rows.sort(key=lambda row: -row["ms"])
            rest = total - sum(row["ms"] for row in rows)
            rows.append({"operation": "between them", "calls": 1, "ms": rest})
            print(f"\n{dtype}, batch {batch_size}: {total:.2f} ms a step\n")
            print("| operation | calls | ms | share |\n|---|---:|---:|---:|")
            for row in rows:
                print(f"| {row['operation']} | {row['calls']:.0f} | {row['ms']:.2f} | {row['ms'] / total:.1%} |")
            entries.append({"dtype": dtype, "batch_size": batch_size, "step_ms": total, "operations": rows})
    return entries


def plot(entries: Sequence[dict[str, Any]], path: str) -> None:
    """Draws tokens/s, and the share of the memory's limit, against the batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, share) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for key in dict.fromkeys((e["family"], e["who"], e["dtype"], e["prompt_length"]) for e in entries):
        line = [e for e in entries if (e["family"], e["who"], e["dtype"], e["prompt_length"]) == key]
        sizes, label = [e["batch_size"] for e in line], "{}, {} {}, prompt {}".format(*key)
        style = "-o" if key[1] == "ours" else "--x"
        speed.plot(sizes, [e["decode_tokens_per_second"] for e in line], style, label=label)
        if all("share_of_memory_limit" in e for e in line):
            share.plot(sizes, [e["share_of_memory_limit"] for e in line], style, label=label)
    for axes, name in ((speed, "decode, tokens/s"), (share, "plain read of the weights / decode step")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch size")
        axes.set_ylabel(name)
        axes.grid(True, alpha=0.3)
    speed.set_yscale("log", base=2)
    speed.legend(fontsize=7)
    figure.suptitle(machine(), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["qwen3"])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt_lengths", type=int, nargs="+", default=[64])
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--weight_dtypes", nargs="+", choices=WEIGHT_DTYPES, default=["bfloat16"])
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON that overrides keys of the shape of qwen3")
    parser.add_argument("--compare", choices=["transformers"])
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter that has torch and transformers")
    parser.add_argument("--peer_dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--profile", action="store_true", help="print the operations of a decode step instead")
    parser.add_argument(
        "--startup", action="store_true", help="print the seconds from a command to its first token instead"
    )
    parser.add_argument("--json", help="file to write the results to as well")
    parser.add_argument("--plot", help="PNG file to draw the results into")
    parser.add_argument("--serve_peer", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    SHAPE.update(options.shape)
    if options.serve_peer:
        serve_peer(options)
        return
    if options.plot and (options.profile or options.startup):
        raise SystemExit("--plot draws speed against batch size; leave it out with --profile and --startup")
    if options.plot:
        import importlib.util

        if importlib.util.find_spec("matplotlib") is None:
            raise SystemExit(_MISSING)
    print(f"{machine()}; {versions()}")
    summary: dict[str, Any] = {"machine": machine(), "versions": versions(), "shape": SHAPE, "runs": options.runs}
    summary["new_tokens"] = options.new_tokens
    if options.startup:
        from bench_startup import startup  # type: ignore[import-not-found]

        summary["startup"] = startup(SHAPE)
    elif options.profile:
        summary["profile"] = profile(options)
    else:
        print(f"{options.new_tokens} new tokens, median of {options.runs} runs\n{HEADER}")
        summary["results"] = [entry for family in options.families for entry in compare(family, options)]
        if options.plot:
            plot(summary["results"], options.plot)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

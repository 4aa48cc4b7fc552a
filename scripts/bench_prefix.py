"""Measures prompts that share a header, computed once and for each prompt, on a random model of the Qwen3-0.6B shape.

    python scripts/bench_prefix.py --prompts 100 --header 512 --batch_size 8

Both ways answer the same prompts, one run after the other, and their ids are compared. The last line of the output is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
from bench_generate import SHAPE, add_weight_dtype, machine, random_model  # type: ignore[import-not-found]


def make_prompts(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Returns a header with a rest of ``--rest`` tokens, give or take a quarter."""
    generator = np.random.default_rng(0)
    header = generator.integers(0, vocab_size, options.header).tolist()
    around = options.rest // 4
    lengths = generator.integers(options.rest - around, options.rest + around + 1, options.prompts)
    return [header + generator.integers(0, vocab_size, length).tolist() for length in lengths]


def timed(model: Any, prompts: list[list[int]], options: argparse.Namespace, share: bool) -> tuple[float, Any, Any]:
    """Returns seconds, ids and counts of all prompts."""
    from mindformers_ext.generate import GenerationConfig, GenerationStats, PrefixCache, generate_rows

    stats = GenerationStats()
    prefixes = PrefixCache(model, stats) if share else None
    config = GenerationConfig(max_new_tokens=options.new_tokens)
    started = time.perf_counter()
    answers = []
    for start in range(0, len(prompts), options.batch_size):
        rows = generate_rows(model, prompts[start : start + options.batch_size], config, stats, prefixes=prefixes)
        answers += [row.token_ids for row in rows]
    return time.perf_counter() - started, answers, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--header", type=int, default=512)
    parser.add_argument("--rest", type=int, default=16)
    parser.add_argument("--new_tokens", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--model", type=json.loads, default={"model_type": "qwen3"}, help="JSON of the model's keys")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON that overrides keys of the shape")
    add_weight_dtype(parser)
    options = parser.parse_args()

    shape = SHAPE | options.shape
    keys = {"model_type": "qwen3", **options.model, **shape}
    model = random_model(keys.pop("model_type"), options.weight_dtype, **keys)
    prompts = make_prompts(options, shape["vocab_size"])
    timed(model, prompts[:2], options, False)  # warm-up
    whole, shared = [], []
    for _ in range(options.runs):
        seconds, shared_ids, stats = timed(model, prompts, options, True)
        shared.append(seconds)
        seconds, whole_ids, _ = timed(model, prompts, options, False)
        whole.append(seconds)
    ratio = statistics.median(whole) / statistics.median(shared)
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}; {options.weight_dtype}, {len(prompts)} prompts of ", end="")
    print(f"{options.header} + {options.rest} tokens, {options.new_tokens} new ones, batches of {options.batch_size}")
    print(f"each prompt as a whole  {statistics.median(whole):>8.1f} s, {stats.prefill_tokens} prompt tokens computed")
    computed = stats.prefill_tokens - stats.shared_tokens + stats.prefix_tokens
    print(f"the header once         {statistics.median(shared):>8.1f} s, {computed} prompt tokens computed, ", end="")
    print(f"{stats.prefix_bytes / 1e6:.0f} MB kept")
    print(f"ratio {ratio:.2f}; ids {'equal' if shared_ids == whole_ids else 'DIFFER'}")
    shown = ("prompts", "header", "rest", "new_tokens", "batch_size", "runs", "weight_dtype")
    result = {"whole_seconds": whole, "shared_seconds": shared, "ratio": ratio, "same_ids": shared_ids == whole_ids}
    print(json.dumps({"machine": machine(), "shape": shape} | {key: getattr(options, key) for key in shown} | result))
    if shared_ids != whole_ids:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

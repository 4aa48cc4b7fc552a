"""Measures a step of beam search beside a greedy step with as many rows, on a random model of the Qwen3-0.6B shape.

    python scripts/bench_beams.py --batch_sizes 4 8 --num_beams 2 4 8

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from bench_generate import (  # type: ignore[import-not-found]
    SHAPE,
    add_weight_dtype,
    machine,
    medians_in_turn,
    prompts_of,
    random_model,
)


def step_ms(model: Any, prompts: list[list[int]], options: argparse.Namespace, num_beams: int) -> float:
    """Returns the milliseconds of a decode step; prefill does not count."""
    from mindformers_ext.generate import GenerationConfig, GenerationStats, generate_rows

    config = GenerationConfig(max_new_tokens=options.new_tokens, num_beams=num_beams)
    stats = GenerationStats()
    generate_rows(model, prompts, config, stats)
    return stats.decode_seconds / (options.new_tokens - 1) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--num_beams", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--prompt_length", type=int, default=16)
    parser.add_argument("--new_tokens", type=int, default=9)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON that overrides keys of the shape")
    add_weight_dtype(parser)
    options = parser.parse_args()

    shape = SHAPE | options.shape
    model = random_model("qwen3", options.weight_dtype, **shape)
    print(f"{machine()}; {options.weight_dtype}, prompt {options.prompt_length}, median of {options.runs} runs")
    print(f"{'batch':>5}  {'beams':>5}  {'beam step ms':>12}  {'greedy step ms':>14}  {'ratio':>5}")
    results = []
    for batch in options.batch_sizes:
        for beams in options.num_beams:
            rows = prompts_of(batch * beams, options.prompt_length, shape["vocab_size"])
            sides = [partial(step_ms, model, rows, options, 1), partial(step_ms, model, rows[:batch], options, beams)]
            greedy, beam = medians_in_turn(sides, options.runs)
            results.append({"batch_size": batch, "num_beams": beams, "beam_ms": beam, "greedy_ms": greedy})
            print(f"{batch:>5}  {beams:>5}  {beam:>12.1f}  {greedy:>14.1f}  {beam / greedy:>5.2f}", flush=True)
    summary = {"machine": machine(), "weight_dtype": options.weight_dtype, "runs": options.runs, "results": results}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

"""Measures the scoring of choices with shared prompts and without, on a random model of the Qwen3-0.6B shape.

    python scripts/bench_scoring.py --batch_sizes 1 8 --choices 4 --prompt_length 200

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
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


def seconds(model: Any, groups: list[Any], share_prefix: bool) -> float:
    """Returns the seconds that the scoring of a batch takes."""
    from mindformers_ext.generate import score_groups

    started = time.perf_counter()
    score_groups(model, groups, share_prefix=share_prefix)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8], help="prompts that are scored together")
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--prompt_length", type=int, default=200)
    parser.add_argument("--choice_length", type=int, default=5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON that overrides keys of the shape")
    add_weight_dtype(parser)
    options = parser.parse_args()

    shape = SHAPE | options.shape
    model = random_model("qwen3", options.weight_dtype, **shape)
    lengths = f"prompt {options.prompt_length}, {options.choices} choices of {options.choice_length} tokens"
    print(f"{machine()}; {options.weight_dtype}, {lengths}, median of {options.runs} runs")
    print(f"{'batch':>5}  {'shared s':>9}  {'apart s':>9}  {'ratio':>5}")
    results = []
    for batch in options.batch_sizes:
        prompts = prompts_of(batch, options.prompt_length, shape["vocab_size"])
        continuations = prompts_of(batch * options.choices, options.choice_length, shape["vocab_size"])
        groups = [
            [(prompt, continuations[options.choices * row + choice]) for choice in range(options.choices)]
            for row, prompt in enumerate(prompts)
        ]
        sides = [partial(seconds, model, groups, share) for share in (True, False)]
        shared, apart = medians_in_turn(sides, options.runs)
        results.append({"batch_size": batch, "shared_seconds": shared, "apart_seconds": apart})
        print(f"{batch:>5}  {shared:>9.3f}  {apart:>9.3f}  {apart / shared:>5.2f}", flush=True)
    summary = {"machine": machine(), "weight_dtype": options.weight_dtype, "runs": options.runs, "lengths": lengths}
    print(json.dumps(summary | {"results": results}))


if __name__ == "__main__":
    main()

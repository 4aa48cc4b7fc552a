"""Measures products with packed weights for several numbers of rows, beside what the processor and its memory can do.

    python scripts/bench_products.py --rows 1 2 4 8 12 32 64 256 --weight_dtypes bfloat16 int8

``--weights`` matrices take turns, so that none is in a cache. The sides take turns too; each figure is the median of
``--runs`` runs. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from bench_generate import (  # type: ignore[import-not-found]
    WEIGHT_DTYPES,
    flops_per_second,
    machine,
    medians_in_turn,
    versions,
)


def timed(run: Callable[[Any], Any], weights: Sequence[Any]) -> float:
    """Returns the seconds in which ``run`` is done with all weights."""
    started = time.perf_counter()
    for weight in weights:
        run(weight)
    return time.perf_counter() - started


def measure(dtype: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns GFLOP/s and GB/s for each number of rows, with those of a plain read and of multiply-adds alone."""
    from mindspore import Tensor

    from mindformers_ext.ops.native.packed import PackedWeight, product, read_bytes

    random = np.random.default_rng(0)
    shape = (options.outputs, options.inputs)
    weights = [PackedWeight(random.standard_normal(shape, np.float32), dtype) for _ in range(options.weights)]
    inputs = [Tensor.from_numpy(random.standard_normal((rows, shape[1]), np.float32)) for rows in options.rows]
    sides = [partial(timed, partial(product, x), weights) for x in inputs]
    read, limit, *seconds = medians_in_turn(
        [partial(timed, read_bytes, weights), partial(flops_per_second, 1), *sides], options.runs
    )
    size = sum(weight.nbytes for weight in weights)
    flops = 2 * options.weights * shape[0] * shape[1]
    return [
        {
            "rows": rows,
            "gflops": rows * flops / spent / 1e9,
            "gb_per_second": size / spent / 1e9,
            "gflops_limit": limit / 1e9,
            "read_gb_per_second": size / read / 1e9,
        }
        for rows, spent in zip(options.rows, seconds, strict=True)
    ]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 32, 64, 256])
    parser.add_argument("--weight_dtypes", nargs="+", choices=WEIGHT_DTYPES, default=["bfloat16", "int8"])
    parser.add_argument("--outputs", type=int, default=6144)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--weights", type=int, default=20, help="matrices of that size")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()

    print(f"{machine()}; {versions()}")
    print(f"{options.weights} weights of {options.outputs} x {options.inputs}, median of {options.runs} runs")
    results = {}
    for dtype in options.weight_dtypes:
        found = results[dtype] = measure(dtype, options)
        limits = f"at most {found[0]['gflops_limit']:.0f} GFLOP/s, {found[0]['read_gb_per_second']:.1f} GB/s"
        print(f"{dtype}: {limits}\n rows  GFLOP/s   GB/s")
        for row in found:
            print(f"{row['rows']:>5}  {row['gflops']:>7.0f}  {row['gb_per_second']:>5.1f}", flush=True)
    print(json.dumps({"machine": machine(), **vars(options), "results": results}))


if __name__ == "__main__":
    main()

"""Times small sums over the ranks of a job on CPUs, beside MindSpore's own.

    scripts/msrun_launcher.sh "scripts/bench_all_reduce.py --bytes 4 4096 32768" 2

Prints the median of one call in microseconds, as rank 0 sees it. The two alternate, as times move with the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from mindspore import Tensor, ops

from mindformers_ext.config.schema import ParallelismSection
from mindformers_ext.parallel import ParallelDims
from mindformers_ext.parallel.groups import init_parallel
from mindformers_ext.runtime import rank, setup_runtime, world_size

_ROUNDS = 5


def microseconds(call: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> list[float]:
    """Returns what each of ``calls`` calls took."""
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        call(x)
        found.append(1e6 * (time.perf_counter() - start))
    return found


def main() -> int:
    """Runs the command on one rank; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, 4096, 32768], help="sizes, multiples of 4")
    parser.add_argument("--calls", type=int, default=200, help="of each in a round, of which there are five")
    arguments = parser.parse_args()
    if world_size() < 2:
        parser.error("one process has nobody to sum with; start it with scripts/msrun_launcher.sh")
    setup_runtime(seed=1, deterministic=False)
    world = init_parallel(ParallelDims.from_config(ParallelismSection(), world_size())).world
    sums = {"ours": world.all_reduce, "MindSpore": ops.AllReduce()}
    for size in arguments.bytes:
        x = Tensor.from_numpy(np.ones(size // 4, np.float32))
        times: dict[str, list[float]] = {name: [] for name in sums}
        for _ in range(_ROUNDS):
            for name, call in sums.items():
                times[name] += microseconds(call, x, arguments.calls)
        if rank() == 0:
            shown = ", ".join(f"{name} {statistics.median(found):.0f} us" for name, found in times.items())
            print(f"{size} bytes, {world.size} ranks: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Measures records with answers of different lengths, with and without refill, on a random model.

    python scripts/bench_refill.py
    python scripts/bench_refill.py --records 64 --batch_size 8 --lengths uniform log-uniform

Without refill, batches are answered one after the other, in the order of the records; rows that have ended leave their
batch once they are half of it. Both sides answer the same prompts with the same tokens, and the lengths of the answers
are drawn beforehand: ``log-uniform`` is like answers of a model, of which most are short and a few are long. A plug-in
ends each row at its length, which it reads from the row's first token. The sides take turns; each time is the median of
``--runs`` runs after a warm-up. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
from bench_generate import (  # type: ignore[import-not-found]
    SHAPE,
    add_weight_dtype,
    machine,
    prompts_of,
    random_model,
)


def draw_lengths(kind: str, count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Returns numbers of new tokens from ``shortest`` to ``longest``."""
    random = np.random.default_rng(seed)
    if kind == "uniform":
        return random.integers(shortest, longest + 1, count).tolist()
    drawn = np.exp(random.uniform(np.log(shortest), np.log(longest + 1), count))
    return np.minimum(drawn.astype(int), longest).tolist()


def prompts_with_lengths(lengths: list[int], prompt_length: int, vocab_size: int) -> list[list[int]]:
    """Returns prompts whose first token is the number of new tokens, and the others none that is a pad."""
    prompts = prompts_of(len(lengths), prompt_length, vocab_size - 1)
    return [[length, *(token + 1 for token in prompt[1:])] for length, prompt in zip(lengths, prompts, strict=True)]


class Lengths:
    """Plug-in that ends each row at its number of new tokens."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length

    def __call__(self, input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """See `mindformers_ext.generate.StoppingCriteria`; pads are 0, and no token of a row is."""
        real = input_ids != 0
        first = real.argmax(axis=1)
        new = input_ids.shape[1] - first - self._prompt_length
        return new >= input_ids[np.arange(len(input_ids)), first]


class Side:
    """One way to answer the prompts."""

    def __init__(self, model: Any, prompts: list[list[int]], config: Any, batch_size: int) -> None:
        self._model, self._prompts, self._config, self._size = model, prompts, config, batch_size

    def batches(self, stats: Any) -> list[list[int]]:
        """Batches one after the other."""
        from mindformers_ext.generate import generate_rows

        found = []
        for start in range(0, len(self._prompts), self._size):
            found += generate_rows(self._model, self._prompts[start : start + self._size], self._config, stats)
        return [row.token_ids for row in found]

    def refill(self, stats: Any) -> list[list[int]]:
        """A record that is done is replaced by the next."""
        from mindformers_ext.generate.refill import RefilledBatch

        batch = RefilledBatch(self._model, self._config, self._size, stats)
        found: dict[int, list[int]] = {}
        begun = 0
        while len(found) < len(self._prompts):
            new = range(begun, min(begun + batch.room, len(self._prompts)))
            begun += len(new)
            more = begun < len(self._prompts)
            for index, (row,) in batch.advance([self._prompts[i] for i in new], list(new), more_to_come=more):
                found[index] = row.token_ids
        return [found[index] for index in sorted(found)]


def measure(model: Any, lengths: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Returns seconds, forwards and their split of both sides, and the ratio of the times."""
    from mindformers_ext.generate import GenerationConfig, GenerationStats

    prompts = prompts_with_lengths(lengths, options.prompt_length, model.config.vocab_size)
    config = GenerationConfig(
        max_new_tokens=options.longest,
        pad_token_id=0,
        suppress_tokens=[0],
        stopping_criteria=[Lengths(options.prompt_length)],
    )
    side = Side(model, prompts, config, options.batch_size)
    Side(model, prompts[:2], config, 2).batches(GenerationStats())  # warm-up
    seconds: dict[str, list[float]] = {"batches": [], "refill": []}
    last: dict[str, Any] = {}
    for _ in range(options.runs):
        answers = {}
        for name, run in (("batches", side.batches), ("refill", side.refill)):
            last[name] = GenerationStats()
            started = time.perf_counter()
            answers[name] = run(last[name])
            seconds[name].append(time.perf_counter() - started)
        if answers["batches"] != answers["refill"] or [len(ids) for ids in answers["refill"]] != lengths:
            raise SystemExit("the answers differ")
    sides = {
        name: {
            "seconds": statistics.median(values),
            "prefill_seconds": last[name].prefill_seconds,
            "decode_seconds": last[name].decode_seconds,
            "forwards": last[name].forwards,
            "cache_bytes": last[name].cache_bytes,
        }
        for name, values in seconds.items()
    }
    return {
        "mean_length": statistics.mean(lengths),
        **sides,
        "ratio": sides["batches"]["seconds"] / sides["refill"]["seconds"],
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", choices=["uniform", "log-uniform"], default=["uniform", "log-uniform"])
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=8, help="fewest new tokens of a record")
    parser.add_argument("--longest", type=int, default=256, help="most new tokens of a record")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    add_weight_dtype(parser)
    options = parser.parse_args()

    shape = SHAPE | {"num_hidden_layers": options.layers}
    model = random_model("qwen3", options.weight_dtype, **shape)
    print(f"{machine()}; {options.weight_dtype}, {options.layers} layers, batch {options.batch_size}, ", end="")
    print(f"median of {options.runs} runs; ", end="")
    print(
        f"{options.records} records, prompt {options.prompt_length}, {options.shortest} to {options.longest} new tokens"
    )
    print("lengths      mean  how      seconds  prefill  decode  forwards  ratio")
    results = {}
    for kind in options.lengths:
        lengths = draw_lengths(kind, options.records, options.shortest, options.longest, options.seed)
        found = results[kind] = measure(model, lengths, options)
        for name in ("batches", "refill"):
            side = found[name]
            ratio = f"{found['ratio']:7.2f}" if name == "refill" else ""
            print(
                f"{kind:<11}  {found['mean_length']:4.0f}  {name:<7}  {side['seconds']:7.1f}  "
                f"{side['prefill_seconds']:7.1f}  {side['decode_seconds']:6.1f}  {side['forwards']:8}{ratio}",
                flush=True,
            )
    print(json.dumps({"machine": machine(), **vars(options), "results": results}))


if __name__ == "__main__":
    main()

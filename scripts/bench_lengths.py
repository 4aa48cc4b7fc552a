"""Measures what a decode step costs after prompts of several lengths, for every family at a small shape.

    python scripts/bench_lengths.py
    python scripts/bench_lengths.py --families qwen3 deepseek_v4 --prompt_lengths 64 2048 --batch_sizes 1

The weights are random and no files are needed. A step's time is the median over ``--runs`` runs of ``--steps`` steps
each, all after one prefill; the bytes of the cache are those at the end. It prints a Markdown table; its last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from bench_generate import add_weight_dtype, machine, prompts_of, random_model  # type: ignore[import-not-found]

COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
DENSE = COMMON | {"intermediate_size": 1536}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": DENSE | EXPERTS | {"norm_topk_prob": True},
    "qwen3_5": DENSE | DELTA_NET,
    "qwen3_5_moe": COMMON | DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 256},
    "deepseek_v3": {key: value for key, value in DENSE.items() if key not in ("head_dim", "num_key_value_heads")}
    | {
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v4": COMMON
    | {
        "num_key_value_heads": 1,
        "q_lora_rank": 256,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "layer_types": ["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe"] + ["moe"] * 7,
        "sliding_window": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 64,
        "partial_rotary_factor": 0.25,
    },
}
# Most prompt tokens of one forward.
_CHUNK = 512


def measure(model: Any, batch_size: int, prompt_length: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns the milliseconds of a decode step, and the bytes of the cache for each token in it."""
    from mindspore import Tensor, _no_grad

    prompts = np.array(prompts_of(batch_size, prompt_length, COMMON["vocab_size"]), np.int32)
    total = prompt_length + options.steps * (options.runs + 1)
    cache = model.new_cache(batch_size, total)
    runs = []
    with _no_grad():
        for start in range(0, prompt_length, _CHUNK):
            piece = np.ascontiguousarray(prompts[:, start : start + _CHUNK])
            logits = model(Tensor(piece), past_key_values=cache, logits_to_keep=1)["logits"]
        for _ in range(options.runs + 1):  # the first is a warm-up
            started = time.perf_counter()
            for _ in range(options.steps):
                tokens = logits.asnumpy()[:, -1].argmax(axis=1).astype(np.int32)[:, None]
                logits = model(Tensor(tokens), past_key_values=cache, logits_to_keep=1)["logits"]
            logits.asnumpy()
            runs.append((time.perf_counter() - started) / options.steps * 1e3)
    held = sum(state.nbytes for state in cache)
    return {"step_ms": statistics.median(runs[1:]), "cache_bytes_per_token": held / (batch_size * total)}


def header(lengths: Sequence[int]) -> str:
    """Returns the first two lines of the table."""
    first, *others = lengths
    costs = [f"step after {first}, ms", *(f"after {length}" for length in others)]
    cells = ["family", "batch", *costs, *(f"cache after {length}, bytes a token" for length in lengths)]
    return f"| {' | '.join(cells)} |\n|---|{'---:|' * (len(cells) - 1)}"


def table_row(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the line of a family and a batch size from its results, one a length."""
    first, *others = (row["step_ms"] for row in rows)
    costs = [f"{first:.2f}", *(f"x {step / first:.2f}" for step in others)]
    held = [f"{row['cache_bytes_per_token']:,.0f}" for row in rows]
    return f"| {' | '.join([rows[0]['family'], str(rows[0]['batch_size']), *costs, *held])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt_lengths", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a run")
    parser.add_argument("--runs", type=int, default=5)
    add_weight_dtype(parser)
    options = parser.parse_args()

    print(f"{machine()}; {options.weight_dtype}, hidden size {COMMON['hidden_size']}, ", end="")
    print(f"{COMMON['num_hidden_layers']} layers, median of {options.runs} runs of {options.steps} steps\n")
    print(header(options.prompt_lengths), flush=True)
    results: list[dict[str, Any]] = []
    for family in options.families:
        model = random_model(family, options.weight_dtype, **SHAPES[family])
        for batch_size in options.batch_sizes:
            rows: list[dict[str, Any]] = [
                {"family": family, "batch_size": batch_size, "prompt_length": length}
                | measure(model, batch_size, length, options)
                for length in options.prompt_lengths
            ]
            results += [row | {"relative": row["step_ms"] / rows[0]["step_ms"]} for row in rows]
            print(table_row(rows), flush=True)
    shapes = {family: SHAPES[family] for family in options.families}
    print()
    summary = {"machine": machine(), "weight_dtype": options.weight_dtype, "runs": options.runs, "shapes": shapes}
    print(json.dumps(summary | {"results": results}))


if __name__ == "__main__":
    main()

"""Measures decoding with prompt lookup and without, on a task of extraction, with a model of the Qwen3-0.6B shape.

    python scripts/bench_lookup.py --spans 6 --span 64 --lookup 10

A prompt has several records, each a name and a text of random tokens, and asks for one of them by its name; the answer
is that text, word for word. Random weights do not copy, so two of the layers are given weights that do, as trained
models do it ("induction heads", Olsson et al., arXiv 2209.11895): in the first, each token notes the one before it; in
the second, it looks for the token that noted what it is itself, and predicts that token. All other weights are random,
and what the other layers add is small, but they cost what they always cost. Both ways answer the same prompts, one run
after the other, and their ids are compared. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

import numpy as np
from bench_generate import SHAPE, add_weight_dtype, machine, random_model  # type: ignore[import-not-found]

_CODE = 384  # values of a token's code; 3 heads carry them
_CONSTANT = 2 * _CODE  # where every token has the same value
_THETA = 1e6


def make_copier(model: Any, generator: np.random.Generator) -> None:
    """Gives a model with random weights two layers that copy."""
    config = model.config
    dim, groups, hidden = config.kv_channels, config.num_query_groups, config.hidden_size
    per_group = config.num_attention_heads // groups
    table = np.zeros((config.vocab_size, hidden), np.float32)
    table[:, :_CODE] = generator.choice(np.array([-1, 1], np.float32), (config.vocab_size, _CODE))
    table[:, _CONSTANT] = 8
    model.set_weight("embedding.word_embeddings.weight", table)
    for layer in range(config.num_layers):
        for name in ("self_attention.linear_proj", "mlp.linear_fc2"):
            weight = f"decoder.layers.{layer}.{name}.weight"
            model.set_weight(weight, model.weight(weight) * np.float32(0.01))

    half = dim // 2
    frequencies = _THETA ** (-np.arange(half) / half)
    fast, slow = np.arange(8), np.arange(half * 5 // 8, half)
    projection = generator.standard_normal((2 * len(slow), _CODE)).astype(np.float32)
    for layer, source, gain in ((0, _CODE, 1.0), (1, 0, 4.0)):
        qkv = np.zeros((groups, per_group + 2, dim, hidden), np.float32)
        out = np.zeros((hidden, groups, per_group, dim), np.float32)
        heads = _CODE // dim
        for head in range(heads):
            part = slice(head * dim, (head + 1) * dim)
            query, key, value = qkv[head, 0], qkv[head, per_group], qkv[head, per_group + 1]
            if layer == 0:  # constants that fit best where the query is one place behind the key
                query[fast, _CONSTANT] = 1
                key[fast, _CONSTANT], key[half + fast, _CONSTANT] = np.cos(frequencies[fast]), np.sin(frequencies[fast])
            else:  # what a token is, against what stood before the other; slow frequencies hardly see places
                places = np.concatenate((slow, half + slow))
                query[places, :_CODE], key[places, _CODE : 2 * _CODE] = projection, projection
            value[:, part] = np.eye(dim)
            target = slice(source + head * dim, source + (head + 1) * dim)
            out[target, head, 0] = np.eye(dim) * gain
        prefix = f"decoder.layers.{layer}.self_attention"
        model.set_weight(f"{prefix}.linear_qkv.weight", qkv.reshape(-1, hidden))
        model.set_weight(f"{prefix}.linear_proj.weight", out.reshape(hidden, -1))
        for norm in ("q_layernorm", "k_layernorm"):
            model.set_weight(f"{prefix}.{norm}.weight", np.full(dim, 3, np.float32))


def make_prompts(options: argparse.Namespace, vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts and the texts that they ask for; id 0 is before a record and after it."""
    prompts, texts = [], []
    for row in range(options.prompts):
        shape = (options.spans, options.span + 1)
        ids = np.random.default_rng(row + 1).choice(vocab_size - 1, shape, replace=False) + 1
        records = [[*record, 0] for record in ids.tolist()]
        wanted = records[row % options.spans]
        prompts.append([0, *(token for record in records for token in record), wanted[0]])
        texts.append(wanted[1:])
    return prompts, texts


def timed(model: Any, prompts: list[list[int]], options: argparse.Namespace, lookup: int | None) -> tuple[Any, Any]:
    """Returns the ids of all answers and the counts of the runs."""
    from mindformers_ext.generate import GenerationConfig, GenerationStats, generate_rows

    stats = GenerationStats()
    config = GenerationConfig(max_new_tokens=options.span + 1, eos_token_id=0, prompt_lookup_num_tokens=lookup)
    answers = []
    for start in range(0, len(prompts), options.batch_size):
        rows = generate_rows(model, prompts[start : start + options.batch_size], config, stats)
        answers += [row.token_ids for row in rows]
    return answers, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--spans", type=int, default=2, help="records of a prompt")
    parser.add_argument("--span", type=int, default=63, help="tokens of a record's text")
    parser.add_argument("--lookup", type=int, default=10, help="prompt_lookup_num_tokens")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON that overrides keys of the shape")
    add_weight_dtype(parser)
    options = parser.parse_args()

    shape = SHAPE | {"rope_theta": _THETA} | options.shape
    model = random_model("qwen3", options.weight_dtype, **shape)
    make_copier(model, np.random.default_rng(0))
    prompts, texts = make_prompts(options, shape["vocab_size"])
    timed(model, prompts[: options.batch_size], options, 2)  # warm-up
    plain, ahead = [], []
    for _ in range(options.runs):
        ahead_ids, drafted = timed(model, prompts, options, options.lookup)
        ahead.append(drafted)
        plain_ids, steps = timed(model, prompts, options, None)
        plain.append(steps)
    right = sum(ids == text for ids, text in zip(plain_ids, texts, strict=True))
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}; {options.weight_dtype}, ", end="")
    print(f"batches of {options.batch_size}, prompts of {len(prompts[0])} tokens, answers of {len(texts[0])}; ", end="")
    print(f"{right} of {len(texts)} answers are the text")
    print(f"{'':<14}  {'forwards':>8}  {'decode s':>8}  {'with prefill':>12}")
    figures = {}
    for name, runs in (("without", plain), ("prompt lookup", ahead)):
        decode = statistics.median(run.decode_seconds for run in runs)
        wall = decode + statistics.median(run.prefill_seconds for run in runs)
        figures[name] = {"forwards": runs[0].forwards, "decode_seconds": decode, "seconds": wall}
        print(f"{name:<14}  {runs[0].forwards:>8}  {decode:>8.2f}  {wall:>12.2f}")
    same = ahead_ids == plain_ids
    ratios = {key: figures["without"][key] / figures["prompt lookup"][key] for key in ("decode_seconds", "seconds")}
    print(f"{drafted.accepted_tokens} of {drafted.drafted_tokens} drafted tokens were chosen; ", end="")
    print(f"ratio of decode {ratios['decode_seconds']:.2f}, with prefill {ratios['seconds']:.2f}; ", end="")
    print(f"ids {'equal' if same else 'DIFFER'}")
    keys = ("prompts", "spans", "span", "lookup", "batch_size", "runs", "weight_dtype")
    result = {"results": figures, "ratios": ratios, "same_ids": same, "right_answers": right}
    print(json.dumps({"machine": machine(), "shape": shape} | {key: getattr(options, key) for key in keys} | result))
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

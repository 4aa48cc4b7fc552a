"""Compares predictions with narrow weights with those of float32 ones: greedy answers, and the likelihood of texts.

    python scripts/check_weight_dtypes.py
    python scripts/check_weight_dtypes.py path/to/model --prompts prompts.jsonl --texts facts.jsonl --num_texts 200

Prompts are records with ``instruction``, texts records with ``prompt`` and ``response``; both are those of the
quickstart unless others are named. Greedy agreement is the share of answers with the same ids, and of ids up to the
first that differs; the nll is the mean of the response's ids. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

QUICKSTART = pathlib.Path(__file__).resolve().parents[1] / "configs" / "quickstart"
DTYPES = ("float32", "bfloat16", "int8")


def load(folder: pathlib.Path, weight_dtype: str) -> Any:
    """Returns the model of a checkpoint with its weights in one type."""
    from mindformers_ext.checkpoint import load_weights
    from mindformers_ext.models import transformer_config
    from mindformers_ext.models.gpt_model import GPTModel

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = GPTModel(transformer_config({}, config))
    model.prepare_prediction(weight_dtype)
    load_weights(folder, model.weight_layout(), model.set_weight, takes_bits=model.takes_bits)
    model.set_train(False)
    return model


def answers(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, eos: Sequence[int]) -> list[list[int]]:
    """Returns the greedy ids that follow each prompt."""
    from mindformers_ext.generate import GenerationConfig, generate_rows

    config = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=list(eos) or None)
    return [row.token_ids for row in generate_rows(model, prompts, config)]


def response_nll(model: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> np.ndarray:
    """Returns the negative log likelihood of every id of the responses, given what stands before it."""
    from mindspore import Tensor, _no_grad

    values = []
    with _no_grad():
        for prompt, response in texts:
            ids = np.array([[*prompt, *response]], np.int32)
            logits = (
                model(Tensor(ids[:, :-1].copy()), logits_to_keep=len(response))["logits"]
                .asnumpy()[0]
                .astype(np.float64)
            )
            top = logits.max(-1)
            totals = np.log(np.exp(logits - top[:, None]).sum(-1)) + top
            values.append(totals - logits[np.arange(len(response)), list(response)])
    return np.concatenate(values)


def agreement(ids: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Returns the share of answers that are equal, and of ids that stand before the first difference."""
    same = kept = total = 0
    for one, other in zip(ids, expected, strict=True):
        same += list(one) == list(other)
        total += len(other)
        kept += next(
            (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
            min(len(one), len(other)),
        )
    return same / len(expected), kept / max(total, 1)


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path, nargs="?", default=QUICKSTART / "checkpoint")
    parser.add_argument("--prompts", type=pathlib.Path, default=QUICKSTART / "prompts.jsonl")
    parser.add_argument("--texts", type=pathlib.Path, default=QUICKSTART / "facts.jsonl")
    parser.add_argument("--num_texts", type=int, default=200)
    parser.add_argument("--new_tokens", type=int, default=32)
    options = parser.parse_args()

    from mindformers_ext.predict import Tokenizer
    from mindformers_ext.runtime import setup_runtime

    setup_runtime("CPU")
    tokenizer = Tokenizer.from_folder(options.checkpoint)
    prompts = [tokenizer.encode(record["instruction"]) for record in _records(options.prompts)]
    texts = [
        (tokenizer.encode(record["prompt"]), tokenizer.encode(record["response"], add_special_tokens=False))
        for record in _records(options.texts)[: options.num_texts]
    ]
    results: dict[str, dict[str, float]] = {}
    expected: list[list[int]] = []
    print(f"{len(prompts)} prompts, {len(texts)} texts\n")
    print("| weights | bytes | equal answers | equal ids | nll a token | difference |\n|---|---:|---:|---:|---:|---:|")
    for dtype in DTYPES:
        model = load(options.checkpoint, dtype)
        ids = answers(model, prompts, options.new_tokens, tokenizer.eos_token_ids)
        expected = expected or ids
        equal, kept = agreement(ids, expected)
        nll = float(response_nll(model, texts).mean())
        size = sum(weight.nbytes for weight in model.packed_weights())
        difference = nll - results["float32"]["nll"] if results else 0.0
        results[dtype] = {
            "equal_answers": equal,
            "equal_ids": kept,
            "nll": nll,
            "difference": difference,
            "bytes": size,
        }
        print(f"| {dtype} | {size:,} | {equal:.1%} | {kept:.1%} | {nll:.6f} | {difference:+.1e} |", flush=True)
    print(f"\n{json.dumps(results)}")


if __name__ == "__main__":
    main()

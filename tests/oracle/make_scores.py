"""Scores of choices and texts under the tiny checkpoints, computed plainly with transformers: tests/data/scores.json.

    OMP_NUM_THREADS=1 python tests/oracle/make_scores.py

One forward for each choice and each window, without a batch, a pad or a cache. Texts become ids as in
lm-evaluation-harness 0.4.13 (`TemplateLM._encode_pair`, `get_rolling_token_windows`, `make_disjoint_window`). Needs
torch and transformers (5.24).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).parents[1] / "data"
QUESTIONS = [
    ("The quick brown fox", [" jumps", " sleeps over the dog", " is", " and the house"]),
    ("The capital of France is  ", ["Paris", "Rome", " London", "a"]),
    ("今天天气", ["很好", "不好，下雨了", "晴"]),
    ("Once upon a time there was a small house near the river, and in the house lived", [" a cat.", " two dogs and a"]),
    ("", ["The", " the small house", "1 + 1 = 2"]),
]
TEXTS = ["A short text.", "Many words make a long text, and this one goes on: " * 12]


def log_probabilities(model: Any, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """Log-probability of each token of a continuation, and whether each is the best one."""
    with torch.no_grad():
        logits = model(torch.tensor([(context + continuation)[:-1]])).logits[0, -len(continuation) :].float()
    targets = torch.tensor(continuation)
    found = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    return found.tolist(), bool((logits.argmax(-1) == targets).all())


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context and a continuation."""
    if context == "":
        prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = tokenizer.encode(continuation, add_special_tokens=False)
        return ([prefix], ids) if ids[0] != prefix else (ids[:1], ids[1:])
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = tokenizer.encode(context)
    return before, tokenizer.encode(context + continuation)[len(before) :]


def rolling(model: Any, tokenizer: Any, text: str, max_length: int) -> float:
    """Log-likelihood of a text in disjoint windows."""
    ids = tokenizer.encode(text)
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    total, done = 0.0, 0
    while done < len(ids):
        end = min(done + max_length, len(ids))
        start = max(end - max_length - 1, 0) if done else 0
        context = [prefix] if done == 0 else ids[start:done]
        total += sum(log_probabilities(model, context, ids[done:end])[0])
        done = end
    return total


def scores(folder: Path) -> dict[str, Any]:
    """All scores of one checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    questions = []
    for prompt, choices in QUESTIONS:
        found = [log_probabilities(model, *encode_pair(tokenizer, prompt, choice)) for choice in choices]
        totals = [sum(values) for values, _ in found]
        by_length = [total / len(choice) for total, choice in zip(totals, choices, strict=True)]
        questions.append(
            {
                "loglikelihood": totals,
                "token_logprobs": [values for values, _ in found],
                "is_greedy": [greedy for _, greedy in found],
                "best": max(range(len(choices)), key=totals.__getitem__),
                "best_norm": max(range(len(choices)), key=by_length.__getitem__),
            }
        )
    length = model.config.max_position_embeddings
    return {"questions": questions, "texts": [rolling(model, tokenizer, text, length) for text in TEXTS]}


def main() -> None:
    """Writes the file."""
    families = {folder.name: scores(folder) for folder in sorted((DATA / "checkpoints").iterdir()) if folder.is_dir()}
    content = {
        "questions": [{"prompt": prompt, "choices": choices} for prompt, choices in QUESTIONS],
        "texts": TEXTS,
        "families": families,
    }
    (DATA / "scores.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

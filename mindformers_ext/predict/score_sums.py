"""The numbers of a whole run of the task `score`, from sums over its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Sums = dict[str, float]


def exponential(value: float) -> float | None:
    """Returns e to the power of `value`; None where that is beyond float64."""
    try:
        return math.exp(value)
    except OverflowError:
        return None


def add_score(sums: Sums, row: Mapping[str, Any]) -> None:
    """Adds a row of scores.

    Args:
        sums: by name: numbers of records with `texts`, `targets` and `choices`, and of `answers`, choices of which one
            is right; of these `acc`, `acc_norm` and `acc_bytes`; of targets `target_loglikelihood`, and how many are
            `greedy`; of texts and targets `loglikelihood` and `tokens`; of texts with windows their log-likelihood
            `rolled`, `words` and `bytes`.
        row: see docs/scoring.md.
    """

    def add(name: str, value: float = 1) -> None:
        sums[name] = sums.get(name, 0) + value

    if "best" in row:
        add("choices")
        if "acc" in row:
            add("answers")
            for name in ("acc", "acc_norm", "acc_bytes"):
                add(name, row[name])
        return
    add("loglikelihood", row["loglikelihood"])
    add("tokens", row["num_target_tokens"])
    if "is_greedy" in row:
        add("targets")
        add("target_loglikelihood", row["loglikelihood"])
        add("greedy", row["is_greedy"])
        return
    add("texts")
    if "num_words" in row:
        add("rolled", row["loglikelihood"])
        add("words", row["num_words"])
        add("bytes", row["num_bytes"])


def score_metrics(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the metrics of a run, those that it has records for; lm-evaluation-harness' definitions (0.4.13).

    - `acc`, `acc_norm`, `acc_bytes`: means over the records with a right choice; `<name>_stderr`, their standard error
      (from two records on).
    - `greedy`: share of single targets of which each token is the most likely; `target_perplexity`: exp of the mean
      -log-likelihood of a target.
    - `nll`: mean over the tokens of texts and single targets; `token_perplexity`: its exponential.
    - `word_perplexity`, `byte_perplexity`, `bits_per_byte`: of texts that were rolled over.
    """
    found: dict[str, float | None] = {}
    if answers := sums.get("answers"):
        for name in ("acc", "acc_norm", "acc_bytes"):
            mean = sums[name] / answers
            found[name] = mean
            if answers > 1:
                found[f"{name}_stderr"] = math.sqrt(mean * (1 - mean) / (answers - 1))
    if targets := sums.get("targets"):
        found["greedy"] = sums["greedy"] / targets
        found["target_perplexity"] = exponential(-sums["target_loglikelihood"] / targets)
    if tokens := sums.get("tokens"):
        found["nll"] = -sums["loglikelihood"] / tokens
        found["token_perplexity"] = exponential(-sums["loglikelihood"] / tokens)
    if size := sums.get("bytes"):
        found["word_perplexity"] = exponential(-sums["rolled"] / sums["words"])
        found["byte_perplexity"] = exponential(-sums["rolled"] / size)
        found["bits_per_byte"] = -sums["rolled"] / size / math.log(2)
    return found

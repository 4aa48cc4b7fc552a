"""Contexts and continuations as token ids, as lm-evaluation-harness makes them (`TemplateLM`, `utils`; 0.4.13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mindformers_ext.predict.tokenizer import Tokenizer

# Ids of a context, and those of a continuation of it.
Pair: TypeAlias = tuple[list[int], list[int]]


def prefix_token(tokenizer: Tokenizer) -> int:
    """Returns the id that stands before a text without a context: BOS, or EOS where the tokenizer names no BOS.

    Raises:
        ValueError: it names neither.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if tokenizer.eos_token_ids:
        return tokenizer.eos_token_ids[0]
    raise ValueError("the tokenizer names neither a bos_token nor an eos_token to stand before an empty context")


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, add_special_tokens: bool = True) -> Pair:
    """Returns the ids of a context and of its continuation.

    White space at the end of the context goes to the continuation. Both are encoded as one text, and the ids after as
    many as the context has alone are those of the continuation. Before an empty context stands the `prefix_token`,
    unless the continuation begins with it; then that id is the context.

    Args:
        tokenizer: of the model.
        context: may be empty.
        continuation: its first characters belong to it, a space among them.
        add_special_tokens: see `Tokenizer.encode`; an empty context gets none.

    Raises:
        ValueError: nothing is left for the continuation, or a text cannot be encoded.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if stripped:
        whole = tokenizer.encode(stripped + continuation, add_special_tokens)
        context_ids = tokenizer.encode(stripped, add_special_tokens)
        ids = whole[len(context_ids) :]
    else:
        ids = tokenizer.encode(continuation, add_special_tokens=False)
        prefix = prefix_token(tokenizer)
        context_ids, ids = (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)
    if not context_ids or not ids:
        raise ValueError(f"the {'continuation' if context_ids else 'context'} gives no tokens")
    return context_ids, ids


def cut_left(pair: Pair, max_length: int) -> Pair:
    """Returns a pair whose tokens but the last fit into ``max_length``: the first ones of the context are dropped.

    Raises:
        ValueError: the continuation alone is too long.
    """
    context, continuation = pair
    if len(continuation) > max_length:
        raise ValueError(f"{len(continuation)} tokens of the continuation exceed the model's length {max_length}")
    return context[-(max_length + 1 - len(continuation)) :], continuation


def rolling_windows(ids: Sequence[int], prefix: int, max_length: int) -> list[Pair]:
    """Returns pairs that predict every token of a text once, from as many tokens before it as a window leaves.

    The first window predicts ``max_length`` tokens, the first of them from ``prefix``; each of the next as many more,
    from the last token before it and those of its own; the last one, which has fewer, from so many more tokens before
    them that it is full.

    Args:
        ids: of the text.
        prefix: see `prefix_token`.
        max_length: tokens that the model reads at most.
    """
    tokens = [prefix, *ids]  # token i of the text is at i + 1
    windows: list[Pair] = []
    start = 0
    while start < len(ids):
        end = min(start + max_length, len(ids))
        first = 0 if start == 0 else end - max_length
        windows.append((tokens[first : start + 1], tokens[start + 1 : end + 1]))
        start = end
    return windows

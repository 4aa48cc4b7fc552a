"""The text of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from mindformers_ext.predict.tokenizer import Tokenizer


def answer_text(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    new_ids: Sequence[int],
    stop_position: int | None,
    skip_special_tokens: bool,
) -> str:
    """Returns the text of the new ids, up to a stop string.

    Args:
        tokenizer: makes the text.
        prompt_ids: ids before the new ones.
        new_ids: ids of the answer.
        stop_position: character of the text with special tokens at which the text ends; None takes everything.
        skip_special_tokens: leave special tokens out.
    """
    if stop_position is None:
        return tokenizer.decode_new(prompt_ids, new_ids, skip_special_tokens)
    whole = tokenizer.decode_new(prompt_ids, new_ids, False)
    if not skip_special_tokens:
        return whole[:stop_position]
    # Take the tokens before the stop string, and of the token in which it begins the part before it. Without special
    # tokens the text has other positions, and the stop string may be a special token itself.
    count, before = len(new_ids), whole
    while count and (len(before) > stop_position or not whole.startswith(before)):
        count -= 1
        before = tokenizer.decode_new(prompt_ids, new_ids[:count], False)
    shown = tokenizer.decode_new(prompt_ids, new_ids[:count], True)
    if tokenizer.decode_new(prompt_ids, new_ids[: count + 1], True) == shown:  # it begins in a special token
        return shown
    return shown + whole[len(before) : stop_position]

"""When a row is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.plugins import call_criterion
from mindformers_ext.generate.processors import StepContext
from mindformers_ext.generate.rows import FinishReason

# Text of the new ids that follow ``context`` ids, special tokens included: (context ids, new ids) -> text.
DecodeNew = Callable[[Sequence[int], Sequence[int]], str]

REASONS: tuple[FinishReason | None, ...] = (None, "eos", "stop", "length", "time")
RUNNING, EOS, STOP, LENGTH, TIME = range(5)

# Tokens before a window that its text is decoded after: enough for a character's bytes and a dropped leading space.
_CONTEXT = 8


@dataclass(frozen=True)
class StopMatch:
    """A stop string and the character of the new tokens' text at which it begins."""

    text: str
    position: int


@dataclass
class Verdict:
    """For each row why it is done: index into `REASONS` int8 ``[M]``, and the stop strings that were found."""

    codes: np.ndarray
    matches: dict[int, StopMatch] = field(default_factory=dict)


class StopStrings:
    """Finds strings in the text of new tokens, across the borders of tokens but never in the prompt.

    Args:
        strings: what ends a row.
        decode: gives the text of new ids.
    """

    def __init__(self, strings: Sequence[str], decode: DecodeNew) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, strings))
        self._bytes = max(len(text.encode("utf-8", "surrogatepass")) for text in strings)
        self._decode = decode

    def find(self, ids: np.ndarray, prompt_length: int) -> StopMatch | None:
        """Returns the stop string that ends within the last token, the earliest one if there are several.

        Args:
            ids: integers, prompt and new tokens.
            prompt_length: how many of them are the prompt's.
        """
        tail = self._tail(ids, prompt_length)
        if not any(text in tail for text in self._strings):
            return None
        prompt, new = ids[:prompt_length].tolist(), ids[prompt_length:].tolist()
        whole, before = self._decode(prompt, new), self._decode(prompt, new[:-1])
        known = _common_prefix(whole, before)
        matches = []
        for order, text in enumerate(self._strings):
            position = whole.find(text, max(known + 1 - len(text), 0))
            if position >= 0:
                matches.append((position, order, text))
        if not matches:
            return None
        position, _, text = min(matches)
        return StopMatch(text, position)

    def _tail(self, ids: np.ndarray, prompt_length: int) -> str:
        """Text of the last tokens: enough of them that a stop string which ends in the last one lies in it whole.

        A token has at least one byte, or none at all (special tokens and rows without a token); of a character that the
        window cuts, up to three bytes stand at its start.
        """
        count = len(ids) - prompt_length
        size = min(self._bytes + 4, count)
        while True:
            start = len(ids) - size
            context, window = ids[max(start - _CONTEXT, 0) : start].tolist(), ids[start:].tolist()
            text = self._decode(context, window[:-1])
            broken = text.count("\ufffd")
            # A long run of bytes that are no characters holds no stop string; the window must not grow with it.
            if size == count or len(text) - broken >= self._longest or broken > 4 * self._bytes:
                return self._decode(context, window)
            size = min(2 * size, count)


def _common_prefix(a: str, b: str) -> int:
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])


class Stopping:
    """All that ends rows, in order of precedence: EOS, stop strings and plug-ins, length, time.

    Args:
        config: options.
        decode: gives the text of new ids; needed for stop strings.
        agree: whether a flag is set on any process that decodes the same rows; their clocks differ.

    Raises:
        ValueError: stop strings without ``decode``.
    """

    def __init__(
        self, config: GenerationConfig, decode: DecodeNew | None = None, agree: Callable[[bool], bool] = bool
    ) -> None:
        if config.stop_texts and decode is None:
            raise ValueError("stop_strings need a decode function, which gives the text of new token ids")
        self._eos = np.array(config.eos_token_ids, np.int64)
        self._strings = StopStrings(config.stop_texts, decode) if config.stop_texts and decode is not None else None
        self._plugins = tuple(config.stopping_criteria)
        self._filler = config.filler
        self._min_new_tokens = config.min_new_tokens or 0
        self._agree = agree
        self._deadline = None if config.max_time is None else time.monotonic() + config.max_time

    @property
    def reads_rows(self) -> bool:
        """Whether `check` needs to see whole rows."""
        return self._strings is not None or bool(self._plugins)

    def check(
        self,
        tokens: np.ndarray,
        num_new: int | np.ndarray,
        budgets: np.ndarray,
        context: Callable[[], StepContext],
        scores: Callable[[], np.ndarray],
    ) -> Verdict:
        """Judges rows after a token.

        Args:
            tokens: the newest token of each row, int ``[M]``.
            num_new: new tokens of each row, the newest included, int ``[M]``, or one number for all.
            budgets: most new tokens of each row, int ``[M]``.
            context: gives the rows, newest token included; called if `reads_rows`.
            scores: gives the scores ``[M, V]`` that the tokens were chosen from; called for plug-ins.
        """
        verdict = Verdict(np.where(num_new >= budgets, LENGTH, RUNNING).astype(np.int8))
        codes = verdict.codes
        if self._deadline is not None and self._agree(time.monotonic() > self._deadline):
            codes[codes == RUNNING] = TIME
        eos = np.isin(tokens, self._eos)
        if self.reads_rows:
            rows = context()
            for plugin in self._plugins:
                codes[call_criterion(plugin, rows.padded(self._filler), scores())] = STOP
            if self._strings is not None:
                for row in np.flatnonzero(~eos & (num_new >= self._min_new_tokens)):
                    match = self._strings.find(rows.sequences[row], int(rows.prompt_lengths[row]))
                    if match is not None:
                        verdict.matches[int(row)] = match
                        codes[row] = STOP
        codes[eos] = EOS
        return verdict

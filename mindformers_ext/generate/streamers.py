"""Watching a generation while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

# A decoder shows bytes that are not a whole character as this.
_REPLACEMENT = "�"


class Streamer:
    """Gets tokens as they are chosen; a base class for your own."""

    def put(self, tokens: np.ndarray) -> None:
        """Takes the prompts, integers ``[B, S]`` padded on the left, and after them each step's tokens ``[rows]``.

        A row that is finished gets pads.
        """
        raise NotImplementedError(f"{type(self).__name__} must define put(tokens)")

    def end(self) -> None:
        """Is called once, after the last tokens or an error."""


class TextStreamer(Streamer):
    """Passes the text of one row on as soon as it is certain, and never half a character.

    Args:
        decode: ``(prompt ids, new ids) -> text of the new ids``.
        write: takes each piece of text; None prints to stdout.
        stop_ids: ids that have no text, such as EOS and pad.
    """

    # Tokens before a piece that are decoded with it, and the most that are held back: bytes that never become a
    # character must not be decoded again and again.
    _CONTEXT = 8
    _HELD = 32

    def __init__(
        self,
        decode: Callable[[Sequence[int], Sequence[int]], str],
        write: Callable[[str], object] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._write = write if write is not None else _print
        self._stop_ids = frozenset(stop_ids)
        self._context: list[int] | None = None
        self._held: list[int] = []

    def put(self, tokens: np.ndarray) -> None:
        """See `Streamer.put`.

        Raises:
            ValueError: more than one row.
        """
        if tokens.size and tokens.shape[0] != 1:
            raise ValueError(f"TextStreamer follows one row, not {tokens.shape[0]}; write a Streamer for batches")
        if self._context is None:
            self._context = tokens.reshape(-1).tolist()[-self._CONTEXT :]
            return
        self._held += [token for token in tokens.tolist() if token not in self._stop_ids]
        text = self._decode(self._context, self._held)
        if not text.endswith(_REPLACEMENT):
            self._emit(len(self._held))
        elif len(self._held) >= self._HELD:
            self._emit(len(self._held) - 3)  # a character has four bytes at most, so these may still become one

    def end(self) -> None:
        """Passes the rest on."""
        if self._context is not None and self._held:
            self._emit(len(self._held))
        self._context, self._held = None, []

    def _emit(self, count: int) -> None:
        """Passes the text of the first ``count`` held tokens on."""
        assert self._context is not None
        tokens, self._held = self._held[:count], self._held[count:]
        text = self._decode(self._context, tokens)
        self._context = (self._context + tokens)[-self._CONTEXT :]
        if text:
            self._write(text)


def _print(text: str) -> None:
    print(text, end="", flush=True, file=sys.stdout)

"""Options of a generation, and the masks and positions of a left-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindformers_ext.models.mask import attention_bias


@dataclass
class GenerationConfig:
    """Options of one generation, with transformers' names and meaning.

    Attributes:
        max_new_tokens: most tokens that a row may get, at least 1.
        eos_token_id: id or ids that end a row; the id is kept as the row's last token. None never ends one early.
        pad_token_id: fills the shorter rows of the result. None takes the first EOS id, or 0.
        do_sample: False takes the most likely token.
        use_cache: False runs the whole sequence through the model at every step: the slow reference with the same
            answers.
        prefill_chunk_size: the prompt goes through the model in pieces of so many tokens, which bounds the memory
            of masks and scores.
    """

    max_new_tokens: int = 256
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    use_cache: bool = True
    prefill_chunk_size: int = 512

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prefill_chunk_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        if self.do_sample is not False:
            raise ValueError(f"do_sample: {self.do_sample!r} is not supported; only greedy decoding is (false)")
        for eos in self.eos_token_ids:
            if isinstance(eos, bool) or not isinstance(eos, int) or eos < 0:
                raise ValueError(f"eos_token_id must be token ids (integers from 0 on), not {eos!r}")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All EOS ids."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)

    @property
    def filler(self) -> int:
        """The id that fills the shorter rows of a result."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_ids[0] if self.eos_token_ids else 0


def build_causal_mask(length: int, past: int = 0) -> np.ndarray:
    """Returns the additive mask float32 ``[1, 1, length, past + length]``: 0 where a token may look."""
    return attention_bias(None, 1, length, past, past + length)


def build_position_ids(attention_mask: np.ndarray) -> np.ndarray:
    """Returns positions int32 ``[B, S]`` that start at 0 at the first real token; pads get 0.

    Args:
        attention_mask: ``[B, S]``, 1 for a real token and 0 for a pad.
    """
    return np.maximum(np.cumsum(attention_mask != 0, axis=1) - 1, 0).astype(np.int32)


def _build_combined_mask(attention_mask: np.ndarray, length: int) -> np.ndarray:
    """Joins causality and padding for the last ``length`` of the tokens that ``attention_mask`` ``[B, T]`` covers.

    Returns:
        Additive float32 ``[B, 1, length, T]``.
    """
    total = attention_mask.shape[1]
    return attention_bias(attention_mask, len(attention_mask), length, total - length, total)


def left_pad(prompts: Sequence[Sequence[int]], filler: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 ids ``[B, longest]`` padded on the left, and the mask ``[B, longest]`` (1 real, 0 pad)."""
    longest = max(map(len, prompts))
    ids = np.full((len(prompts), longest), filler, np.int32)
    mask = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask

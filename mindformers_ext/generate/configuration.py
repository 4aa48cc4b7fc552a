"""The options of a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass
class GenerationConfig:
    """Options of one generation, with transformers' names and meaning; docs/generation.md tells each one's formula.

    Attributes:
        max_new_tokens: most tokens that a row may get; None: those that max_length leaves, else 256.
        max_length: most tokens of a row, its real prompt included; max_new_tokens wins over it.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int = 0
    max_time: float | None = None
    stop_strings: str | Sequence[str] | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    do_sample: bool = False
    seed: int | None = None
    temperature: float = 1.0
    top_h: float | None = None
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: Sequence[Sequence[int]] | None = None
    sequence_bias: Sequence[Sequence[Any]] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    exponential_decay_length_penalty: Sequence[float] | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    beam_score: Literal["transformers", "vllm"] = "transformers"
    use_cache: bool = True
    prefill_chunk_size: int = 512
    output_logprobs: int | None = None
    return_dict_in_generate: bool = False
    logits_processor: Sequence[Callable[..., Any]] = ()
    stopping_criteria: Sequence[Callable[..., Any]] = ()

    def updated(self, **options: Any) -> GenerationConfig:
        """A copy in which ``options`` replace fields."""
        return replace(self, **options)

    def row_budget(self, prompt_length: int) -> int:
        """Most new tokens for a row whose real prompt has ``prompt_length`` tokens; 0 or less: none fits."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return DEFAULT_MAX_NEW_TOKENS if self.max_length is None else self.max_length - prompt_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All EOS ids."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """All stop strings."""
        if self.stop_strings is None:
            return ()
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)

    @property
    def filler(self) -> int:
        """The id that fills the shorter rows of a result."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_ids[0] if self.eos_token_ids else 0

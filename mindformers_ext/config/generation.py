"""The `generation` section: how the next token is chosen, in transformers' names and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mindformers_ext.config.section import UNSET, Check, Natural, Section, Unset

_NOT_SUPPORTED = "not supported yet; remove this key"
_LENGTH = "not a key of this section; use inference.max_new_tokens"

# A name moves from here into a field of GenerationSection when decoding learns it.
_DECODING_NAMES = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "constraints",
    "decoder_start_token_id",
    "disable_compile",
    "diversity_penalty",
    "dola_layers",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_decoder_ids",
    "forced_eos_token_id",
    "frequency_penalty",
    "guidance_scale",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_matching_ngram_size",
    "max_time",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "penalty_alpha",
    "prefill_chunk_size",
    "presence_penalty",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict_in_generate",
    "return_legacy_cache",
    "seed",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "token_healing",
    "top_h",
    "top_k",
    "top_p",
    "typical_p",
    "watermarking_config",
)

TokenIds = Annotated[list[Natural], Check("with at least one entry", lambda value: len(value) > 0)]


@dataclass(slots=True, kw_only=True)
class GenerationSection(Section):
    """Decoding settings. `UNSET` leaves the choice to generation_config.json and the tokenizer; null means none."""

    reserved: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_DECODING_NAMES, _NOT_SUPPORTED),
        "max_new_tokens": _LENGTH,
        "max_length": _LENGTH,
        "use_past": "not a key of this section; use generation.use_cache",
    }

    do_sample: bool = False
    use_cache: bool = True
    eos_token_id: Natural | TokenIds | Literal[Unset.UNSET] | None = UNSET
    pad_token_id: Natural | Literal[Unset.UNSET] | None = UNSET

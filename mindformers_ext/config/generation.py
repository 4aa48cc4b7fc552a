"""The `generation` section: how the next token is chosen, in transformers' names and meaning.

Types and ranges are here; `mindformers_ext.generate.GenerationConfig` checks its fields against the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from mindformers_ext.config.section import (
    UNSET,
    Check,
    Count,
    Fraction,
    FractionBelowOne,
    Natural,
    PositiveFloat,
    Section,
    Seed,
    Unset,
    yaml_fields,
)

_NOT_SUPPORTED = "not supported; remove this key"
_LENGTH = "not a key of this section; use inference.max_new_tokens"
_PYTHON = "an option of GenerationConfig in Python, not of the YAML; remove this key"

# Names of transformers and of vLLM that change an answer, or what is returned, and that decoding does not know.
UNSUPPORTED = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "cache_config",
    "compile_config",
    "constraints",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "diversity_penalty",
    "dola_layers",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_decoder_ids",
    "frequency_penalty",
    "guidance_scale",
    "is_assistant",
    "low_memory",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "penalty_alpha",
    "prefix_allowed_tokens_fn",
    "presence_penalty",
    "return_legacy_cache",
    "speculation_type",
    "target_lookbehind",
    "token_healing",
    "use_mtp",
    "watermarking_config",
)
_PYTHON_ONLY = ("logits_processor", "output_scores", "return_dict_in_generate", "stopping_criteria")

_NOT_EMPTY = Check("with at least one entry", lambda value: len(value) > 0)


def _are_biases(value: list[Any]) -> bool:
    """[[[token ids], bias], ...]; minus infinity bans, plus infinity would leave no choice."""
    return len(value) > 0 and all(
        isinstance(entry, list) and len(entry) == 2 and _are_ids(entry[0]) and _is_number(entry[1]) for entry in value
    )


def _is_decay(value: list[Any]) -> bool:
    return len(value) == 2 and _are_ids(value[:1]) and _is_number(value[1]) and math.isfinite(value[1]) and value[1] > 0


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int and item >= 0 for item in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (abs(value) <= 1e30 or value == -math.inf)


TokenIds = Annotated[list[Natural], _NOT_EMPTY]
Text = Annotated[str, Check("with at least one character", lambda value: len(value) > 0)]
# Beyond these borders float32 scores would overflow or vanish.
Temperature = Annotated[
    float, Check("from 1e-38 to 1e38 (greedy decoding is do_sample: false)", lambda value: 1e-38 <= value <= 1e38)
]
Penalty = Annotated[float, Check("from 1e-6 to 1e6", lambda value: 1e-6 <= value <= 1e6)]
LengthPenalty = Annotated[float, Check("from -8 to 8", lambda value: -8 <= value <= 8)]
PositiveFraction = Annotated[float, Check("> 0 and <= 1", lambda value: 0 < value <= 1)]
Biases = Annotated[list[Any], Check("of pairs [[token ids], bias]", _are_biases)]
Decay = Annotated[list[Any], Check("[start, factor] with an integer start >= 0 and a factor > 0", _is_decay)]
Alternatives = Annotated[int, Check("from 0 to 1000", lambda value: 0 <= value <= 1000)]


@dataclass(slots=True, kw_only=True)
class GenerationSection(Section):
    """Decoding settings. `UNSET` leaves the choice to generation_config.json and the tokenizer; null means none."""

    reserved: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(UNSUPPORTED, _NOT_SUPPORTED),
        **dict.fromkeys(_PYTHON_ONLY, _PYTHON),
        "max_new_tokens": _LENGTH,
        "max_length": _LENGTH,
        "use_past": "not a key of this section; use generation.use_cache",
    }

    # the way a token is chosen
    do_sample: bool = False
    seed: Seed | None = None
    temperature: Temperature = 1.0
    top_h: PositiveFraction | None = None
    top_k: Annotated[int, Check(">= 1, or 0 or -1 for all tokens", lambda value: value >= -1)] = 50
    top_p: Fraction = 1.0
    min_p: Fraction | None = None
    typical_p: PositiveFraction = 1.0
    epsilon_cutoff: FractionBelowOne = 0.0
    eta_cutoff: FractionBelowOne = 0.0
    # beams and several answers
    num_beams: Count = 1
    num_return_sequences: Count = 1
    length_penalty: LengthPenalty = 1.0
    early_stopping: bool | Literal["never"] = False
    beam_score: Literal["transformers", "vllm"] = "transformers"
    # what changes scores before the choice
    repetition_penalty: Penalty = 1.0
    no_repeat_ngram_size: Natural = 0
    bad_words_ids: Annotated[list[TokenIds], _NOT_EMPTY] | None = None
    sequence_bias: Biases | None = None
    suppress_tokens: TokenIds | None = None
    begin_suppress_tokens: TokenIds | None = None
    exponential_decay_length_penalty: Decay | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    # where an answer ends
    eos_token_id: Natural | TokenIds | Literal[Unset.UNSET] | None = UNSET
    forced_eos_token_id: Natural | TokenIds | None = None
    min_new_tokens: Natural | None = None
    min_length: Natural = 0
    stop_strings: Text | Annotated[list[Text], _NOT_EMPTY] | None = None
    max_time: PositiveFloat | None = None
    # what is kept and returned
    pad_token_id: Natural | Literal[Unset.UNSET] | None = UNSET
    bos_token_id: Natural | None = None
    output_logprobs: Alternatives | None = None
    use_cache: bool = True
    cache_implementation: Literal["dynamic", "static"] | None = None
    max_cache_len: Count | None = None
    prefill_chunk_size: Count = 512
    # drafts
    prompt_lookup_num_tokens: Count | None = None
    max_matching_ngram_size: Count = 2

    def explicit(self) -> dict[str, Any]:
        """The options that the user chose: those written, and those set in Python to another value than the default."""
        default = GenerationSection()
        values = {name: getattr(self, name) for name in yaml_fields(GenerationSection)}
        return {
            name: value
            for name, value in values.items()
            if value is not UNSET and (name in self.given or value != getattr(default, name))
        }

    def to_dict(self) -> dict[str, Any]:
        """The explicit options alone: generation_config.json decides the others, after a round trip too."""
        return self.explicit()


SAMPLING_KEYS = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAM_KEYS = ("length_penalty", "early_stopping", "beam_score")
NEVER_USED = ("bos_token_id", "cache_implementation", "max_cache_len")


def conflicts(options: Any) -> Iterator[tuple[str, str]]:
    """Yields (option, problem) for options that contradict each other.

    Args:
        options: an object with this section's fields, each of the right type.
    """
    returned, beams = options.num_return_sequences, options.num_beams
    if returned > 1 and beams == 1 and not options.do_sample:
        yield "num_return_sequences", f"{returned} answers need do_sample: true or num_beams of at least {returned}"
    if beams > 1 and returned > beams:
        yield "num_return_sequences", f"{returned} is more than num_beams {beams}; it must not be greater"
    if options.prompt_lookup_num_tokens is not None:
        if beams > 1:
            yield "prompt_lookup_num_tokens", "beams are not decoded ahead; set num_beams to 1 or remove this key"
        if not options.use_cache:
            yield "prompt_lookup_num_tokens", "without a cache drafts save nothing; remove use_cache: false or this key"
    forced = options.forced_eos_token_id
    if forced is not None and options.suppress_tokens is not None:
        forced = [forced] if isinstance(forced, int) else forced
        if set(forced) <= set(options.suppress_tokens):
            yield "forced_eos_token_id", f"{forced} are all among suppress_tokens; no token would be left"


def without_effect(options: Any, given: Collection[str]) -> list[str]:
    """Sentences about those of the ``given`` options that change nothing beside the others.

    Args:
        options: as for `conflicts`.
        given: names that the user has set.
    """
    groups: list[tuple[tuple[str, ...], str]] = []
    if not options.do_sample:
        groups.append(((*SAMPLING_KEYS, "seed"), "without do_sample: true"))
    if options.num_beams == 1:
        groups.append((BEAM_KEYS, "without num_beams above 1"))
    if options.prompt_lookup_num_tokens is None:
        groups.append((("max_matching_ngram_size",), "without prompt_lookup_num_tokens"))
    groups.append((NEVER_USED, "here: prompts are never empty, and the cache always has the length it needs"))
    sentences = []
    for names, reason in groups:
        idle = [name for name in names if name in given]
        if idle:
            sentences.append(f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect {reason}")
    return sentences

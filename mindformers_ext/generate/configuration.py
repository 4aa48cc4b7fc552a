"""The options of a generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from mindformers_ext.config.generation import UNSUPPORTED, GenerationSection, conflicts, without_effect
from mindformers_ext.config.section import Count, yaml_fields
from mindformers_ext.config.values import MismatchError, coerce
from mindformers_ext.runtime import logger

DEFAULT_MAX_NEW_TOKENS = 256
_PLUGINS = ("logits_processor", "stopping_criteria")


@dataclass
class GenerationConfig:
    """Options of one generation, with transformers' names and meaning.

    docs/generation.md has a table of all of them with formula and range. Ranges are those of the YAML's ``generation``.
    A configuration is never changed after it was made; `updated` makes a changed copy.

    Attributes:
        max_new_tokens: most tokens that a row may get; None: those that max_length leaves, else 256.
        max_length: most tokens of a row, its real prompt included; max_new_tokens wins over it.
        eos_token_id: id or ids that end a row; the id is kept as the row's last token. None never ends one early.
        pad_token_id: fills the shorter rows of a result. None takes the first EOS id, or 0.
        sequence_bias: ``[[[token ids], bias], ...]``; a mapping of tuples of ids to biases is turned into that.
        seed: of sampling; None draws a new one for each generation.
        logits_processor: callables ``(input_ids [B, T], scores [B, V]) -> scores``; see `LogitsProcessor`.
        stopping_criteria: callables ``(input_ids [B, T], scores [B, V]) -> bool [B]``; see `StoppingCriteria`.

    Raises:
        ValueError: options out of range or in contradiction, all of them in one message.
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
    sequence_bias: Any = None
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
    cache_implementation: Literal["dynamic", "static"] | None = None
    max_cache_len: int | None = None
    prefill_chunk_size: int = 512
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 2
    output_logprobs: int | None = None
    output_scores: bool = False
    return_dict_in_generate: bool = False
    logits_processor: Sequence[Callable[..., Any]] = ()
    stopping_criteria: Sequence[Callable[..., Any]] = ()

    def __post_init__(self) -> None:
        errors = []
        for name, hint in _hints().items():
            try:
                setattr(self, name, coerce(_plain(name, getattr(self, name)), hint))
            except MismatchError as error:
                errors.append(f"{name}: {error}")
        for name in _PLUGINS:
            errors += self._take_plugins(name)
        if not errors:
            errors = [f"{name}: {problem}" for name, problem in conflicts(self)]
        if errors:
            raise ValueError("; ".join(errors))
        for sentence in self._useless():
            logger.warning("generation: %s", sentence)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> GenerationConfig:
        """A configuration from names and values.

        Raises:
            TypeError: names that are no options, or not supported, all of them in one message.
            ValueError: see the class.
        """
        return cls().updated(**options)

    def updated(self, **options: Any) -> GenerationConfig:
        """A copy in which ``options`` replace fields; see `from_options`."""
        known = {field.name for field in dataclasses.fields(self)}
        unknown = [name for name in options if name not in known]
        if unknown:
            texts = [f"{name} is not supported" if name in UNSUPPORTED else f"{name} is no option" for name in unknown]
            raise TypeError("; ".join(texts))
        return replace(self, **options)

    def row_budget(self, prompt_length: int) -> int:
        """Most new tokens for a row whose real prompt has ``prompt_length`` tokens; 0 or less: none fits."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return DEFAULT_MAX_NEW_TOKENS if self.max_length is None else self.max_length - prompt_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All EOS ids."""
        return _ids(self.eos_token_id)

    @property
    def forced_eos_token_ids(self) -> tuple[int, ...]:
        """All ids that the last token may be; none: no rule."""
        return _ids(self.forced_eos_token_id)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """All stop strings."""
        if self.stop_strings is None:
            return ()
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)

    @property
    def biases(self) -> list[tuple[list[int], float]]:
        """The entries of sequence_bias."""
        return [(ids, float(bias)) for ids, bias in self.sequence_bias or ()]

    @property
    def filler(self) -> int:
        """The id that fills the shorter rows of a result."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_ids[0] if self.eos_token_ids else 0

    def _take_plugins(self, name: str) -> Iterator[str]:
        """Keeps a tuple of the plug-ins, or yields what is wrong with them."""
        value = getattr(self, name)
        plugins = () if value is None else (value,) if callable(value) else value
        if not isinstance(plugins, list | tuple) or not all(map(callable, plugins)):
            yield f"{name}: expected a list of callables, got {value!r}"
        else:
            setattr(self, name, tuple(plugins))

    def _useless(self) -> Iterator[str]:
        given = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        yield from without_effect(self, given)
        if self.max_new_tokens is not None and self.max_length is not None:
            yield "max_length has no effect beside max_new_tokens"


@cache
def _hints() -> dict[str, Any]:
    """Type and range of every option but the plug-ins."""
    shared = yaml_fields(GenerationSection)
    own = {
        "max_new_tokens": Count | None,
        "max_length": Count | None,
        "output_scores": bool,
        "return_dict_in_generate": bool,
    }
    names = [field.name for field in dataclasses.fields(GenerationConfig) if field.name not in _PLUGINS]
    return {name: own.get(name) or shared[name] for name in names}


def _plain(name: str, value: Any) -> Any:
    """Lists for tuples and arrays, Python's numbers for numpy's, pairs for a mapping of biases."""
    if name == "sequence_bias" and isinstance(value, Mapping):
        return [[_plain("", ids), _plain("", bias)] for ids, bias in value.items()]
    if isinstance(value, list | tuple):
        return [_plain("", item) for item in value]
    return _plain("", value.tolist()) if hasattr(value, "tolist") else value


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)

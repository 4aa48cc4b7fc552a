"""The options of a run's decoding: joined from arguments, YAML, generation_config.json and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindformers_ext.config import UNSET, GenerationSection
from mindformers_ext.config.build import build_generation
from mindformers_ext.config.generation import BEAM_KEYS, NEVER_USED, SAMPLING_KEYS, without_effect
from mindformers_ext.config.section import yaml_fields
from mindformers_ext.config.values import MismatchError, coerce
from mindformers_ext.generate import GenerationConfig
from mindformers_ext.generate.noise import fresh_seed
from mindformers_ext.generate.processors import check_token_ids
from mindformers_ext.predict import Tokenizer
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.stored_options import FILE, SPECIAL_KEYS, read_stored, stored_ids

_PLUGINS = ("logits_processor", "stopping_criteria")
# What generation_config.json decides where the YAML is silent, as far as it has an effect in the mode of the run.
# It never chooses the mode, nor what is returned.
_FILE_KEYS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "renormalize_logits",
    "forced_eos_token_id",
    "min_new_tokens",
    "min_length",
    "stop_strings",
    "max_time",
    *SAMPLING_KEYS,
    "length_penalty",
    "early_stopping",
)
# Options of that file that would change answers and that nothing here implements.
_UNKNOWN_FILE_KEYS = (
    "constraints",
    "diversity_penalty",
    "dola_layers",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "guidance_scale",
    "penalty_alpha",
    "token_healing",
    "watermarking_config",
)
_MODE_KEYS = ("do_sample", "num_beams", *SAMPLING_KEYS)
_ALWAYS_SHOWN = ("do_sample", "num_beams")
_SHOWN_IN_SAMPLING = ("temperature", "top_k", "top_p")

# The origin of a seed that nobody gave.
DRAWN_SEED = "drawn for this run"


@dataclass(frozen=True)
class Resolved:
    """The options of a run's decoding and where each of them comes from."""

    config: GenerationConfig
    origins: dict[str, str]

    @property
    def seed_is_drawn(self) -> bool:
        """Whether the seed of sampling was drawn here, because nobody gave one."""
        return self.origins.get("seed") == DRAWN_SEED

    def describe(self) -> str:
        """Returns one line for the log."""
        return ", ".join(f"{name} {getattr(self.config, name)} ({origin})" for name, origin in self.origins.items())

    def as_dict(self) -> dict[str, Any]:
        """Returns value and origin of each option, for a file; plug-ins by their classes."""
        return {
            name: {"value": _plain(name, getattr(self.config, name)), "origin": origin}
            for name, origin in self.origins.items()
        }


def resolve_generation(
    section: GenerationSection,
    max_new_tokens: int,
    tokenizer: Tokenizer,
    folder: Path | None,
    vocab_size: int,
    arguments: Mapping[str, Any] | None = None,
) -> Resolved:
    """Joins arguments, YAML, ``generation_config.json`` and tokenizer, in this order of precedence.

    Decoding is greedy unless an argument or the YAML sets do_sample or num_beams: ``generation_config.json`` does not
    choose the mode. Its temperature, top_k, top_p ... hold in sampling, its penalties and bans in every mode. The EOS
    ids are those of the YAML if it sets them (null: none at all), else those of ``generation_config.json`` (of
    ``config.json`` where that file is missing) and of the tokenizer together. Sampling without a seed draws a fresh
    one.

    Args:
        section: the YAML's ``generation``.
        max_new_tokens: of the run.
        tokenizer: its special tokens come last.
        folder: where ``generation_config.json`` and ``config.json`` may be.
        vocab_size: ids that the model has.
        arguments: names and values like those of the section, and plug-ins; they win over it.

    Raises:
        ValueError: an unreadable file, options out of range or in contradiction, or ids that the model does not have.
    """
    arguments = dict(arguments or {})
    plugins = {name: arguments.pop(name) for name in _PLUGINS if name in arguments}
    origins = {name: "yaml" for name in section.explicit()} | {name: "argument" for name in arguments}
    if arguments:
        section = build_generation({**section.explicit(), **arguments})
        for sentence in without_effect(section, arguments):
            logger.warning("generation: %s", sentence)
    stored, path = read_stored(folder)
    _log_what_the_file_cannot_do(stored, section)

    values: dict[str, Any] = {"max_new_tokens": max_new_tokens, **plugins}
    for name in _options(section):
        if name not in origins and name in stored and name in _FILE_KEYS:
            values[name], origins[name] = _stored_value(name, stored[name], path), FILE
        elif name in origins or name in _ALWAYS_SHOWN or (section.do_sample and name in _SHOWN_IN_SAMPLING):
            values[name] = getattr(section, name)
            origins.setdefault(name, "default")
    if section.do_sample and section.seed is None:
        values["seed"], origins["seed"] = fresh_seed(), DRAWN_SEED
    listed = {name: stored_ids(name, stored, path) for name in SPECIAL_KEYS}
    file = path.name if path is not None else FILE
    eos, origins["eos_token_id"] = _eos(
        section, listed["eos_token_id"], file, tokenizer, origins.get("eos_token_id", "yaml")
    )
    values["eos_token_id"] = list(eos) or None
    values["pad_token_id"], origins["pad_token_id"] = _pad(
        section, listed["pad_token_id"], file, tokenizer, eos, origins.get("pad_token_id", "yaml")
    )

    config = GenerationConfig(**values)
    for token in eos:
        if token >= vocab_size and origins["eos_token_id"] in ("yaml", "argument"):
            raise ValueError(f"generation.eos_token_id {token} is not among the model's {vocab_size} token ids")
    check_token_ids(config, vocab_size)
    shown = {"max_new_tokens": "inference"} | dict.fromkeys(plugins, "argument") | origins
    return Resolved(config, {name: origin for name, origin in shown.items() if name in values})


def _plain(name: str, value: Any) -> Any:
    return [type(plugin).__name__ for plugin in value] if name in _PLUGINS else value


def _options(section: GenerationSection) -> Iterator[str]:
    """The options that have an effect in the section's mode, EOS and pad aside."""
    idle = {*NEVER_USED, "eos_token_id", "pad_token_id"}
    if not section.do_sample:
        idle.update(SAMPLING_KEYS, ("seed",))
    if section.num_beams == 1:
        idle.update(BEAM_KEYS)
    return (name for name in yaml_fields(GenerationSection) if name not in idle)


def _stored_value(name: str, value: Any, path: Path | None) -> Any:
    try:
        return coerce(value, yaml_fields(GenerationSection)[name])
    except MismatchError as error:
        raise ValueError(f"{path}: {name}: {error}") from None


def _log_what_the_file_cannot_do(stored: Mapping[str, Any], section: GenerationSection) -> None:
    asks = bool(stored.get("do_sample")) or stored.get("num_beams", 1) != 1
    if asks and not section.do_sample and section.num_beams == 1:
        active = ", ".join(f"{key} {stored[key]}" for key in _MODE_KEYS if key in stored)
        logger.info("%s asks for another mode (%s); decoding is greedy all the same", FILE, active)
    ignored = [f"{key} {stored[key]}" for key in _UNKNOWN_FILE_KEYS if stored.get(key) not in (None, False, 0, 1)]
    if ignored:
        logger.warning("%s: %s: not supported and without effect", FILE, ", ".join(ignored))


def _eos(
    section: GenerationSection, listed: tuple[int, ...], file: str, tokenizer: Tokenizer, given: str
) -> tuple[tuple[int, ...], str]:
    if section.eos_token_id is not UNSET:
        return _ids(section.eos_token_id), given
    merged = tuple(dict.fromkeys((*listed, *tokenizer.eos_token_ids)))
    sources = [file] * bool(listed) + ["tokenizer"] * bool(set(tokenizer.eos_token_ids) - set(listed))
    return merged, " and ".join(sources) or "none found"


def _pad(
    section: GenerationSection,
    listed: tuple[int, ...],
    file: str,
    tokenizer: Tokenizer,
    eos: tuple[int, ...],
    given: str,
) -> tuple[int, str]:
    candidates = [
        (section.pad_token_id if section.pad_token_id is not UNSET else None, given),
        (listed[0] if listed else None, file),
        (tokenizer.pad_token_id, "tokenizer"),
        (eos[0] if eos else None, "first EOS id"),
        (0, "default"),
    ]
    return next((value, origin) for value, origin in candidates if isinstance(value, int) and value >= 0)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)

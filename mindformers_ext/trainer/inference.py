"""What prediction adds to the Trainer: the tokenizer, the options of decoding, and the way from records to answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindformers_ext.checkpoint import model_files_folder, read_model_json
from mindformers_ext.config import UNSET, GenerationSection, TrainConfig
from mindformers_ext.generate import GenerationConfig, GenerationStats, generate_rows
from mindformers_ext.predict import Completion, Record, RunResult, Tokenizer, run_generation
from mindformers_ext.runtime import logger

# Options of generation_config.json that turn on something else than greedy decoding.
_SAMPLING_KEYS = ("do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty")


def build_inference_tokenizer(config: TrainConfig) -> Tokenizer:
    """Reads the tokenizer that lies beside the weights.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
        ValueError: its files are damaged.
    """
    return Tokenizer.from_folder(model_files_folder(config.checkpoint.load_path))


@dataclass(frozen=True)
class Resolved:
    """The options of a run's decoding and where each of them comes from."""

    config: GenerationConfig
    origins: dict[str, str]

    def describe(self) -> str:
        """Returns one line for the log."""
        return ", ".join(f"{name} {getattr(self.config, name)} ({origin})" for name, origin in self.origins.items())


def resolve_generation(
    section: GenerationSection, max_new_tokens: int, tokenizer: Tokenizer, folder: Path | None, vocab_size: int
) -> Resolved:
    """Joins the YAML with ``generation_config.json`` and the tokenizer.

    The EOS ids are those of the YAML if it sets them (null: none at all), else those of ``generation_config.json``
    and of the tokenizer together.

    Args:
        section: the YAML's ``generation``.
        max_new_tokens: of the run.
        tokenizer: its special tokens come last.
        folder: where ``generation_config.json`` may be.
        vocab_size: ids that the model has.

    Raises:
        ValueError: an unreadable file, or an EOS id that the model does not have.
    """
    stored = read_model_json(folder, "generation_config.json") or {}
    active = [f"{key} {stored[key]}" for key in _SAMPLING_KEYS if stored.get("do_sample") and key in stored]
    if active:
        logger.info("generation_config.json asks for sampling (%s); decoding is greedy all the same", ", ".join(active))
    eos, eos_origin = _eos(section, stored, tokenizer)
    for token in eos:
        if token >= vocab_size and eos_origin == "yaml":
            raise ValueError(f"generation.eos_token_id {token} is not among the model's {vocab_size} token ids")
    pad, pad_origin = _pad(section, stored, tokenizer, eos)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=pad,
        do_sample=section.do_sample,
        use_cache=section.use_cache,
    )
    origins = {"max_new_tokens": "inference", "eos_token_id": eos_origin, "pad_token_id": pad_origin}
    return Resolved(config, origins | {"do_sample": "generation", "use_cache": "generation"})


def _eos(section: GenerationSection, stored: dict[str, Any], tokenizer: Tokenizer) -> tuple[tuple[int, ...], str]:
    if section.eos_token_id is not UNSET:
        return _ids(section.eos_token_id), "yaml"
    listed = _ids(stored.get("eos_token_id"))
    merged = tuple(dict.fromkeys((*listed, *tokenizer.eos_token_ids)))
    sources = ["generation_config.json"] * bool(listed) + ["tokenizer"] * bool(
        set(tokenizer.eos_token_ids) - set(listed)
    )
    return merged, " and ".join(sources) or "none found"


def _pad(
    section: GenerationSection, stored: dict[str, Any], tokenizer: Tokenizer, eos: tuple[int, ...]
) -> tuple[int, str]:
    candidates = [
        (section.pad_token_id if section.pad_token_id is not UNSET else None, "yaml"),
        (stored.get("pad_token_id"), "generation_config.json"),
        (tokenizer.pad_token_id, "tokenizer"),
        (eos[0] if eos else None, "first EOS id"),
        (0, "default"),
    ]
    return next((value, origin) for value, origin in candidates if isinstance(value, int) and value >= 0)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig, stats: GenerationStats
) -> list[Completion]:
    """Answers one batch of tokenised prompts."""
    return [Completion(row.token_ids, row.finish_reason) for row in generate_rows(model, prompts, config, stats)]


def generate_from_records(
    model: Any,
    tokenizer: Tokenizer,
    records: Iterable[Record],
    config: GenerationConfig,
    stats: GenerationStats,
    **options: Any,
) -> RunResult:
    """Answers records in batches.

    Args:
        model: meets the contract of `mindformers_ext.generate.generate`.
        tokenizer: makes ids of prompts and text of new ids.
        records: see `mindformers_ext.predict.normalize_input`.
        config: options of decoding.
        stats: is added to.
        **options: further arguments of `mindformers_ext.predict.run_generation`.
    """
    return run_generation(
        records,
        tokenizer,
        lambda prompts, _: generate_batch(model, prompts, config, stats),
        max_new_tokens=config.max_new_tokens,
        **options,
    )

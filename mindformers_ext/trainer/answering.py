"""Answers to prompts that are token ids already, without records and without an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindformers_ext.generate import GenerationStats
from mindformers_ext.predict import Completion
from mindformers_ext.trainer.decoding import resolve_generation
from mindformers_ext.trainer.inference import decode_together, generate_batch, num_replicas, without_unnamed_tokens
from mindformers_ext.trainer.model import checkpoint_model_files
from mindformers_ext.trainer.request import inference_options
from mindformers_ext.trainer.trainer import Trainer


def answer_ids(
    trainer: Trainer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    **generation: Any,
) -> list[Completion]:
    """Answers prompts with the weights of the moment, long ones first; every rank calls it.

    Args:
        trainer: has the model, the tokenizer and the configuration.
        prompts: token ids of each, none of them empty; with `max_new_tokens` they fit into the model's length.
        max_new_tokens: of each answer; None takes ``inference.max_new_tokens``.
        batch_size: prompts that run together on a replica; None takes ``inference.batch_size``.
        **generation: options of decoding, as those of `Trainer.inference`; one answer to each prompt.

    Raises:
        ValueError: an option out of range, or sampling without a seed, which ranks would draw apart.
    """
    tokenizer, config = trainer.tokenizer, trainer.config
    assert tokenizer is not None
    options = inference_options(config, None, max_new_tokens, None, batch_size)
    vocab_size = getattr(trainer._model_config, "vocab_size", tokenizer.vocab_size)
    folder = checkpoint_model_files(config) if config.checkpoint.load_path else None
    resolved = resolve_generation(
        config.generation,
        options.max_new_tokens,
        tokenizer,
        folder,
        vocab_size,
        {**generation, "num_return_sequences": 1},
    )
    if resolved.seed_is_drawn:
        raise ValueError("answer_ids() needs a seed for sampling; set generation.seed")
    decoding = resolved.config
    if config.predict.suppress_unnamed_tokens:
        decoding = without_unnamed_tokens(decoding, tokenizer, vocab_size)
    trainer._validate_pp_inference()
    trainer._load_inference_checkpoint()
    stats = GenerationStats()

    def decode_here(prompts: list[Any], indices: list[int]) -> list[Completion]:
        return generate_batch(trainer.model, prompts, decoding, stats, indices, tokenizer)

    decode = decode_together(decode_here, trainer.model, trainer._context, trainer._watch.answering(stats))
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    size = options.batch_size * num_replicas(trainer._context)
    found: dict[int, Completion] = {}
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        found |= zip(batch, decode([list(prompts[index]) for index in batch], batch), strict=True)
    return [found[index] for index in range(len(prompts))]

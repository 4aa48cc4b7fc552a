"""Everything that changes scores between the model and the choice of a token, in transformers' order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from mindformers_ext.generate import penalties
from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.context import Processor, StepContext
from mindformers_ext.generate.plugins import call_processor
from mindformers_ext.generate.warpers import Warpers, build_warpers

__all__ = ["Processor", "ProcessorList", "StepContext", "build_processors", "check_token_ids"]


class ProcessorList:
    """Processors one after another. It is false when there is nothing to do.

    Args:
        processors: each may change the scores that it is given, and returns them or others.
        only_warpers: no processor looks at anything but the scores that its predecessors left.
    """

    def __init__(self, processors: Sequence[Processor] = (), only_warpers: bool = False) -> None:
        self._processors = tuple(processors)
        self.only_warpers = only_warpers

    def __len__(self) -> int:
        return len(self._processors)

    def __call__(self, scores: np.ndarray, context: StepContext) -> np.ndarray:
        """Returns the changed scores float32 ``[R, V]``; those given stay as they are."""
        if not self._processors:
            return scores
        scores = scores.astype(np.float32)
        for processor in self._processors:
            scores = processor(scores, context)
        return scores


def build_processors(config: GenerationConfig, vocab_size: int) -> ProcessorList:
    """The processors that ``config`` asks for; sampling adds the warpers, which come last.

    Args:
        config: options.
        vocab_size: V, width of the scores.

    Raises:
        ValueError: an option names a token id that is not below ``vocab_size``.
    """
    check_token_ids(config, vocab_size)
    processors = list(_penalties(config, vocab_size))
    processors += [penalties.custom(call_processor, plugin, config.filler) for plugin in config.logits_processor]
    warpers = build_warpers(config)
    return ProcessorList([*processors, Warpers(warpers)] if warpers else processors, only_warpers=not processors)


def _penalties(config: GenerationConfig, vocab_size: int) -> Iterator[Processor]:
    eos = tuple(token for token in config.eos_token_ids if token < vocab_size)
    if config.sequence_bias is not None:
        yield penalties.sequence_bias(config.biases, vocab_size)
    if config.repetition_penalty != 1.0:
        yield penalties.repetition_penalty(config.repetition_penalty)
    if config.no_repeat_ngram_size > 0:
        yield penalties.no_repeat_ngram(config.no_repeat_ngram_size)
    if config.bad_words_ids is not None:
        yield penalties.bad_words(config.bad_words_ids, eos, vocab_size)
    if config.min_length > 0 and eos:
        yield penalties.ban(eos, lambda context: context.lengths < config.min_length)
    if config.min_new_tokens and eos:
        wanted = config.min_new_tokens
        yield penalties.ban(eos, lambda context: context.new_lengths < wanted)
    if config.forced_eos_token_ids:
        yield penalties.force(config.forced_eos_token_ids, partial(_at_last_token, config))
    if config.remove_invalid_values:
        yield penalties.remove_invalid_values
    if config.exponential_decay_length_penalty is not None and eos:
        start, factor = config.exponential_decay_length_penalty
        yield penalties.exponential_decay(int(start), factor, eos)
    if config.suppress_tokens is not None:
        yield penalties.ban(config.suppress_tokens)
    if config.begin_suppress_tokens is not None:
        yield penalties.ban(config.begin_suppress_tokens, lambda context: context.new_lengths == 0)


def _at_last_token(config: GenerationConfig, context: StepContext) -> np.ndarray:
    budgets = np.array([config.row_budget(int(length)) for length in context.prompt_lengths])
    return context.new_lengths == budgets - 1


def check_token_ids(config: GenerationConfig, vocab_size: int) -> None:
    """Refuses ids that the model does not have. EOS ids are not among them: one that never comes does no harm."""
    used = {
        "sequence_bias": [token for ids, _ in config.biases for token in ids],
        "bad_words_ids": [token for word in config.bad_words_ids or () for token in word],
        "forced_eos_token_id": config.forced_eos_token_ids,
        "suppress_tokens": config.suppress_tokens or (),
        "begin_suppress_tokens": config.begin_suppress_tokens or (),
    }
    problems = []
    for name, ids in used.items():
        outside = sorted({token for token in ids if token >= vocab_size})
        if outside:
            problems.append(f"{name}: {outside} are not among the model's token ids 0 to {vocab_size - 1}")
    if problems:
        raise ValueError("; ".join(problems))

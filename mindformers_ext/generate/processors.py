"""Everything that changes scores between the model and the choice of a token, in transformers' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.plugins import call_processor


@dataclass
class StepContext:
    """What is known of the rows before the next token is chosen. Make a new one for each step.

    Attributes:
        sequences: the real ids of each row, prompt and new tokens, no pads; R integer arrays.
        prompt_lengths: int ``[R]``, real tokens of the prompts.
        record_ids: int ``[R]``, index of the record that a row answers.
        sequence_ids: int ``[R]``, which of the record's returned sequences a row is.
        step: new tokens that the rows already have.
    """

    sequences: Sequence[np.ndarray]
    prompt_lengths: np.ndarray
    record_ids: np.ndarray
    sequence_ids: np.ndarray
    step: int

    @cached_property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row, int ``[R]``."""
        return np.fromiter(map(len, self.sequences), np.int64, len(self.sequences))

    @cached_property
    def new_lengths(self) -> np.ndarray:
        """New tokens of each row, int ``[R]``."""
        return self.lengths - self.prompt_lengths

    def padded(self, filler: int) -> np.ndarray:
        """The sequences as int64 ``[R, T]``, padded on the left."""
        longest = int(self.lengths.max(initial=0))
        ids = np.full((len(self.sequences), longest), filler, np.int64)
        ids[np.arange(longest) >= longest - self.lengths[:, None]] = np.concatenate(self.sequences)
        return ids


Processor = Callable[[np.ndarray, StepContext], np.ndarray]


class ProcessorList:
    """Processors one after another. It is false when there is nothing to do."""

    def __init__(self, processors: Sequence[Processor] = ()) -> None:
        self._processors = tuple(processors)

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
    """The processors that ``config`` asks for.

    Args:
        config: options.
        vocab_size: V, width of the scores.

    Raises:
        ValueError: an option names a token id that is not below ``vocab_size``.
    """
    processors: list[Processor] = []
    for plugin in config.logits_processor:
        processors.append(
            lambda scores, context, plugin=plugin: call_processor(plugin, context.padded(config.filler), scores)
        )
    return ProcessorList(processors)

"""Which process chooses the next token, and what it needs to see for that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.context import StepContext
from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.processors import build_processors
from mindformers_ext.generate.rows import Rows
from mindformers_ext.generate.sampler import greedy_sample, sample
from mindformers_ext.generate.topk import check_finite
from mindformers_ext.generate.warpers import num_contenders


@dataclass(frozen=True)
class Chosen:
    """The next tokens, on all processes.

    Attributes:
        tokens: int64 ``[R]``.
        logits: the model's scores float32 ``[R, V]``, where all processes have them; else None.
        scores: the same after the processors.
    """

    tokens: np.ndarray
    logits: np.ndarray | None = None
    scores: np.ndarray | None = None


class Choice:
    """Chooses tokens of rows from scores that several processes hold in parts.

    The last stage of a pipeline chooses, and the others get the tokens. Greedy decoding without processors exchanges
    the best score of each part of the vocabulary, sampling after top_k or top_h the best few; everything else joins the
    rows. Where plug-ins, log-probabilities or `watched` need the scores, all processes have the rows.

    Args:
        config: options.
        vocab_size: V.
        watched: the caller reads `Chosen.scores`.
    """

    def __init__(self, config: GenerationConfig, vocab_size: int, watched: bool = False) -> None:
        self._config = config
        self._processors = build_processors(config, vocab_size)
        plugins = bool(config.logits_processor or config.stopping_criteria)
        self._everywhere = watched or plugins or config.output_logprobs is not None
        self._num_contenders = num_contenders(config) if self._processors.only_warpers else None

    def __call__(self, logits: Logits, rows: Rows) -> Chosen:
        """Chooses a token of each row.

        Raises:
            FloatingPointError: a row has no finite score, or has nan.
        """
        if self._everywhere:
            whole = logits.whole()
            context = rows.context()
            scores = self._processors(whole, context)
            return Chosen(self._pick(scores, context), whole, scores)
        tokens = logits.shared(self._in_last_stage(logits, rows), (logits.num_rows,), np.int32)
        # An error that one stage raised alone would leave the others waiting.
        check_finite(np.where(tokens < 0, np.nan, 0))
        return Chosen(tokens.astype(np.int64))

    def _in_last_stage(self, logits: Logits, rows: Rows) -> np.ndarray | None:
        """The tokens, -1 for rows without a finite score; None in the other stages."""
        if not self._processors and not self._config.do_sample:
            return logits.best_tokens()
        if self._num_contenders is None:
            scores = logits.joined()
        else:
            scores = logits.contenders(self._num_contenders, self._config.temperature)
        if scores is None:
            return None
        context = rows.context()
        scores = self._processors(scores, context)
        finite = np.isfinite(scores.max(axis=1))
        return self._pick(scores, context) if finite.all() else np.where(finite, 0, -1)

    def _pick(self, scores: np.ndarray, context: StepContext) -> np.ndarray:
        if not self._config.do_sample:
            return greedy_sample(scores)
        assert self._config.seed is not None
        return sample(scores, context, self._config.seed)

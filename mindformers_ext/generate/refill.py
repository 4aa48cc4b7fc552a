"""Continuous batching: a row that ends is replaced by the next prompt at once.

Rows of one batch are then at different steps of their own. Everything that chooses or ends a row counts that row's
steps, so its tokens are those that it gets in any other batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np

from mindformers_ext.generate.choice import Choice, Chosen
from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.generation import (
    MOST_ALTERNATIVES,
    check_limits,
    evaluating,
    num_alternatives,
    row_budgets,
    with_one_seed,
)
from mindformers_ext.generate.logprobs import Recorded, record_logprobs
from mindformers_ext.generate.model_call import ModelCall, layout_of, pads_obstacle, run_idle
from mindformers_ext.generate.prefix import PrefixCache
from mindformers_ext.generate.rows import GeneratedRow, Rows
from mindformers_ext.generate.stats import GenerationStats
from mindformers_ext.generate.stepwise import finished_row, run_prompts, scores_of
from mindformers_ext.generate.stopping import RUNNING, DecodeNew, Stopping

# For caches that are made before it is known what they will hold.
_ANY_LENGTH = 1 << 30


def refill_obstacle(model: Any, config: GenerationConfig, num_prompts: int) -> str | None:
    """Returns why the rows of a batch of so many prompts cannot be replaced one by one, None if they can."""
    if config.num_beams > 1:
        return "the beams of a batch are ranked and moved together"
    if config.prompt_lookup_num_tokens is not None:
        return "prompt lookup takes a batch from its beginning to its end"
    if config.max_time is not None:
        return "max_time counts from the beginning of a batch"
    if layout_of(model).cp.size > 1:
        return "under context parallelism a process would come to keep more than its part of the cache"
    obstacle = pads_obstacle(model)
    if obstacle is not None:
        return obstacle
    if num_alternatives([config.row_budget(1)] * num_prompts, config) > MOST_ALTERNATIVES:
        return f"output_logprobs {config.output_logprobs} of {num_prompts} prompts may not fit into memory"
    return None


@dataclass
class _Record:
    """The answers to one prompt so far, and the log-probabilities of those that are not at their end."""

    rows: list[GeneratedRow | None]
    logprobs: list[list[Recorded]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(row is not None for row in self.rows)


class RefilledBatch:
    """A batch of rows that come and go.

    Args:
        model: see `mindformers_ext.generate.generate`.
        config: options, such that `refill_obstacle` gives None.
        num_prompts: prompts that are answered at the same time, with ``num_return_sequences`` rows each.
        stats: is added to.
        decode: ``(prompt ids, new ids) -> text of the new ids``; needed for stop strings.
        step_check: gives for each batch what is called before each of its forwards; what that raises ends it.
        prefixes: shares what prompts begin with; None computes each of them as a whole.

    Raises:
        ValueError: stop strings without ``decode``.
    """

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        num_prompts: int,
        stats: GenerationStats,
        decode: DecodeNew | None = None,
        step_check: Callable[[], Callable[[], None]] | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        config = with_one_seed(config, model)
        self._model, self._config, self._stats = model, config, stats
        self._forward: BatchForward | None = None
        self._rows: Rows | None = None
        self._logits: Logits | None = None
        self._stopping = Stopping(config, decode, layout_of(model).unit.any)
        self._step_check = step_check
        self._prefixes = prefixes
        self.reset(num_prompts)

    def reset(self, num_prompts: int) -> None:
        """Forgets the rows that are under way; from now on there are up to ``num_prompts`` prompts at a time."""
        self._close()
        self._num_prompts = num_prompts
        self._before_forward = None if self._step_check is None else self._step_check()
        self._records: dict[int, _Record] = {}

    @property
    def room(self) -> int:
        """Prompts that may be added now."""
        rows = 0 if self._rows is None else len(self._rows)
        each = self._config.num_return_sequences
        return (self._num_prompts * each - rows) // each

    def advance(
        self,
        prompts: Sequence[Sequence[int]],
        record_ids: Sequence[int],
        num_steps: int | None = None,
        more_to_come: bool = True,
    ) -> list[tuple[int, list[GeneratedRow]]]:
        """Adds prompts, and goes on until a record is done, or all are; or for some steps.

        Args:
            prompts: token ids of each, none empty, at most `room`.
            record_ids: index of each prompt's record, none of which is under way.
            num_steps: so many tokens of each row instead, whatever is done meanwhile.
            more_to_come: whether rows that end will be replaced; else the batch shrinks.

        Returns:
            Index of each record that is done, and its answers.

        Raises:
            ValueError: see `mindformers_ext.generate.generate_rows`; so FloatingPointError.
        """
        try:
            with ms._no_grad(), evaluating(self._model):
                return self._advanced(prompts, record_ids, num_steps, more_to_come)
        except Exception:
            if self._prefixes is not None:
                self._prefixes.clear()  # it may be memory that is short
            raise

    def _advanced(
        self, prompts: Sequence[Sequence[int]], record_ids: Sequence[int], num_steps: int | None, more_to_come: bool
    ) -> list[tuple[int, list[GeneratedRow]]]:
        done: list[tuple[int, list[GeneratedRow]]] = []
        steps = 0
        if prompts:
            self._admit(prompts, record_ids)
        while self._rows is not None and (steps < num_steps if num_steps is not None else not done):
            done += self._step(more_to_come)
            steps += 1
        if self._forward is None:
            run_idle(self._model)
        elif num_steps is not None:
            self._forward.finish()
        return done

    def _admit(self, prompts: Sequence[Sequence[int]], record_ids: Sequence[int]) -> None:
        """Runs prompts on their own and puts their rows behind the others."""
        config, each = self._config, self._config.num_return_sequences
        rows = Rows(prompts, record_ids, row_budgets(prompts, config))
        check_limits(self._model, prompts, rows.budgets)
        forward = BatchForward(
            ModelCall(self._model, self._before_forward) if self._forward is None else self._forward.call,
            prompts,
            _ANY_LENGTH,
            config.use_cache,
            config.prefill_chunk_size,
            fill=None if self._prefixes is None else self._prefixes.fill,
        )
        forward.limit(int((rows.prompt_lengths + rows.budgets).max()), int(rows.budgets.max()))
        logits, rows = run_prompts(forward, rows, config, self._stats)
        for record in record_ids:
            self._records[record] = _Record([None] * each, [[] for _ in range(each)])
        if self._rows is None:
            self._forward, self._logits, self._rows = forward, logits, rows
            self._choose = Choice(config, logits.vocab_size)
            return
        assert self._forward is not None and self._logits is not None
        self._rows, self._logits = self._rows.with_rows(rows), self._logits.with_rows(logits)
        totals, left = self._rows.prompt_lengths + self._rows.budgets, self._rows.budgets - self._rows.steps
        self._forward.take_in(forward, int(totals.max()), int(left.max()))

    def _step(self, more_to_come: bool) -> list[tuple[int, list[GeneratedRow]]]:
        """Gives each row one token more; returns the records that are done by it."""
        rows, forward = self._rows, self._forward
        assert rows is not None and forward is not None and self._logits is not None
        done: list[tuple[int, list[GeneratedRow]]] = []
        with self._stats.decode():
            step = self._choose(self._logits, rows)
            self._record(rows, step)
            rows.append(step.tokens)
            verdict = self._stopping.check(step.tokens, rows.steps, rows.budgets, rows.context, scores_of(step))
            running = np.flatnonzero(verdict.codes == RUNNING)
            tokens = step.tokens
            if len(running) < len(rows):
                new_tokens = rows.new_tokens()
                for row in np.flatnonzero(verdict.codes != RUNNING).tolist():
                    index, sequence = int(rows.record_ids[row]), int(rows.sequence_ids[row])
                    record = self._records[index]
                    ids = new_tokens[row, : rows.steps[row]].tolist()
                    record.rows[sequence] = finished_row(
                        ids, verdict, row, sequence, _joined(record.logprobs[sequence])
                    )
                    if record.is_done:
                        done.append((index, [answer for answer in record.rows if answer is not None]))
                        del self._records[index]
                if not len(running):
                    self._close()
                    return done
                (forward.retire if more_to_come else forward.select)(running)
                self._rows = rows = rows.select(running)
                tokens = tokens[running]
            self._logits = forward.step(tokens)
            self._stats.decode_tokens += len(rows)
        return done

    def _record(self, rows: Rows, step: Chosen) -> None:
        """Notes log-probabilities of the tokens that `rows` are about to get."""
        if self._config.output_logprobs is None:
            return
        assert step.logits is not None
        found = record_logprobs(step.logits, step.tokens, self._config.output_logprobs)
        for row, (index, sequence) in enumerate(zip(rows.record_ids.tolist(), rows.sequence_ids.tolist(), strict=True)):
            self._records[index].logprobs[sequence].append({name: values[row] for name, values in found.items()})

    def _close(self) -> None:
        """Frees the batch, of which no row is left or needed."""
        if self._forward is not None:
            self._forward.close()
            self._stats.add_forwards(self._forward.num_forwards, self._forward.cache_bytes)
        self._forward = self._rows = self._logits = None


def _joined(steps: Sequence[Recorded]) -> Recorded:
    """One row's records of all steps, from those of each."""
    return {name: np.array([step[name] for step in steps]) for name in steps[0]} if steps else {}

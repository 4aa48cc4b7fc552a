"""Greedy decoding and sampling: one token of each row a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mindformers_ext.generate.choice import Choice, Chosen
from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.logprobs import Recorded, as_fields, record_logprobs
from mindformers_ext.generate.rows import GeneratedRow, Rows
from mindformers_ext.generate.stats import GenerationStats
from mindformers_ext.generate.stopping import REASONS, RUNNING, Stopping, Verdict
from mindformers_ext.generate.streamers import Streamer

_MOST_SCORES = 2**31  # bytes that output_scores may keep


@dataclass(frozen=True)
class Loop:
    """What a loop that chooses tokens works with, besides its batch.

    Attributes:
        config: options; ``num_return_sequences`` answers are sampled for each row.
        stopping: ends rows.
        stats: is added to.
        streamer: is given the tokens of each step; a finished row's are pads, of drafts there is one row only.
        step_scores: is appended the scores after the processors of each step, float32 ``[R, V]``; a finished row's are
            nan.
    """

    config: GenerationConfig
    stopping: Stopping
    stats: GenerationStats
    streamer: Streamer | None = None
    step_scores: list[np.ndarray] | None = None


def choose_tokens(forward: BatchForward, rows: Rows, loop: Loop) -> list[GeneratedRow]:
    """Runs a batch to its end.

    Args:
        forward: the batch, nothing of it run yet.
        rows: its rows.
        loop: the rest.

    Returns:
        The answers, those of one prompt after each other.
    """
    config, stats, streamer, step_scores = loop.config, loop.stats, loop.streamer, loop.step_scores
    logits, rows = run_prompts(forward, rows, config, stats)
    choose = Choice(config, logits.vocab_size, watched=step_scores is not None)
    if step_scores is not None:
        check_room(logits.vocab_size, rows)
    answers = Answers(len(rows), int(rows.budgets.max()), config)
    while True:
        with stats.decode():
            step = choose(logits, rows)
            chosen = step.tokens
            answers.record(rows, step)
            if step_scores is not None:
                assert step.scores is not None
                step_scores.append(answers.spread(rows, step.scores, np.nan))
            rows.append(chosen)
            if streamer is not None:
                streamer.put(answers.spread(rows, chosen, config.filler))
            verdict = loop.stopping.check(chosen, rows.step, rows.budgets, rows.context, scores_of(step))
            running = np.flatnonzero(verdict.codes == RUNNING)
            if len(running) < len(rows):
                answers.finish(rows, verdict)
                if not len(running):
                    return answers.rows
                rows, chosen = rows.select(running), chosen[running]
                forward.select(running)
            logits = forward.step(chosen)
            stats.decode_tokens += len(rows)


def run_prompts(
    forward: BatchForward, rows: Rows, config: GenerationConfig, stats: GenerationStats
) -> tuple[Logits, Rows]:
    """Runs the prompts of a batch, and makes of each as many rows as it gets answers.

    Args:
        forward: the batch, nothing of it run yet.
        rows: a row for each prompt.
        config: options.
        stats: is added to.

    Returns:
        The logits that follow the rows, ``[R, V]``, and the rows; those of one prompt after each other.
    """
    with stats.prefill(int(rows.prompt_lengths.sum())):
        logits = forward.prefill()
    if config.num_return_sequences == 1:
        return logits, rows
    copies = np.repeat(np.arange(len(rows)), config.num_return_sequences)
    forward.select(copies)
    return logits.select(copies), rows.repeated(config.num_return_sequences)


def scores_of(step: Chosen) -> Callable[[], np.ndarray]:
    """Returns what gives the scores that a step's tokens were chosen from."""

    def scores() -> np.ndarray:
        assert step.scores is not None
        return step.scores

    return scores


def check_room(vocab_size: int, rows: Rows) -> None:
    """Refuses to keep more scores than memory should hold."""
    needed = len(rows) * vocab_size * 4 * int(rows.budgets.max())
    if needed > _MOST_SCORES:
        raise ValueError(
            f"output_scores would need {needed / 2**30:.1f} GiB ({len(rows)} rows, {vocab_size} tokens, "
            f"{int(rows.budgets.max())} steps), more than {_MOST_SCORES / 2**30:.0f}; use output_logprobs"
        )


class Answers:
    """What the rows got so far, by their numbers at the start.

    Args:
        num_rows: rows at the start.
        room: most new tokens of a row.
        config: options.
    """

    def __init__(self, num_rows: int, room: int, config: GenerationConfig) -> None:
        self._found: list[GeneratedRow | None] = [None] * num_rows
        self._count = config.output_logprobs
        self._room = room
        self._records: dict[str, np.ndarray] = {}

    @property
    def rows(self) -> list[GeneratedRow]:
        """The answers of all rows, once they are finished."""
        return [row for row in self._found if row is not None]

    def spread(self, rows: Rows, values: np.ndarray, filler: float) -> np.ndarray:
        """One step's ``values`` ``[R, ...]`` as those of all rows at the start; ``filler`` for the finished ones."""
        everything = np.full((len(self._found), *values.shape[1:]), filler, values.dtype)
        everything[rows.origins] = values
        return everything

    def record(self, rows: Rows, step: Chosen) -> None:
        """Notes log-probabilities of the tokens that `rows` are about to get."""
        if self._count is None:
            return
        assert step.logits is not None
        for name, values in record_logprobs(step.logits, step.tokens, self._count).items():
            if name not in self._records:
                shape = (len(self._found), self._room, *values.shape[1:])
                self._records[name] = np.zeros(shape, values.dtype)
            self._records[name][rows.origins, rows.step] = values

    def finish(self, rows: Rows, verdict: Verdict) -> None:
        """Takes the answers of the rows that `verdict` ends."""
        tokens = rows.new_tokens()
        for row in np.flatnonzero(verdict.codes != RUNNING).tolist():
            origin = int(rows.origins[row])
            records = {name: values[origin, : rows.step] for name, values in self._records.items()}
            sequence = int(rows.sequence_ids[row])
            self._found[origin] = finished_row(tokens[row].tolist(), verdict, row, sequence, records)


def finished_row(token_ids: list[int], verdict: Verdict, row: int, sequence: int, records: Recorded) -> GeneratedRow:
    """The answer of a row that a verdict ends.

    Args:
        token_ids: its new tokens.
        verdict: of the rows of a step.
        row: which of them it is.
        sequence: which of its prompt's answers it is.
        records: see `as_fields`.
    """
    reason, match = REASONS[verdict.codes[row]], verdict.matches.get(row)
    assert reason is not None
    return GeneratedRow(
        token_ids=token_ids,
        finish_reason=reason,
        stop_string=None if match is None else match.text,
        stop_position=None if match is None else match.position,
        sequence_idx=sequence,
        **as_fields(records),
    )

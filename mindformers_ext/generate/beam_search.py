"""Beam search and beam sampling, with the results of transformers' or of vLLM's definition.

A running beam's score is the sum of the log-probabilities of its new tokens, after the processors; a finished beam's is
that sum / length^length_penalty. docs/generation.md has the two definitions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.logprobs import as_fields
from mindformers_ext.generate.noise import exponential, row_keys
from mindformers_ext.generate.processors import StepContext, build_processors
from mindformers_ext.generate.rows import GeneratedRow, Rows
from mindformers_ext.generate.stats import GenerationStats
from mindformers_ext.generate.stopping import EOS, REASONS, RUNNING, Stopping
from mindformers_ext.generate.topk import log_sum_exp, top_candidates

# Arrays [L, K, ...] of the L prompts that are not done: what is known of K beams or candidates of each.
State = dict[str, np.ndarray]


def search_beams(
    forward: BatchForward, rows: Rows, config: GenerationConfig, stopping: Stopping, stats: GenerationStats
) -> list[GeneratedRow]:
    """Runs a batch to its end; one forward a step for all beams of all prompts.

    Args:
        forward: the batch, nothing of it run yet.
        rows: its rows, one for each prompt.
        config: options.
        stopping: ends beams.
        stats: is added to.

    Returns:
        The best ``num_return_sequences`` beams of each prompt, best first, one prompt after the other.

    Raises:
        FloatingPointError: fewer sequences than asked for have a finite score.
    """
    with stats.prefill(int(rows.prompt_lengths.sum())):
        logits = forward.prefill()
    search = _Search(forward, rows, config, stopping, logits.vocab_size)
    while True:
        with stats.decode():
            tokens = search.advance(logits)
            if not len(tokens):
                return search.answers()
            logits = forward.step(tokens)
            stats.decode_tokens += len(tokens)


class _Search:
    """The state of a search. At the first step each prompt has one beam, after it ``num_beams``."""

    def __init__(
        self, forward: BatchForward, rows: Rows, config: GenerationConfig, stopping: Stopping, vocab_size: int
    ) -> None:
        self._forward = forward
        self._prompt_slots = forward.length
        self._config = config
        self._stopping = stopping
        self._processors = build_processors(config, vocab_size)
        self._vllm = config.beam_score == "vllm"
        ends = max(2, 1 + len(config.eos_token_ids))
        self._num_wanted = (2 if self._vllm else ends) * config.num_beams  # candidates of a step
        self._answers: list[list[GeneratedRow]] = [[] for _ in range(len(rows))]
        self._beams = rows  # one row for each beam, those of a prompt together
        self._prompts = rows  # one row for each prompt; only the lengths, budgets and numbers are used
        room, count = int(rows.budgets.max()), config.output_logprobs
        histories: dict[str, tuple[tuple[int, ...], type]] = {"tokens": ((room,), np.int32)}
        if count is not None:
            count = min(count, vocab_size)
            histories["logprobs"] = ((room,), np.float32)
            histories["top_ids"], histories["top_logprobs"] = ((room, count), np.int32), ((room, count), np.float32)
        self._histories = tuple(histories)
        self._num_alternatives = count

        def state(beams: int) -> State:
            return {name: np.zeros((len(rows), beams, *shape), kind) for name, (shape, kind) in histories.items()}

        self._running = state(1) | {"scores": np.zeros((len(rows), 1), np.float32)}
        empty = (len(rows), config.num_beams)
        self._finished = state(config.num_beams) | {
            "scores": np.full(empty, -np.inf, np.float32),  # -inf is an empty place
            "lengths": np.zeros(empty, np.int32),
            "codes": np.zeros(empty, np.int8),
            "matches": np.full(empty, None, object),
        }

    def answers(self) -> list[GeneratedRow]:
        """The result, when every prompt is done."""
        return [row for answer in self._answers for row in answer]

    def advance(self, logits: Logits) -> np.ndarray:
        """Makes a step.

        Args:
            logits: of the beams.

        Returns:
            The newest tokens of all beams that go on, int ``[beams]``; the forward holds these beams already.
        """
        scores, offsets = self._log_probabilities(logits)
        sums, parents, tokens = self._candidates(scores, offsets)
        records = self._recorded(scores, offsets, sums, parents) | {"tokens": tokens}
        codes, matches = self._judge(scores, parents, tokens)
        rank = np.argsort(codes != RUNNING, axis=1, kind="stable")[:, : self._config.num_beams]
        chosen = _pick({"parents": parents, "scores": np.where(codes == RUNNING, sums, -np.inf), **records}, rank)
        self._finish(sums, parents, records, codes, matches)
        step = self._beams.step
        running = self._extended(chosen["parents"], chosen) | {"scores": chosen["scores"]}
        alive = np.flatnonzero(~self._done(running["scores"][:, 0], step + 1))
        self._settle(np.setdiff1d(np.arange(len(self._prompts)), alive))
        if not len(alive):
            return alive
        if len(alive) < len(self._prompts):
            self._drop(alive)
            chosen, running = ({name: values[alive] for name, values in s.items()} for s in (chosen, running))
        self._move(chosen["parents"], running)
        newest = running["tokens"][:, :, step].reshape(-1)
        self._beams.append(newest)
        return newest

    def _log_probabilities(self, logits: Logits) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities as ``scores - offsets``, float32 ``[beams, V]`` and ``[beams, 1]``.

        Subtracting from a few candidates instead of everything spares a pass over the vocabulary. On several processes
        all scores but the candidates are -inf where nothing else reads them.
        """
        config = self._config
        plain = not len(self._processors) and not config.do_sample
        if plain and not config.stopping_criteria and logits.is_split:
            return logits.ranked(max(self._num_wanted, self._num_alternatives or 0))
        whole = logits.whole()
        normaliser = log_sum_exp(whole)
        if not len(self._processors):
            return whole, normaliser
        scores = self._processors(whole - normaliser, self._beams.context())
        if np.isnan(scores.max(axis=1)).any():
            raise FloatingPointError("a processor gave nan for the next token of a beam")
        return scores, np.zeros_like(normaliser)

    def _candidates(self, scores: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The candidates of each prompt among all its beams' tokens, best first.

        Returns:
            Sums of log-probabilities float32 ``[L, K]`` (-inf where there is no candidate), the beams that they extend
            and the tokens, int64 ``[L, K]``.
        """
        num_prompts, num_beams = self._running["scores"].shape
        wanted = self._num_wanted
        running = self._running["scores"].reshape(-1, 1)
        if self._config.do_sample:
            return self._draw(scores - offsets + running, wanted)
        values, tokens = top_candidates(scores, wanted)
        sums = (values - offsets + running).reshape(num_prompts, -1)
        tokens = tokens.reshape(num_prompts, -1)
        parents = np.repeat(np.arange(num_beams), values.shape[1])
        # vLLM looks at the best of each beam, transformers at the best of all.
        kept = sums.shape[1] if self._vllm else min(wanted, sums.shape[1])
        order = np.argsort(-sums, axis=1, kind="stable")[:, :kept]
        return self._filled(np.take_along_axis(sums, order, 1), parents[order], np.take_along_axis(tokens, order, 1))

    def _draw(self, sums: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws candidates without replacement from the softmax of the sums ``[beams, V]``; see `_candidates`."""
        num_prompts, vocab_size = len(self._prompts), sums.shape[1]
        assert self._config.seed is not None
        beams, tokens = np.nonzero(sums > -np.inf)
        keys = row_keys(self._config.seed, self._beams.record_ids, self._beams.sequence_ids, self._beams.step)
        noisy = np.full(sums.shape, -np.inf)
        noisy[beams, tokens] = sums[beams, tokens] - np.log(exponential(keys[beams], tokens[:, None])[:, 0])
        _, drawn = top_candidates(noisy.reshape(num_prompts, -1), wanted)
        values = np.take_along_axis(sums.reshape(num_prompts, -1), drawn, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        drawn = np.take_along_axis(drawn, order, axis=1)
        return self._filled(np.take_along_axis(values, order, axis=1), drawn // vocab_size, drawn % vocab_size)

    def _filled(self, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Adds empty candidates where a small vocabulary has fewer than there are beams."""
        missing = max(self._config.num_beams - arrays[0].shape[1], 0)
        sums, parents, tokens = (np.pad(array, ((0, 0), (0, missing))) for array in arrays)
        if missing:
            sums[:, -missing:] = -np.inf
        return sums, parents, tokens

    def _recorded(self, scores: np.ndarray, offsets: np.ndarray, sums: np.ndarray, parents: np.ndarray) -> State:
        """Log-probabilities of the candidates and of the best tokens beside them."""
        if self._num_alternatives is None:
            return {}
        values, ids = top_candidates(scores, self._num_alternatives)
        shape = (*self._running["scores"].shape, -1)
        beside = {"top_ids": ids.reshape(shape), "top_logprobs": (values - offsets).reshape(shape)}
        before = np.take_along_axis(self._running["scores"], parents, axis=1)
        with np.errstate(invalid="ignore"):  # -inf of an empty beam
            return {"logprobs": sums - before, **_pick(beside, parents)}

    def _judge(self, scores: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which candidates are at their end, codes int8 ``[L, K]``, and the stop strings in them."""
        sources = (np.arange(len(parents))[:, None] * self._running["scores"].shape[1] + parents).reshape(-1)

        def context() -> StepContext:
            rows = self._beams.select(sources)
            rows.append(tokens.reshape(-1))
            return rows.context()

        verdict = self._stopping.check(
            tokens.reshape(-1),
            self._beams.step + 1,
            np.repeat(self._prompts.budgets, parents.shape[1]),
            context,
            lambda: scores[sources],
        )
        matches = np.full(tokens.size, None, object)
        for row, match in verdict.matches.items():
            matches[row] = match
        return verdict.codes.reshape(parents.shape), matches.reshape(parents.shape)

    def _finish(
        self, sums: np.ndarray, parents: np.ndarray, records: State, codes: np.ndarray, matches: np.ndarray
    ) -> None:
        """Puts candidates that are at their end among the finished beams, of which the best stay."""
        num_beams, length = self._config.num_beams, self._beams.step + 1
        eligible = slice(None) if self._vllm else slice(num_beams)  # transformers: only from the first ranks
        codes = codes[:, eligible]
        if not codes.any():
            return
        lengths = np.full(codes.shape, length)
        divisors = lengths
        if self._vllm:
            divisors = self._prompts.prompt_lengths[:, None] + lengths - (codes == EOS)
        scores = sums[:, eligible] / _power(divisors, self._config.length_penalty)
        new = self._extended(parents[:, eligible], {name: values[:, eligible] for name, values in records.items()})
        new["scores"] = np.where(codes != RUNNING, scores, -np.inf).astype(np.float32)
        new |= {"lengths": lengths, "codes": codes, "matches": matches[:, eligible]}
        merged = {name: np.concatenate((self._finished[name], new[name]), axis=1) for name in self._finished}
        self._finished = _pick(merged, np.argsort(-merged["scores"], axis=1, kind="stable")[:, :num_beams])

    def _extended(self, parents: np.ndarray, newest: State) -> State:
        """The histories of the beams ``parents`` ``[L, K]`` with one step more."""
        state = _pick({name: self._running[name] for name in self._histories}, parents)
        for name, values in state.items():
            values[:, :, self._beams.step] = newest[name]
        return state

    def _done(self, best: np.ndarray, length: int) -> np.ndarray:
        """Which prompts are done, bool ``[L]``.

        Args:
            best: sums of their best beams that could go on, ``[L]``.
            length: new tokens so far.
        """
        if self._vllm:
            return np.isneginf(best)
        penalty, stop_early = self._config.length_penalty, self._config.early_stopping
        lengths = self._prompts.budgets if stop_early == "never" and penalty > 0 else np.full(len(best), length)
        worst = self._finished["scores"].min(axis=1)  # -inf while a place is empty
        done = ~(best / _power(lengths, penalty) > worst)
        return done | np.isfinite(worst) if stop_early is True else done

    def _settle(self, done: np.ndarray) -> None:
        """Writes down the answers of the prompts ``done``."""
        count, finished = self._config.num_return_sequences, self._finished
        found = np.isfinite(finished["scores"][done]).sum(axis=1)
        if (found < count).any():
            origins = self._prompts.origins[done][found < count].tolist()
            raise FloatingPointError(f"fewer than {count} sequences of rows {origins} have a finite score")
        for prompt in done.tolist():
            rows = [
                self._answer({name: values[prompt, i] for name, values in finished.items()}, i) for i in range(count)
            ]
            self._answers[self._prompts.origins[prompt]] = rows

    def _answer(self, beam: dict[str, Any], index: int) -> GeneratedRow:
        length, match, reason = int(beam["lengths"]), beam["matches"], REASONS[beam["codes"]]
        assert reason is not None
        records = {name: beam[name][:length] for name in self._histories if name != "tokens"}
        return GeneratedRow(
            token_ids=beam["tokens"][:length].tolist(),
            finish_reason=reason,
            stop_string=None if match is None else match.text,
            stop_position=None if match is None else match.position,
            sequence_idx=index,
            score=float(beam["scores"]),
            **as_fields(records),
        )

    def _drop(self, alive: np.ndarray) -> None:
        """Forgets all prompts but ``alive``."""
        num_beams = self._running["scores"].shape[1]
        rows = (alive[:, None] * num_beams + np.arange(num_beams)).reshape(-1)
        self._forward.select(rows)
        self._beams, self._prompts = self._beams.select(rows), self._prompts.select(alive)
        self._running = {name: values[alive] for name, values in self._running.items()}
        self._finished = {name: values[alive] for name, values in self._finished.items()}

    def _move(self, parents: np.ndarray, running: State) -> None:
        """Makes ``running`` the beams, which extend ``parents`` ``[L, num_beams]`` of the present ones."""
        num_prompts, num_before = self._running["scores"].shape
        sources = (np.arange(num_prompts)[:, None] * num_before + parents).reshape(-1)
        shared = 0
        if len(sources) == len(self._beams):
            old = self._running["tokens"][:, :, : self._beams.step].reshape(len(sources), -1)
            differs = (old != old[sources]).any(axis=0)
            shared = self._prompt_slots + (int(differs.argmax()) if differs.any() else self._beams.step)
        self._forward.select(sources, shared)
        self._beams = self._beams.select(sources)
        self._beams.sequence_ids = np.tile(np.arange(parents.shape[1]), num_prompts)
        self._running = running


def _pick(state: State, indices: np.ndarray) -> State:
    """Takes entries ``indices`` ``[L, K]`` along the second axis of every array."""
    prompts = np.arange(len(indices))[:, None]
    return {name: values[prompts, indices] for name, values in state.items()}


def _power(lengths: np.ndarray, exponent: float) -> np.ndarray:
    """``lengths ** exponent`` as float32, which the float32 sums are divided by."""
    return (lengths.astype(np.float64) ** exponent).astype(np.float32)

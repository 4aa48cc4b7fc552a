"""What processes exchange to choose a token leads to the tokens of one process, whatever the size of the vocabulary."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_ext.generate.choice import Choice
from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.gathering import Logits
from mindformers_ext.generate.rows import Rows
from mindformers_ext.generate.topk import log_sum_exp, top_candidates
from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.groups import single
from mindformers_ext.parallel.plan import split_evenly


class Exchange(Group):
    """A group whose members are threads of this process; it counts the bytes that a member sends."""

    def __init__(self, name, size, rank, slots, barrier):
        super().__init__(name, range(size), rank)
        self._slots, self._barrier = slots, barrier

    def _exchanged(self, x):
        self._slots[self.rank] = x
        self._barrier.wait()
        everything = [np.array(slot) for slot in self._slots]
        self._barrier.wait()
        return everything

    def all_gather(self, x):
        self.traffic.add("all_gather", self.name, (self.size - 1) * x.nbytes)
        return np.stack(self._exchanged(x)) if self.size > 1 else x[None]

    def broadcast(self, x, source):
        self.traffic.add("broadcast", self.name, (self.size - 1) * x.nbytes if self.rank == source else 0)
        return self._exchanged(x)[source] if self.size > 1 else x


def on_processes(scores, tp, pp, use):
    """Runs ``use(logits)`` on tp x pp threads; returns what each gave, by stage and part, and the bytes it sent."""
    results, errors = {}, []
    slots = {("tp", s): [None] * tp for s in range(pp)} | {("pp", t): [None] * pp for t in range(tp)}
    barriers = {name: threading.Barrier(len(members), timeout=60) for name, members in slots.items()}

    def run(stage, part):
        begin, end = split_evenly(scores.shape[1], tp, part)
        groups = SimpleNamespace(
            tp=Exchange("tp", tp, part, slots["tp", stage], barriers["tp", stage]),
            pp=Exchange("pp", pp, stage, slots["pp", part], barriers["pp", part]),
        )
        local = np.ascontiguousarray(scores[:, begin:end]) if stage == pp - 1 else None
        try:
            found = use(Logits(local, len(scores), scores.shape[1], groups))
        except Exception as error:
            found = error
            errors.append(error)
        sent = {name: getattr(groups, name).traffic.total().bytes for name in ("tp", "pp")}
        results[stage, part] = found, sent

    threads = [threading.Thread(target=run, args=(stage, part)) for stage in range(pp) for part in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(results) == tp * pp
    return results


def alone(scores, use):
    return use(Logits(scores, len(scores), scores.shape[1], single()))


def rows_of(count):
    return Rows([[1, 2]] * count, range(count), [4] * count)


def chooser(config, vocab):
    return lambda logits: Choice(config, vocab)(logits, rows_of(logits.num_rows)).tokens.tolist()


OPTIONS = {
    "greedy": {},
    "top_k": {"do_sample": True, "top_k": 5},
    "top_k of few scores with a temperature": {"do_sample": True, "top_k": 3, "temperature": 0.7},
    "top_k, top_p and min_p": {"do_sample": True, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    "top_k and the filters after it": {"do_sample": True, "top_k": 20, "typical_p": 0.9, "epsilon_cutoff": 0.02},
    "top_h": {"do_sample": True, "top_k": 0, "top_h": 0.5},
    "everything": {"do_sample": True, "top_k": 0},
    "a penalty": {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3},
    "log-probabilities": {"do_sample": True, "top_k": 5, "output_logprobs": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_every_process_gets_the_tokens_of_one_process(options, tp, pp):
    config = GenerationConfig(seed=3, **options)
    for vocab in (61, 1500):
        scores = np.random.default_rng(vocab).normal(scale=3, size=(6, vocab)).astype(np.float32)
        expected = alone(scores, chooser(config, vocab))
        found = {tuple(tokens) for tokens, _ in on_processes(scores, tp, pp, chooser(config, vocab)).values()}
        assert found == {tuple(expected)}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    levels=st.integers(1, 6),
    top_k=st.integers(1, 12),
    temperature=st.sampled_from([1.0, 0.7, 1.9]),
)
def test_ties_at_the_border_of_top_k_change_nothing(seed, levels, top_k, temperature):
    scores = np.random.default_rng(seed).integers(0, levels, (4, 130)).astype(np.float32)
    config = GenerationConfig(do_sample=True, seed=seed, top_k=top_k, temperature=temperature)
    expected = alone(scores, chooser(config, 130))
    for tokens, _ in on_processes(scores, 2, 1, chooser(config, 130)).values():
        assert tokens == expected


def test_scores_that_the_division_by_the_temperature_makes_equal_are_all_contenders():
    low = np.float32(1.9)
    high = np.nextafter(low, np.float32(2))
    temperature = next(t for t in np.arange(1.5, 4, 0.01) if low / np.float32(t) == high / np.float32(t))
    scores = np.full((1, 100), -5, np.float32)
    scores[0, [10, 60]], scores[0, 70] = low, high  # ids 10 | 60 and 70 on two parts
    kept = on_processes(scores, 2, 1, lambda logits: logits.contenders(1, float(temperature)))
    for rows, _ in kept.values():
        # Within the first part both are at the border, which therefore is not known to be complete.
        np.testing.assert_array_equal(np.maximum(rows, -5), scores)


def test_what_a_part_sends_does_not_depend_on_the_vocabulary():
    for options in ({}, {"do_sample": True, "top_k": 20, "top_p": 0.9}):
        config = GenerationConfig(seed=3, **options)
        sent = set()
        for vocab in (512, 4096):
            scores = np.random.default_rng(vocab).normal(size=(6, vocab)).astype(np.float32)
            results = on_processes(scores, 2, 2, chooser(config, vocab))
            sent.add(tuple((place, *counts.items()) for place, (_, counts) in sorted(results.items())))
        assert len(sent) == 1


def test_greedy_parts_send_one_value_and_one_id_a_row():
    scores = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    for _, sent in on_processes(scores, 3, 1, chooser(GenerationConfig(), 300)).values():
        assert sent["tp"] == 2 * 6 * 8


def test_only_a_number_a_row_goes_back_to_the_other_stages():
    for options in OPTIONS.values():
        if "output_logprobs" in options:
            continue
        config = GenerationConfig(seed=3, **options)
        scores = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
        results = on_processes(scores, 1, 2, chooser(config, 300))
        assert [results[stage, 0][1]["pp"] for stage in (0, 1)] == [0, 6 * 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, "nothing"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}, {"repetition_penalty": 1.2}])
def test_a_row_without_finite_scores_is_the_same_error_on_all_processes(bad, options):
    scores = np.random.default_rng(1).normal(size=(3, 200)).astype(np.float32)
    if bad == "nothing":
        scores[1] = -np.inf
    else:
        scores[1, 150] = bad
    config = GenerationConfig(seed=3, **options)
    for found, _ in on_processes(scores, 2, 2, chooser(config, 200)).values():
        assert isinstance(found, FloatingPointError)
        assert "rows [1]" in str(found)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 2)])
def test_beams_get_the_same_candidates_and_the_same_normaliser(tp, pp):
    for scores in (
        np.random.default_rng(5).normal(scale=4, size=(4, 400)).astype(np.float32),
        np.random.default_rng(6).integers(0, 3, (4, 400)).astype(np.float32),
    ):
        values, ids = top_candidates(scores, 8)
        for (rows, offsets), sent in on_processes(scores, tp, pp, lambda logits: logits.ranked(8)).values():
            np.testing.assert_allclose(offsets, log_sum_exp(scores), rtol=1e-6)
            ours, our_ids = top_candidates(rows, 8)
            np.testing.assert_array_equal(ours, values)
            np.testing.assert_array_equal(our_ids, ids)
            assert sent["tp"] <= (tp - 1) * 4 * (2 * 8 + 1) * 4
    spoiled = scores.copy()
    spoiled[2, 399] = np.nan
    for found, _ in on_processes(spoiled, tp, pp, lambda logits: logits.ranked(8)).values():
        assert isinstance(found, FloatingPointError)

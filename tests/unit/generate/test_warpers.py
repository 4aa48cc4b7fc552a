"""Filters of sampling: transformers' golden vectors, and plain numpy for everything else."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rowtools import GOLDEN, kept, process

from mindformers_ext.generate import GenerationConfig, warpers
from mindformers_ext.generate.processors import build_processors

OFF = {"do_sample": True, "top_k": 0}
fast = settings(max_examples=150, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"top_p": 0.65}, [0, 1]),
        ({"min_p": 0.25}, [0, 1, 2, 3]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"top_h": 0.5}, [0, 1]),
        ({"typical_p": 0.3}, [1, 2]),
        ({"typical_p": 0.6}, [0, 1, 2]),
        ({"epsilon_cutoff": 0.1}, [0, 1, 2, 3]),
        ({"epsilon_cutoff": 0.05}, [0, 1, 2, 3, 4]),
        ({"eta_cutoff": 0.3}, [0, 1, 2]),
        ({"eta_cutoff": 0.05}, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_golden_vectors(options, expected):
    assert kept(process(OFF | options, GOLDEN)) == [expected]


@pytest.mark.parametrize(
    ("options", "scores", "expected"),
    [
        ({"top_p": 0.8}, np.log([0.3, 0.1, 0.1, 0.5]), [0, 3]),
        ({"top_k": 2}, [1, 3, 3, 3, 2], [1, 2, 3]),
        ({"top_p": 0.0}, [1, 3, 3, 3, 2], [3]),
        ({"top_p": 0.5}, [1, 1, 1, 1], [2, 3]),
        ({"top_k": 2, "top_p": 0.5}, np.log([0.1, 0.2, 0.3, 0.4]), [3]),
        ({"top_k": 100}, [1, 2], [0, 1]),
        ({"top_k": -1}, [1, 2], [0, 1]),
    ],
    ids=str,
)
def test_ties_borders_and_order_of_filters(options, scores, expected):
    assert kept(process(OFF | options, scores)) == [expected]


def test_temperature_comes_before_the_filters():
    probs = np.array([0.5, 0.3, 0.2])
    squared = probs**2 / (probs**2).sum()  # temperature 0.5
    assert squared[0] < 0.7 < squared[0] + squared[1]
    assert kept(process(OFF | {"temperature": 0.5, "top_p": 0.7}, np.log(probs))) == [[0, 1]]
    assert kept(process(OFF | {"temperature": 0.5, "top_p": 0.65}, np.log(probs))) == [[0]]


def test_a_filter_sees_the_probabilities_that_the_one_before_has_left():
    # Of the two tokens that top_p leaves the second has 0.385, of all it has 0.25.
    assert kept(process(OFF | {"top_p": 0.6, "epsilon_cutoff": 0.38}, GOLDEN)) == [[0, 1]]
    assert kept(process(OFF | {"epsilon_cutoff": 0.38}, GOLDEN)) == [[0]]


@pytest.mark.parametrize("value", [1e-4, 1e-8, 1e-38])
def test_a_temperature_near_zero_is_greedy_and_finite(value):
    scores = process(OFF | {"temperature": value, "top_p": 0.9}, [[-80.0, 80.0, 79.5, 0.0], [3.0, -80.0, 2.5, -60.0]])
    assert kept(scores) == [[1], [0]]
    assert not np.isnan(scores).any()


def test_sampling_options_do_nothing_in_greedy_decoding():
    assert not build_processors(GenerationConfig(temperature=2.0, top_k=1, top_p=0.1, min_p=0.5), 6)


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"])
@pytest.mark.parametrize(("eos", "least"), [(None, 2), (2, 2), ([2, 3], 3)])
def test_beam_sampling_keeps_a_token_beside_every_eos(name, eos, least):
    scores = [0.0, 9.0, 1.0, 2.0, 3.0, 4.0]
    options = OFF | {name: 0.999 if name in ("min_p", "epsilon_cutoff", "eta_cutoff") else 0.001, "num_beams": 2}
    assert len(kept(process(options | {"eos_token_id": eos}, scores))[0]) == least
    assert len(kept(process(OFF | {"top_k": 1, "num_beams": 2, "eos_token_id": eos}, scores))[0]) == least


def test_renormalised_scores_are_log_probabilities():
    scores = process({"renormalize_logits": True}, [[1.0, 2.0, -np.inf], [500.0, 500.0, 500.0]])
    np.testing.assert_allclose(np.exp(scores).sum(axis=1), 1, rtol=1e-6)
    assert kept(scores) == [[0, 1], [0, 1, 2]]


# Every filter beside a plain implementation in float64. `margin` is the distance to the nearest decision: on the border
# itself rounding decides, and the golden vectors above say how.


def probabilities(row):
    shifted = np.exp(row.astype(np.float64) - row.max())
    return shifted / shifted.sum()


def plain_top_k(row, k):
    return set(np.flatnonzero(row >= np.sort(row)[::-1][min(k, len(row)) - 1])), 1.0


def plain_top_p(row, p):
    probs = probabilities(row)
    order = np.argsort(row, kind="stable")
    mass = np.cumsum(probs[order])
    removed = mass <= 1 - p
    removed[-1] = False
    return set(order[~removed]), np.abs(mass - (1 - p)).min()


def plain_min_p(row, share):
    probs = probabilities(row)
    return set(np.flatnonzero(probs >= share * probs.max())), np.abs(probs - share * probs.max()).min()


def plain_typical(row, mass):
    probs = probabilities(row)
    surprise = np.where(probs > 0, -np.log(np.where(probs > 0, probs, 1)), np.inf)
    entropy = (probs[probs > 0] * surprise[probs > 0]).sum()
    distance = np.abs(surprise - entropy)
    covered = np.cumsum(probs[np.argsort(distance, kind="stable")])
    last = min(int((covered < mass).sum()), len(row) - 1)
    border = np.sort(distance)[last]
    near = np.abs(np.subtract.outer(distance[distance < np.inf], [border])).ravel()
    # Tokens of equal probability have equal distances; any other two must not be confused.
    gap = np.append(near[near > 0], 1.0).min()
    return set(np.flatnonzero(distance <= border)), min(np.abs(covered - mass).min(), gap)


def plain_epsilon(row, bound):
    probs = probabilities(row)
    return set(np.flatnonzero((probs >= bound) | (row == row.max()))), np.abs(probs - bound).min()


def plain_eta(row, eta):
    probs = probabilities(row)
    entropy = -(probs[probs > 0] * np.log(probs[probs > 0])).sum()
    return plain_epsilon(row, min(eta, np.sqrt(eta) * np.exp(-entropy)))


def plain_top_h(row, share):
    order = np.argsort(-row, kind="stable")[:100]
    probs = probabilities(row[order])
    parts = np.where(probs > 0, -probs * np.log(np.where(probs > 0, probs, 1)), 0)
    spent = np.cumsum(parts)
    chosen = spent <= share * parts.sum()
    chosen[0] = True
    finite = [token for token in order[chosen] if row[token] > -np.inf]
    return set(finite), np.abs(spent - share * parts.sum()).min() if share < 1 else 1.0


FILTERS = {
    "top_k": (plain_top_k, warpers.top_k, st.integers(1, 40)),
    "top_p": (plain_top_p, warpers.top_p, st.floats(0, 0.999)),
    "min_p": (plain_min_p, warpers.min_p, st.floats(0, 1)),
    "typical": (plain_typical, warpers.typical, st.floats(0.01, 0.99)),
    "epsilon": (plain_epsilon, warpers.epsilon_cutoff, st.floats(0.0001, 0.9)),
    "eta": (plain_eta, warpers.eta_cutoff, st.floats(0.0001, 0.9)),
    "top_h": (plain_top_h, warpers.top_h, st.floats(0.01, 0.99)),
}
# Multiples of a quarter: equal scores are frequent, and equal in float32 too.
score = st.integers(-20, 20).map(lambda value: value / 4) | st.just(-np.inf)


def check(plain, warper, rows, value):
    scores = np.array(rows, np.float32)
    expected = [plain(row, value) for row in scores]
    assume(all(margin > 1e-5 for _, margin in expected))
    result = warper(scores.copy(), value)
    for row, left, before, (tokens, _) in zip(result, kept(result), scores, expected, strict=True):
        assert set(left) == {token for token in tokens if before[token] > -np.inf}
        assert left, "at least one token stays"
        assert (row[left] == before[left]).all()


@pytest.mark.parametrize("name", FILTERS)
@fast
@given(data=st.data())
def test_filters_agree_with_plain_numpy_on_short_rows(name, data):
    plain, warper, values = FILTERS[name]
    size = data.draw(st.integers(1, 12))
    row = st.lists(score, min_size=size, max_size=size).filter(lambda row: max(row) > -np.inf)
    check(plain, warper, data.draw(st.lists(row, min_size=1, max_size=3)), data.draw(values))


@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_filters_agree_with_plain_numpy_on_long_rows(name, data):
    plain, warper, values = FILTERS[name]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    size = data.draw(st.sampled_from([1023, 1024, 5000, 9001]))
    rows = rng.normal(size=(2, size)) * data.draw(st.sampled_from([0.1, 1, 3, 8]))
    if data.draw(st.booleans()):
        rows = np.round(rows * 4) / 4
    rows[rng.random(rows.shape) < data.draw(st.sampled_from([0, 0.5, 0.99]))] = -np.inf
    rows[:, 7] = 3.0
    value = data.draw(values)
    if name == "top_p":
        # Long rows have many small steps; compare the masses instead of asking for a margin.
        check_top_p_mass(rows.astype(np.float32), value)
    else:
        check(plain, warper, rows, value)


def check_top_p_mass(scores, p):
    for row, left in zip(scores, kept(warpers.top_p(scores.copy(), p)), strict=True):
        probs = probabilities(row)
        chosen = probs[left].sum()
        assert chosen >= p - 1e-5
        assert chosen - probs[left].min() <= p + 1e-5 or len(left) == 1
        removed = np.setdiff1d(np.flatnonzero(row > -np.inf), left)
        assert not removed.size or row[removed].max() <= row[left].min()


@fast
@given(data=st.data())
def test_a_chain_of_filters_is_the_same_on_candidates_as_on_whole_rows(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scores = (rng.normal(size=(3, 3000)) * 3).astype(np.float32)
    options = OFF | {"top_k": 30, "temperature": 0.8, "top_p": data.draw(st.floats(0.1, 0.9)), "min_p": 0.05}
    step_by_step = warpers.top_k(warpers.temperature(scores.copy(), 0.8), 30)
    step_by_step = warpers.min_p(warpers.top_p(step_by_step, options["top_p"]), 0.05)
    assert kept(process(options, scores, [[0]] * 3)) == kept(step_by_step)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("bad", [-np.inf, np.nan])
@pytest.mark.parametrize("size", [5, 4000])
@pytest.mark.filterwarnings("error")
def test_a_hopeless_row_disturbs_no_other_row_and_gains_no_token(name, bad, size):
    rng = np.random.default_rng(1)
    good = rng.normal(size=(1, size)).astype(np.float32)
    value = 2 if name == "top_k" else 0.3
    alone = FILTERS[name][1](good.copy(), value)
    together = FILTERS[name][1](np.concatenate([np.full_like(good, bad), good]), value)
    assert (together[1] == alone[0]).all()
    assert not np.isfinite(together[0]).any()


def test_scores_that_are_given_stay_as_they_are():
    scores = GOLDEN.copy()
    process(OFF | {"top_k": 2, "repetition_penalty": 3.0, "temperature": 0.5}, scores)
    assert (scores == GOLDEN).all()

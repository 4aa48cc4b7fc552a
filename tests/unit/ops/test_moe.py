"""Routing and experts: every implementation gives the same, with right gradients."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.ops import moe, native

N, E, H, F = 7, 8, 20, 12
ROUTINGS = {
    "softmax": ops.Routing(2),
    "softmax without norm": ops.Routing(3, normalise=False),
    "sigmoid in groups": ops.Routing(2, "sigmoid", scale=2.5, groups=4, group_top_k=2),
    "groups of one": ops.Routing(2, "sigmoid", groups=8, group_top_k=3),
    "square root of softplus": ops.Routing(4, "sqrtsoftplus", scale=1.5),
}


@pytest.fixture
def generator():
    return np.random.default_rng(3)


def random(generator, *shape):
    return generator.standard_normal(shape, dtype=np.float32)


def plain_choice(logits, routing, bias):
    """The rule of DeepSeek-V3 and its special cases, one token at a time."""
    functions = {
        "softmax": lambda x: np.exp(x) / np.exp(x).sum(),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
    }
    ids, weights = [], []
    for row in logits.astype(np.float64):
        scores = functions[routing.score_function](row)
        ranked = scores + bias
        groups = np.split(ranked, routing.groups)
        best = sorted(range(routing.groups), key=lambda g: -np.sort(groups[g])[-2:].sum())[: routing.group_top_k]
        allowed = [e for e in range(E) if e // (E // routing.groups) in best]
        chosen = sorted(allowed, key=lambda e: -ranked[e])[: routing.top_k]
        weight = scores[chosen] / (scores[chosen].sum() if routing.normalise else 1)
        ids.append(chosen)
        weights.append(weight * routing.scale)
    return np.array(ids), np.array(weights)


@pytest.mark.parametrize("recorded", [False, True], ids=["predict", "train"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_rule_chooses_and_weighs_as_written_down(generator, name, recorded, monkeypatch):
    monkeypatch.setattr(moe, "recording_gradient", lambda: recorded)
    logits, bias = 3 * random(generator, N, E), 0.3 * random(generator, E)
    ids, weights = ops.route(Tensor(logits), ROUTINGS[name], Tensor(bias))
    expected_ids, expected_weights = plain_choice(logits, ROUTINGS[name], bias)
    np.testing.assert_array_equal(ids.asnumpy(), expected_ids)
    np.testing.assert_allclose(weights.asnumpy(), expected_weights, rtol=1e-5)


@pytest.mark.parametrize("recorded", [False, True], ids=["predict", "train"])
def test_pads_get_no_expert_and_a_given_choice_is_kept(generator, recorded, monkeypatch):
    monkeypatch.setattr(moe, "recording_gradient", lambda: recorded)
    logits, real = random(generator, N, E), np.array([False, True, True, False, True, True, True])
    chosen = np.tile(np.array([[5, 2]], np.int32), (N, 1))
    ids, weights = ops.route(Tensor(logits), ROUTINGS["softmax"], None, chosen, real)
    np.testing.assert_array_equal(ids.asnumpy(), np.where(real[:, None], chosen, -1))
    picked = np.exp(logits[:, [5, 2]])
    np.testing.assert_allclose(weights.asnumpy(), picked / picked.sum(1, keepdims=True), rtol=1e-5)


def test_equal_scores_go_to_the_lower_expert():
    ids, _ = ops.route(Tensor(np.zeros((1, E), np.float32)), ops.Routing(3))
    assert ids.asnumpy().tolist() == [[0, 1, 2]]


def expert_inputs(generator, count=N, top_k=2, ffn=F):
    ids = generator.random((count, E)).argsort(1)[:, :top_k].astype(np.int32)
    arrays = (
        random(generator, count, H),
        ids,
        np.abs(random(generator, count, top_k)),
        random(generator, E, H, 2 * ffn),
        random(generator, E, ffn, H),
    )
    return arrays


def plain_experts(x, ids, factors, weight1, weight2, limit):
    out = np.zeros(x.shape)
    for row, chosen in enumerate(ids):
        for place, expert in enumerate(chosen):
            if expert >= 0:
                gate, up = np.split(x[row].astype(np.float64) @ weight1[expert], 2)
                if limit:
                    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                out[row] += factors[row, place] * ((gate / (1 + np.exp(-gate)) * up) @ weight2[expert])
    return out


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("ffn", [1, 12, 80, 131])
@pytest.mark.parametrize("count", [1, 2, 7, 90])
@pytest.mark.parametrize("way", ["native", "host", "reference"])
def test_experts_equal_one_token_after_the_other(generator, way, count, ffn, limit):
    if way == "native" and not native.available():
        pytest.skip("no compiler")
    arrays = expert_inputs(generator, count, ffn=ffn)
    arrays[1][0, 0] = -1
    x, ids, factors, weight1, weight2 = map(Tensor, arrays)
    if way == "native":
        got = native.experts(x, moe.sort_by_expert(arrays[1], E), factors, weight1, weight2, limit)
    else:
        got = {"host": moe._host_experts, "reference": moe._reference_experts}[way](
            x, ids, factors, weight1, weight2, limit
        )
    expected = plain_experts(*arrays, limit)
    np.testing.assert_allclose(got.asnumpy(), expected, atol=2e-5 * np.abs(expected).max())


def test_a_token_gets_the_same_bits_whatever_its_neighbours(generator):
    if not native.available():
        pytest.skip("no compiler")
    x, ids, factors, weight1, weight2 = expert_inputs(generator, 40, ffn=80)
    ids[:, 0], ids[:, 1] = 3, 6
    whole = ops.experts(*map(Tensor, (x, ids, factors, weight1, weight2))).asnumpy()
    for row in (0, 17, 39):
        single = (part[row : row + 1].copy() for part in (x, ids, factors))
        np.testing.assert_array_equal(ops.experts(*map(Tensor, (*single, weight1, weight2))).asnumpy()[0], whole[row])


def test_no_real_token_gives_zeros(generator):
    x, ids, *rest = expert_inputs(generator)
    ids[:] = -1
    assert not ops.experts(*map(Tensor, (x, ids, *rest))).asnumpy().any()


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_gradients_of_experts_equal_those_of_the_reference(generator, limit):
    x, ids, factors, weight1, weight2 = map(Tensor, expert_inputs(generator))
    mix = Tensor(random(generator, N, H))

    def gradients(function):
        def total(x, factors, weight1, weight2):
            return (function(x, ids, factors, weight1, weight2, limit) * mix).sum()

        return ms.grad(total, (0, 1, 2, 3))(x, factors, weight1, weight2)

    for ours, reference in zip(gradients(ops.experts), gradients(moe._reference_experts), strict=True):
        scale = np.abs(reference.asnumpy()).max()
        np.testing.assert_allclose(ours.asnumpy(), reference.asnumpy(), atol=1e-5 * scale)


@pytest.mark.parametrize("name", ROUTINGS)
def test_gradients_of_the_weights_are_their_slopes(generator, name):
    logits, mix = random(generator, N, E), random(generator, N, ROUTINGS[name].top_k)

    def total(x):
        return (ops.route(x, ROUTINGS[name])[1] * Tensor(mix)).sum()

    gradient = ms.grad(total)(Tensor(logits)).asnumpy()
    direction = random(generator, N, E)
    step = 1e-3
    ahead, behind = (plain_weights(logits + sign * step * direction, ROUTINGS[name]) for sign in (1, -1))
    slope = ((ahead - behind) * mix).sum() / (2 * step)
    assert (gradient * direction).sum() == pytest.approx(slope, rel=2e-3, abs=1e-3)


def plain_weights(logits, routing):
    return plain_choice(logits, routing, np.zeros(E))[1]

"""Hyper-connections: every implementation equals a plain computation, and gradients are slopes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.ops import native

EPS, NORM_EPS, ITERATIONS = 1e-6, 1e-5, 20


@pytest.fixture
def random():
    generator = np.random.default_rng(0)
    return lambda *shape: Tensor(generator.standard_normal(shape).astype(np.float32))


@pytest.fixture(params=["C++", "numpy", "reference"])
def implementation(request, monkeypatch):
    if request.param == "C++" and not native.available():
        pytest.skip("no compiler for the C++ kernels")
    if request.param != "C++":
        monkeypatch.setattr(native, "available", lambda: False)
    if request.param == "reference":
        monkeypatch.setattr("mindformers_ext.ops.hyper_connections.device_target", lambda: "Ascend")
    return request.param


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain(streams, mapping, alpha, bias, count):
    """The formulas in float64, one token at a time."""
    values = [t.asnumpy().astype(np.float64) for t in (streams, mapping, alpha, bias)]
    results = []
    for x in values[0]:
        m = values[1] @ (x / np.sqrt((x**2).mean() + NORM_EPS))
        pre = sigmoid(m[:count] * values[2][0] + values[3][:count]) + EPS
        post = 2 * sigmoid(m[count : 2 * count] * values[2][1] + values[3][count : 2 * count])
        comb = (m[2 * count :] * values[2][2] + values[3][2 * count :]).reshape(count, count)
        comb = np.exp(comb) / np.exp(comb).sum(1, keepdims=True) + EPS
        comb = comb / (comb.sum(0) + EPS)
        for _ in range(ITERATIONS - 1):
            comb = comb / (comb.sum(1, keepdims=True) + EPS)
            comb = comb / (comb.sum(0) + EPS)
        results.append((pre @ x.reshape(count, -1), post, comb.reshape(-1)))
    return [np.stack(part) for part in zip(*results, strict=True)]


def arguments(random, rows, count, width):
    size = 2 * count + count * count
    alpha = Tensor(np.array([0.7, 1.3, 0.9], np.float32))
    return random(rows, count * width), random(size, count * width), alpha, random(size)


@pytest.mark.parametrize(("rows", "count", "width"), [(1, 4, 64), (3, 4, 7), (40, 2, 33), (300, 3, 16)])
def test_collapse_and_expand_equal_a_plain_computation(random, implementation, rows, count, width):
    streams, mapping, alpha, bias = arguments(random, rows, count, width)
    results = ops.hyper_collapse(streams, mapping, alpha, bias, ITERATIONS, EPS, NORM_EPS)
    for ours, expected in zip(results, plain(streams, mapping, alpha, bias, count), strict=True):
        np.testing.assert_allclose(ours.asnumpy(), expected, rtol=1e-4, atol=2e-5)
    update, (_, post, comb) = random(rows, width), (result.asnumpy().astype(np.float64) for result in results)
    mixed = np.einsum("njk,njh->nkh", comb.reshape(rows, count, count), streams.asnumpy().reshape(rows, count, width))
    expected = (mixed + post[:, :, None] * update.asnumpy()[:, None]).reshape(rows, -1)
    np.testing.assert_allclose(
        ops.hyper_expand(update, streams, *results[1:]).asnumpy(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("rows", "count", "width"), [(1, 4, 64), (50, 3, 7)])
def test_head_equals_a_plain_computation(random, implementation, rows, count, width):
    streams, mapping, bias = random(rows, count * width), random(count, count * width), random(count)
    alpha = Tensor(np.array([0.6], np.float32))
    x = streams.asnumpy().astype(np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPS)
    pre = sigmoid(normed @ mapping.asnumpy().T * 0.6 + bias.asnumpy()) + EPS
    expected = np.einsum("njh,nj->nh", x.reshape(rows, count, width), pre)
    ours = ops.hyper_head(streams, mapping, alpha, bias, EPS, NORM_EPS).asnumpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-5)


def test_combs_are_doubly_stochastic_for_extreme_weights(implementation):
    count, width = 4, 8
    bias = Tensor(np.linspace(-60, 60, 2 * count + count * count).astype(np.float32))
    streams = Tensor(np.full((2, count * width), 1e3, np.float32))
    mapping = Tensor(np.zeros((bias.shape[0], count * width), np.float32))
    alpha = Tensor(np.ones(3, np.float32))
    _, post, comb = ops.hyper_collapse(streams, mapping, alpha, bias, ITERATIONS, EPS, NORM_EPS)
    assert np.isfinite(post.asnumpy()).all()
    np.testing.assert_allclose(comb.asnumpy().reshape(2, count, count).sum(1), 1, atol=1e-4)


def _layer(streams, mapping, alpha, bias):
    collapsed, post, comb = ops.hyper_collapse(streams, mapping, alpha, bias, 4, EPS, NORM_EPS)
    expanded = ops.hyper_expand(collapsed * collapsed, streams, post, comb)
    return ops.hyper_head(expanded, mapping[:2], alpha[:1], bias[:2], EPS, NORM_EPS)


@pytest.mark.parametrize("argument", range(4), ids=["streams", "mapping", "alpha", "bias"])
def test_gradients_are_slopes(random, argument):
    streams, mapping, alpha, bias = arguments(random, 3, 2, 5)
    inputs = [streams, mapping, alpha, bias]
    factors = random(3, 5)

    def loss(*values):
        return (_layer(*values) * factors).sum()

    gradient = ms.value_and_grad(loss, argument)(*inputs)[1].asnumpy().reshape(-1)
    for index in range(gradient.size):
        sides = []
        for step in (1e-2, -1e-2):
            moved = inputs[argument].asnumpy().copy()
            moved.reshape(-1)[index] += step
            sides.append(float(loss(*inputs[:argument], Tensor(moved), *inputs[argument + 1 :]).asnumpy()))
        assert gradient[index] == pytest.approx((sides[0] - sides[1]) / 2e-2, rel=2e-2, abs=2e-2)

"""The implementations of one operation agree, and gradients never meet the one without them."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from mindformers_ext import ops
from mindformers_ext.ops import autograd, backend, host, reference


@pytest.fixture
def random():
    generator = np.random.default_rng(0)
    return lambda *shape: Tensor(generator.standard_normal(shape).astype(np.float32))


def same(name, *arguments):
    ours, theirs = getattr(host, name)(*arguments), getattr(reference, name)(*arguments)
    for one, other in zip(*[(r,) if isinstance(r, Tensor) else r for r in (ours, theirs)], strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=5e-6, atol=5e-6)


# One block of rows, and several whose last is shorter.
ROWS = [3, 1000]


@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_on_the_host_equals_the_reference(random, rows):
    same("rms_norm", random(rows, 160), random(160), 1e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm_on_the_host_equals_the_reference(random, rows):
    same("add_rms_norm", random(rows, 160), random(rows, 160), random(160), 1e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_on_the_host_equals_the_reference(random, rows):
    same("swiglu", random(rows, 160))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("batch", "length"), [(2, 5), (3, 1), (1, 700), (700, 1)])
def test_qkv_heads_on_the_host_equal_the_reference(random, batch, length, normed):
    groups, heads, dim = 2, 3, 16
    qkv = random(batch * length, groups * (heads + 2) * dim)
    norms = (random(dim), random(dim)) if normed else None
    half = random(batch, length, dim // 2), random(batch, length, dim // 2)
    cos, sin = (Tensor(np.concatenate([part.asnumpy()] * 2, -1)) for part in half)
    same("qkv_heads", qkv, cos, sin, groups, norms, 1e-6)


@pytest.mark.parametrize("batch", [2, 300])
def test_attention_on_the_host_equals_the_reference(random, batch):
    query, key, value = random(batch, 3, 2, 4, 8), random(batch, 3, 6, 8), random(batch, 3, 6, 8)
    bias = Tensor(np.where(np.arange(6) < 4, 0, np.finfo(np.float32).min).astype(np.float32).reshape(1, 1, 1, 6))
    bias = Tensor(np.broadcast_to(bias.asnumpy(), (1, 1, 4, 6)).copy())
    same("attention", query, key, value, bias, 0.5)


def test_write_slots_changes_the_buffer_in_place(random):
    for implementation in (host, reference):
        buffer, values = random(2, 3, 8, 4), random(2, 3, 2, 4)
        expected = buffer.asnumpy().copy()
        expected[:, :, 5:7] = values.asnumpy()
        implementation.write_slots(buffer, 5, values)
        np.testing.assert_array_equal(buffer.asnumpy(), expected)


def test_move_rows_changes_the_slots_alone_and_can_swap_rows(random):
    for implementation in (host, reference):
        buffer, rows = random(4, 3, 8, 2), np.array([1, 0, 0, 3])
        expected = buffer.asnumpy().copy()
        expected[:, :, 2:6] = expected[rows][:, :, 2:6]
        implementation.move_rows(buffer, rows, 2, 6)
        np.testing.assert_array_equal(buffer.asnumpy(), expected)


def test_swiglu_of_very_negative_gates_is_zero():
    x = Tensor(np.array([[-200.0, 3.0]], np.float32))
    assert host.swiglu(x).asnumpy().tolist() == [[0.0]]


def test_attention_equals_a_plain_computation(random):
    query, key, value = random(2, 2, 3, 4, 8), random(2, 2, 5, 8), random(2, 2, 5, 8)
    bias = random(2, 1, 4, 5)
    q, k, v, b = (t.asnumpy().astype(np.float64) for t in (query, key, value, bias))
    scores = np.einsum("bghsd,bgtd->bghst", q, k) * 0.3 + b[:, :, None]
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = np.einsum("bghst,bgtd->bsghd", weights, v).reshape(8, -1)
    np.testing.assert_allclose(ops.attention(query, key, value, bias, 0.3).asnumpy(), expected, rtol=1e-5, atol=1e-5)


def test_rows_without_a_visible_key_stay_finite(random):
    bias = Tensor(np.full((1, 1, 4, 5), np.finfo(np.float32).min, np.float32))
    query, key, value = random(1, 2, 3, 4, 8), random(1, 2, 5, 8), random(1, 2, 5, 8)
    for implementation in (host, reference):
        assert np.isfinite(implementation.attention(query, key, value, bias, 1.0).asnumpy()).all()


def slope(function, tensor, index, step=1e-2):
    sides = []
    for sign in (1, -1):
        moved = tensor.asnumpy().copy()
        moved.reshape(-1)[index] += sign * step
        sides.append(float(function(Tensor(moved)).asnumpy()))
    return (sides[0] - sides[1]) / (2 * step)


def _joined(parts):
    query, key, value = parts
    return query.sum(2) + 2 * key + 3 * value


def gradient_cases(random):
    weight, other, cos, sin = random(8), random(8), random(2, 3, 8), random(2, 3, 8)
    bias, labels = Tensor(np.zeros((1, 1, 3, 3), np.float32)), Tensor(np.array([1, -100, 7, 0, -100, 3], np.int32))
    return {
        "rms_norm": (lambda to, x: to.rms_norm(x, weight, 1e-6), (6, 8)),
        "rms_norm by weight": (lambda to, x: to.rms_norm(cos.reshape(6, 8), x, 1e-6), (8,)),
        "add_rms_norm": (lambda to, x: sum(to.add_rms_norm(x, x * 0.5, weight, 1e-6)), (6, 8)),
        "swiglu": (lambda to, x: to.swiglu(x), (6, 8)),
        "qkv_heads": (lambda to, x: _joined(to.qkv_heads(x, cos, sin, 2, (weight, other), 1e-6)), (6, 64)),
        "qkv_heads without norm": (lambda to, x: _joined(to.qkv_heads(x, cos, sin, 2)), (6, 64)),
        "qkv_heads by query norm": (
            lambda to, x: _joined(
                to.qkv_heads(sin.reshape(2, 24).tile((3, 1)).reshape(6, 24), cos, sin, 1, (x, x), 0.1)
            ),
            (8,),
        ),
        "attention": (lambda to, x: to.attention(x, x[:, :, 0], x[:, :, 1], bias, 0.3), (1, 2, 2, 3, 8)),
        "cross_entropy": (lambda to, x: to.cross_entropy(x, labels).reshape(1), (6, 8)),
    }


@pytest.mark.parametrize("implementation", [reference, autograd], ids=["reference", "autograd"])
@pytest.mark.parametrize("name", gradient_cases(lambda *_: Tensor(np.zeros((2, 3, 8), np.float32))))
def test_gradients_are_slopes(random, name, implementation):
    forward, shape = gradient_cases(random)[name]
    x = random(*shape)
    factors = random(*forward(implementation, x).shape)

    def loss(value):
        return (forward(implementation, value) * factors).sum()

    gradient = ms.value_and_grad(loss, 0)(x)[1].asnumpy().reshape(-1)
    for index in range(0, gradient.size, max(1, gradient.size // 40)):
        assert gradient[index] == pytest.approx(slope(loss, x, index), abs=3e-2)


def test_no_operation_loses_a_gradient_that_is_being_recorded(random, monkeypatch):
    x, weight = random(4, 8), Parameter(random(8), name="weight")
    (gradient,) = ms.value_and_grad(lambda: ops.rms_norm(x, weight, 1e-6).sum(), None, [weight])()[1]
    assert np.abs(gradient.asnumpy()).min() > 0
    assert not backend.recording_gradient()


@pytest.mark.parametrize("implementation", [reference, host, autograd], ids=["reference", "host", "autograd"])
def test_cross_entropy_counts_real_labels_only(random, implementation):
    logits, labels = random(3, 5), Tensor(np.array([1, -100, 4], np.int32))
    values = logits.asnumpy().astype(np.float64)
    nll = np.log(np.exp(values).sum(-1)) - values[np.arange(3), [1, 0, 4]]
    assert float(implementation.cross_entropy(logits, labels).asnumpy()) == pytest.approx(nll[[0, 2]].mean(), abs=1e-5)
    assert float(implementation.cross_entropy(logits, Tensor(np.full(3, -100, np.int32))).asnumpy()) == 0.0

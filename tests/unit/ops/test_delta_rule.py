"""The gated delta rule equals its definition token by token, in every implementation and however a prompt is cut."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.ops import delta_rule, native
from mindformers_ext.ops.native import delta_rule as kernels

REFERENCE = {
    name: getattr(delta_rule, f"_reference_{name}")
    for name in ("causal_conv", "delta_gates", "gated_delta_rule", "gated_rms_norm")
}
HOST = {name: getattr(delta_rule, f"_host_{name}") for name in REFERENCE}
NATIVE = {name: getattr(kernels, name, HOST[name]) for name in REFERENCE}


@pytest.fixture(params=[REFERENCE, HOST, NATIVE], ids=["reference", "host", "native"])
def operations(request):
    if request.param is NATIVE and not native.available():
        pytest.skip("no compiler for the C++ kernels")
    return request.param


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gates(seed, rows, heads):
    generator = np.random.default_rng(seed)
    beta = generator.uniform(0, 1, (rows, heads)).astype(np.float32)
    g = -generator.exponential(0.5, (rows, heads)).astype(np.float32)
    g[generator.uniform(size=g.shape) < 0.02] = -30  # forgets everything
    return beta, g


def token_by_token(qkv, beta, g, key_heads, key_dim, state):
    """Equation 10 of the paper in float64."""
    batch, length, _ = qkv.shape
    heads, size = beta.shape[1], key_heads * key_dim
    query, key = (
        np.repeat(part.reshape(batch, length, key_heads, key_dim), heads // key_heads, 2).astype(np.float64)
        for part in (qkv[..., :size], qkv[..., size : 2 * size])
    )
    query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
    value = qkv[..., 2 * size :].reshape(batch, length, heads, -1).astype(np.float64)
    beta, decay = beta.reshape(batch, length, heads, 1), np.exp(g.reshape(batch, length, heads, 1, 1))
    state, result = state.astype(np.float64), np.empty(value.shape)
    for t in range(length):
        state = state * decay[:, t]
        told = np.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", key[:, t], beta[:, t] * (value[:, t] - told))
        result[:, t] = np.einsum("bhkv,bhk->bhv", state, query[:, t]) / np.sqrt(key_dim)
    return result.reshape(batch, length, -1), state


# Key heads, value heads, key size, value size: grouped values, and sizes that fill no vector or several blocks.
SHAPES = [(2, 4, 16, 16), (1, 3, 5, 7), (2, 2, 32, 80), (1, 1, 128, 128)]


def inputs(shape, batch, length):
    key_heads, heads, key_dim, value_dim = shape
    qkv = normal(0, batch, length, 2 * key_heads * key_dim + heads * value_dim)
    return qkv, *gates(1, batch * length, heads), normal(2, batch, heads, key_dim, value_dim)


def run(operations, qkv, beta, g, shape, state):
    arrays = (np.ascontiguousarray(array) for array in (qkv, beta, g))
    return operations["gated_delta_rule"](*map(Tensor, arrays), shape[0], shape[2], state).asnumpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("batch", "length"), [(2, 1), (1, 2), (2, 9), (1, 64), (2, 150)])
def test_the_rule_equals_its_definition(operations, shape, batch, length):
    qkv, beta, g, start = inputs(shape, batch, length)
    state = Tensor(start.copy())
    result = run(operations, qkv, beta, g, shape, state)
    expected, expected_state = token_by_token(qkv, beta, g, shape[0], shape[2], start)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(state.asnumpy(), expected_state, rtol=1e-4, atol=2e-5)


def test_without_a_state_the_rule_starts_from_zeros(operations):
    shape = SHAPES[0]
    qkv, beta, g, start = inputs(shape, 2, 70)
    expected, _ = token_by_token(qkv, beta, g, shape[0], shape[2], np.zeros_like(start))
    np.testing.assert_allclose(run(operations, qkv, beta, g, shape, None), expected, rtol=1e-4, atol=2e-5)


def test_equal_keys_written_again_and_again_stay_exact(operations):
    shape, length = (1, 1, 16, 16), 128
    qkv, _, _, start = inputs(shape, 1, length)
    qkv[:, :, :32] = qkv[:, :1, :32]
    beta, g = np.full((length, 1), 0.999, np.float32), np.zeros((length, 1), np.float32)
    state = Tensor(start.copy())
    result = run(operations, qkv, beta, g, shape, state)
    expected, expected_state = token_by_token(qkv, beta, g, 1, 16, start)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=5e-5)
    np.testing.assert_allclose(state.asnumpy(), expected_state, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("cut", [1, 3, 63, 64, 99])
def test_a_prompt_in_two_parts_equals_the_whole(operations, cut):
    shape, length = SHAPES[0], 100
    qkv, beta, g, start = inputs(shape, 1, length)
    whole, parts = Tensor(start.copy()), Tensor(start.copy())
    expected = run(operations, qkv, beta, g, shape, whole)
    result = [
        run(operations, qkv[:, part], beta[part], g[part], shape, parts) for part in (slice(cut), slice(cut, None))
    ]
    np.testing.assert_allclose(np.concatenate(result, 1), expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(parts.asnumpy(), whole.asnumpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("length", [1, 5, 70])
def test_pads_leave_the_state_untouched(operations, length):
    shape = SHAPES[0]
    qkv, beta, g, start = inputs(shape, 2, length)
    qkv[0], beta[:length], g[:length] = 0, 0, 0
    state = Tensor(start.copy())
    run(operations, qkv, beta, g, shape, state)
    np.testing.assert_array_equal(state.asnumpy()[0], start[0])
    assert (state.asnumpy()[1] != start[1]).any()


def test_left_pads_leave_no_trace_in_the_result(operations):
    shape, pads, length = SHAPES[0], 37, 50
    qkv, beta, g, start = inputs(shape, 1, length)
    qkv[:, :pads], beta[:pads], g[:pads] = 0, 0, 0
    padded, alone = Tensor(np.zeros_like(start)), Tensor(np.zeros_like(start))
    result = run(operations, qkv, beta, g, shape, padded)
    expected = run(operations, qkv[:, pads:], beta[pads:], g[pads:], shape, alone)
    np.testing.assert_allclose(result[:, pads:], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(padded.asnumpy(), alone.asnumpy(), rtol=1e-4, atol=1e-5)


def convolved(x, weight, past):
    """The convolution in float64, and the inputs that the next one needs."""
    every = np.concatenate((past, x), 1).astype(np.float64)
    taps = weight.shape[2]
    total = sum(every[:, tap : tap + x.shape[1]] * weight[:, 0, tap] for tap in range(taps))
    return total / (1 + np.exp(-total)), every[:, x.shape[1] :]


@pytest.mark.parametrize("channels", [3, 32, 150])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 2), (2, 3), (3, 40)])
def test_the_convolution_equals_its_definition_and_keeps_its_last_inputs(operations, batch, length, channels):
    x, weight, past = normal(0, batch, length, channels), normal(1, channels, 1, 4), normal(2, batch, 3, channels)
    expected, tail = convolved(x, weight, past)
    state = Tensor(past.copy())
    result = operations["causal_conv"](Tensor(x), Tensor(weight), state)
    np.testing.assert_allclose(result.asnumpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state.asnumpy(), tail.astype(np.float32))
    expected, _ = convolved(x, weight, np.zeros_like(past))
    result = operations["causal_conv"](Tensor(x), Tensor(weight))
    np.testing.assert_allclose(result.asnumpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_convolution_reads_some_columns_of_a_wider_matrix(operations, batch):
    wide, weight = normal(0, batch, 5, 50), normal(1, 20, 1, 4)
    expected, _ = convolved(wide[..., 8:28], weight, np.zeros((batch, 3, 20)))
    result = operations["causal_conv"](Tensor(wide)[:, :, 8:28], Tensor(weight))
    np.testing.assert_allclose(result.asnumpy(), expected, rtol=1e-4, atol=1e-5)


def test_gates_equal_their_definition_at_any_size_of_their_input(operations):
    x, a_log, dt_bias = 20 * normal(0, 40, 6), normal(1, 3), normal(2, 3)
    beta, g = operations["delta_gates"](*map(Tensor, (x, a_log, dt_bias)))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(beta.asnumpy(), 1 / (1 + np.exp(-wide[:, :3])), rtol=1e-4, atol=1e-30)
    np.testing.assert_allclose(
        g.asnumpy(), -np.exp(a_log) * np.logaddexp(0, wide[:, 3:] + dt_bias), rtol=1e-4, atol=1e-6
    )


def test_gates_of_pads_neither_write_nor_decay(operations):
    x, real = normal(0, 4, 6), np.array([False, True, False, True])
    every = operations["delta_gates"](Tensor(x), Tensor(normal(1, 3)), Tensor(normal(2, 3)))
    masked = operations["delta_gates"](Tensor(x), Tensor(normal(1, 3)), Tensor(normal(2, 3)), real)
    for one, other in zip(masked, every, strict=True):
        assert not one.asnumpy()[~real].any()
        np.testing.assert_array_equal(one.asnumpy()[real], other.asnumpy()[real])


@pytest.mark.parametrize("dim", [7, 16, 40])
@pytest.mark.parametrize("rows", [1, 300])
def test_the_gated_norm_equals_its_definition(operations, rows, dim):
    x, wide, weight = normal(0, rows, 3 * dim), normal(1, rows, 3 * dim + 5), normal(2, dim)
    heads = x.astype(np.float64).reshape(rows, 3, dim)
    normed = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * weight
    gate = wide[:, 2 : 2 + 3 * dim].astype(np.float64)
    result = operations["gated_rms_norm"](Tensor(x), Tensor(wide)[:, 2 : 2 + 3 * dim], Tensor(weight), 1e-6)
    expected = normed.reshape(rows, -1) * gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(result.asnumpy(), expected, rtol=1e-4, atol=1e-5)


def check_gradient(function, *arrays):
    """Compares the gradient of a random projection of ``function`` with slopes along random directions."""
    factors = normal(9, *function(*map(Tensor, arrays)).shape)

    def loss(*tensors):
        return (function(*tensors) * Tensor(factors)).sum()

    gradients = [ms.grad(loss, position)(*map(Tensor, arrays)) for position in range(len(arrays))]
    for position, gradient in enumerate(gradients):
        direction = normal(10 + position, *arrays[position].shape)
        step = 1e-2 / np.sqrt((direction**2).mean()) / 4
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[position] = arrays[position] + np.float32(sign * step) * direction
            ends.append(float((function(*map(Tensor, moved)).asnumpy().astype(np.float64) * factors).sum()))
        slope, along = (ends[0] - ends[1]) / (2 * step), float((gradient.asnumpy() * direction).sum())
        assert abs(slope - along) <= 2e-2 * max(abs(slope), np.linalg.norm(gradient.asnumpy())), position


@pytest.mark.parametrize("length", [1, 5, 70])
def test_gradients_of_the_rule_are_its_slopes(length):
    qkv, beta, g, _ = inputs((2, 4, 6, 5), 2, length)
    g = np.maximum(g, -3)
    check_gradient(lambda *x: delta_rule.gated_delta_rule(*x, 2, 6), qkv, beta, g)


def test_gradients_of_the_convolution_are_its_slopes():
    check_gradient(delta_rule.causal_conv, normal(0, 2, 6, 5), normal(1, 5, 1, 4))


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_of_the_gates_are_their_slopes(output):
    used = (normal(0, 5, 6), normal(1, 3), normal(2, 3))
    if output == 0:
        check_gradient(lambda x: delta_rule.delta_gates(x, *map(Tensor, used[1:]))[0], used[0])
    else:
        check_gradient(lambda *x: delta_rule.delta_gates(*x)[1], *used)


def test_gradients_of_the_gated_norm_are_its_slopes():
    check_gradient(lambda *x: delta_rule.gated_rms_norm(*x, 1e-6), normal(0, 3, 12), normal(1, 3, 12), normal(2, 4))

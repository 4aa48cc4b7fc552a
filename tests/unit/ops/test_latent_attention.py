"""Multi-head latent attention: the implementations agree with each other, with the formula, and with slopes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from mindformers_ext import ops
from mindformers_ext.ops import latent_attention, native

HEADS, PLAIN, ROPE, VALUE, LATENT, EPS = 6, 10, 8, 12, 21, 1e-6


@pytest.fixture
def random():
    generator = np.random.default_rng(0)
    return lambda *shape: Tensor(generator.standard_normal(shape).astype(np.float32))


@pytest.fixture(params=["C++", "numpy", "other devices"])
def implementation(request, monkeypatch):
    if request.param == "other devices":
        monkeypatch.setattr(latent_attention, "device_target", lambda: "Ascend")
    elif request.param == "numpy":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("no compiler for the C++ kernels")
    return request.param


def rotary(random, batch, length):
    angles = random(batch, length, ROPE // 2).asnumpy()
    return tuple(Tensor(np.concatenate([part, part], -1)) for part in (np.cos(angles), np.sin(angles)))


def assert_same(ours, theirs, tolerance=1e-5):
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=tolerance, atol=tolerance)


def rotated(x, cos, sin, interleaved):
    """The rotation as complex numbers, ``[..., R]`` with pairs at ``(i, i + R/2)``."""
    half = x.shape[-1] // 2
    pairs = x[..., ::2] + 1j * x[..., 1::2] if interleaved else x[..., :half] + 1j * x[..., half:]
    turned = pairs * (cos[..., :half] + 1j * sin[..., :half])
    return np.concatenate((turned.real, turned.imag), -1).astype(np.float32)


def causal_bias(batch, length, slots, pads):
    """Bias of ``length`` new tokens of which the last stands at slot ``slots - 3``; row b has ``pads[b]`` pads."""
    last = slots - 2 - length + np.arange(length)
    visible = np.arange(slots) <= last[:, None]
    visible = visible & (np.arange(slots) >= np.array(pads)[:, None])[:, None]
    return Tensor(np.where(visible[:, None], 0, np.finfo(np.float32).min).astype(np.float32))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("batch", "length"), [(2, 5), (3, 1), (1, 300)])
def test_split_latent_equals_the_reference(implementation, random, batch, length, normed, interleaved):
    fused = random(batch * length, 33 + LATENT + ROPE)
    norm = random(33) if normed else None
    arguments = (fused, *rotary(random, batch, length), norm, random(LATENT), EPS, interleaved)
    assert_same(ops.split_latent(*arguments), latent_attention._reference_split_latent(*arguments))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("batch", "length"), [(2, 5), (3, 1), (1, 300)])
def test_latent_heads_equals_the_reference(implementation, random, batch, length, interleaved):
    query, weight = random(batch * length, HEADS * (PLAIN + ROPE)), random(HEADS * (PLAIN + VALUE), LATENT)
    latent = random(batch, 1, length, LATENT + ROPE)
    arguments = (query, latent, weight, *rotary(random, batch, length), HEADS, interleaved)
    assert_same(ops.latent_heads(*arguments), latent_attention._reference_latent_heads(*arguments))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_a_product_of_complex_numbers(implementation, random, interleaved):
    fused, (cos, sin) = random(4, 3 + LATENT + ROPE), rotary(random, 2, 2)
    _, latent = ops.split_latent(fused, cos, sin, None, random(LATENT), EPS, interleaved)
    expected = rotated(fused.asnumpy()[:, -ROPE:].reshape(2, 2, ROPE), cos.asnumpy(), sin.asnumpy(), interleaved)
    np.testing.assert_allclose(latent.asnumpy()[:, 0, :, LATENT:], expected, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize(("batch", "length", "slots"), [(1, 1, 9), (3, 1, 150), (9, 1, 66), (2, 4, 20), (2, 30, 70)])
def test_absorbed_attention_equals_attention_over_expanded_keys(
    implementation, random, batch, length, slots, per_row, interleaved
):
    query, weight = random(batch * length, HEADS * (PLAIN + ROPE)), random(HEADS * (PLAIN + VALUE), LATENT)
    latent, (cos, sin) = random(batch, 1, slots, LATENT + ROPE), rotary(random, batch, length)
    bias = causal_bias(batch, length, slots, [row % 3 for row in range(batch if per_row else 1)])
    ours = ops.absorbed_attention(query, latent, weight, cos, sin, bias, HEADS, 0.3, interleaved)
    still = [Tensor(np.full((batch, slots, ROPE), value, np.float32)) for value in (1, 0)]
    turned = ops.latent_heads(query, latent[:, :, :length], weight, cos, sin, HEADS, interleaved)[0]
    unused = random(batch * slots, HEADS * (PLAIN + ROPE))
    _, key, value = ops.latent_heads(unused, latent, weight, *still, HEADS, interleaved)
    assert_same([ours], [ops.attention(turned, key, value, bias, 0.3)], 5e-5)


def test_a_pad_without_any_token_to_see_gives_finite_numbers(implementation, random):
    query, weight = random(2, HEADS * (PLAIN + ROPE)), random(HEADS * (PLAIN + VALUE), LATENT)
    latent, (cos, sin) = random(2, 1, 9, LATENT + ROPE), rotary(random, 2, 1)
    bias = causal_bias(2, 1, 9, [9, 1])
    assert np.isfinite(ops.absorbed_attention(query, latent, weight, cos, sin, bias, HEADS, 0.3, True).asnumpy()).all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_gradients_equal_slopes(random, normed, interleaved):
    cos, sin = rotary(random, 1, 3)
    size = HEADS * (PLAIN + ROPE)
    shapes = {"fused": (3, size + LATENT + ROPE), "latent_norm": (LATENT,), "weight": (HEADS * (PLAIN + VALUE), LATENT)}
    if normed:
        shapes["query_norm"] = (size,)
    values = {name: Parameter(random(*shape), name=name) for name, shape in shapes.items()}
    mixers = [random(1, HEADS, 1, 3, PLAIN + ROPE), random(1, HEADS, 3, PLAIN + ROPE), random(1, HEADS, 3, VALUE)]

    def total():
        norms = values.get("query_norm"), values["latent_norm"]
        query, latent = ops.split_latent(values["fused"], cos, sin, *norms, EPS, interleaved)
        parts = ops.latent_heads(query, latent, values["weight"], cos, sin, HEADS, interleaved)
        return sum((part * mixer).sum() for part, mixer in zip(parts, mixers, strict=True))

    gradients = ms.value_and_grad(total, None, tuple(values.values()))()[1]
    for parameter, gradient in zip(values.values(), gradients, strict=True):
        direction, start, step = random(*parameter.shape), parameter.asnumpy().copy(), 1e-2
        ends = []
        for sign in (1, -1):
            parameter.set_data(Tensor(start + np.float32(sign * step) * direction.asnumpy()))
            ends.append(float(total().asnumpy()))
        parameter.set_data(Tensor(start))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float((gradient * direction).sum().asnumpy()) == pytest.approx(slope, rel=1e-2, abs=0.05)

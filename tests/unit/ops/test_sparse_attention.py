"""Operations of sparse attention: every implementation equals a plain computation, and gradients are slopes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.ops import native
from mindformers_ext.ops.sparse_attention import MASKED
from mindformers_ext.ops.torch_topk import top_indices


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
        for module in ("sparse_attention", "compression"):
            monkeypatch.setattr(f"mindformers_ext.ops.{module}.device_target", lambda: "Ascend")
    return request.param


def close(ours, expected):
    np.testing.assert_allclose(ours.asnumpy(), expected, rtol=2e-5, atol=2e-5)


def tables(random, *shape):
    angles = random(*shape).asnumpy()
    return tuple(Tensor(np.concatenate([part, part], -1)) for part in (np.cos(angles), np.sin(angles)))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("norm", ["none", "plain", "weighted"])
@pytest.mark.parametrize(("rows", "heads", "dim", "size"), [(1, 3, 16, 16), (5, 2, 18, 4), (70, 1, 32, 8)])
def test_rotary_turns_neighbours_of_the_last_channels(random, implementation, rows, heads, dim, size, norm, inverse):
    x, weight, (cos, sin) = random(rows, heads * dim), random(dim), tables(random, rows, size // 2)
    eps, factor = (None, None) if norm == "none" else (1e-6, weight if norm == "weighted" else None)
    expected = x.asnumpy().astype(np.float64).reshape(rows, heads, dim)
    if eps is not None:
        expected = expected / np.sqrt((expected**2).mean(-1, keepdims=True) + eps)
    if factor is not None:
        expected = expected * weight.asnumpy()
    pairs = expected[..., dim - size :].reshape(rows, heads, -1, 2) @ [1, 1j]
    angle = (cos.asnumpy() + 1j * sin.asnumpy())[:, None, : size // 2]
    turned = pairs * (angle.conj() if inverse else angle)
    tail = np.stack([turned.real, turned.imag], -1).reshape(rows, heads, size)
    expected = np.concatenate([expected[..., : dim - size], tail], -1).reshape(rows, -1)
    close(ops.partial_rotary(x, cos, sin, heads, factor, eps, inverse), expected)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_grouped_linear_maps_each_group_by_its_own_rows(random, implementation, rows):
    x, weight = random(rows, 3 * 10), random(3 * 7, 10)
    expected = np.einsum("ngi,goi->ngo", x.asnumpy().reshape(rows, 3, 10), weight.asnumpy().reshape(3, 7, 10))
    close(ops.grouped_linear(x, weight, 3), expected.reshape(rows, -1))


def plain_attention(query, keys, bias, sinks, scale):
    q, k, b, s = (np.asarray(x, np.float64) for x in (query, keys, bias, sinks))
    scores = np.einsum("bsnd,btd->bsnt", q, k) * scale + b[:, :, None]
    sink = np.broadcast_to(s[None, None, :, None], (*scores.shape[:3], 1))
    joined = np.concatenate([scores, sink], -1)
    weights = np.exp(joined - joined.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :-1]
    return np.einsum("bsnt,btd->bsnd", weights, k).reshape(q.shape[0] * q.shape[1], -1)


@pytest.mark.parametrize("bias_rows", [1, 2])
@pytest.mark.parametrize("heads", [1, 3, 6])
@pytest.mark.parametrize(("length", "slots", "count"), [(1, 9, 0), (1, 9, 5), (4, 20, 17), (30, 30, 7)])
def test_sink_attention_equals_a_plain_computation(random, implementation, length, slots, count, heads, bias_rows):
    query, keys, blocks, sinks = random(2, length, heads, 20), random(2, slots, 20), random(2, 32, 20), random(heads)
    generator = np.random.default_rng(1)

    def bias(width):
        masked = generator.random((bias_rows, length, width)) < 0.4
        return np.where(masked, MASKED, generator.standard_normal(masked.shape)).astype(np.float32)

    window, further = bias(slots), bias(count)
    ours = ops.sink_attention(query, keys, Tensor(window), sinks, 0.3, blocks, Tensor(further) if count else None)
    everything = np.concatenate([keys.asnumpy(), blocks.asnumpy()[:, :count]], 1)
    joined = np.concatenate([window, further], -1)
    close(ours, plain_attention(query.asnumpy(), everything, joined, sinks.asnumpy(), 0.3))


def test_a_token_that_sees_nothing_gets_zero(random, implementation):
    bias = Tensor(np.full((1, 2, 5), MASKED, np.float32))
    ours = ops.sink_attention(random(3, 2, 4, 8), random(3, 5, 8), bias, random(4), 1.0)
    assert not ours.asnumpy().any()


@pytest.mark.parametrize(("length", "past", "window"), [(5, 0, 8), (70, 0, 4), (200, 7, 8), (130, 3, 100), (1, 7, 8)])
def test_window_attention_sees_the_last_tokens_and_no_pads(random, implementation, length, past, window):
    query, keys, sinks, blocks = random(2, length, 3, 8), random(2, past + length, 8), random(3), random(2, 6, 8)
    hidden = np.array([0, 4])
    queries, slots = np.arange(past, past + length), np.arange(past + length)
    distance = queries[:, None] - slots
    visible = (distance >= 0) & (distance < window) & (slots >= hidden[:, None, None])
    further = np.where(np.arange(6) < np.arange(length)[:, None] // 20, 0, MASKED).astype(np.float32)[None]
    bias = np.where(visible, 0, MASKED)
    ours = ops.window_attention(query, keys, sinks, 0.4, window, hidden, blocks, Tensor(further))
    everything = np.concatenate([keys.asnumpy(), blocks.asnumpy()], 1)
    joined = np.concatenate([bias, np.broadcast_to(further, (2, length, 6))], -1)
    close(ours, plain_attention(query.asnumpy(), everything, joined, sinks.asnumpy(), 0.4))


def test_gates_of_pads_count_for_nothing(random, implementation):
    gates, bias, offsets = random(4, 6), random(3, 6), np.array([0, 1, 2, 0])
    expected = gates.asnumpy() + bias.asnumpy()[offsets]
    expected[1] = MASKED
    real = np.array([True, False, True, True])
    close(ops.compressor_gates(Tensor(gates.asnumpy().copy()), bias, offsets, real), expected)


def test_pool_windows_equals_a_plain_computation(random, implementation):
    values, gates = random(9, 5), random(9, 5).asnumpy().copy()
    gates[8] = MASKED
    index = np.array([[[0, 1, 8], [2, 3, 4]], [[5, 0, 1], [6, 7, 2]]], np.int32)
    expected = []
    for rows in index.reshape(4, 3):
        weights = np.exp(gates[rows].astype(np.float64))
        expected.append((weights / weights.sum(0) * values.asnumpy()[rows]).sum(0))
    close(ops.pool_windows(values, Tensor(gates), index), np.stack(expected))


@pytest.mark.parametrize(("length", "heads", "count"), [(1, 4, 9), (3, 6, 12), (50, 3, 12)])
def test_index_scores_equal_a_plain_computation(random, implementation, length, heads, count, monkeypatch):
    monkeypatch.setattr("mindformers_ext.ops.compression._SCORE_ELEMENTS", 200)
    query, keys, weights = random(2, length, heads, 10), random(2, 12, 10), random(2 * length, heads)
    products = np.einsum("bshd,btd->bsht", query.asnumpy(), keys.asnumpy()[:, :count])
    expected = (np.maximum(products, 0) * weights.asnumpy().reshape(2, length, heads, 1)).sum(2)
    close(ops.index_scores(query, keys, weights, count), expected)


# Values, how many to choose, and what torch.topk of torch 2.13 chose on a CPU.
TORCH_TOPK = [
    ([1, 1, 2, 2, 0], 2, [2, 3]),
    ([0, 2, 2, 0, 0, 2, 1, 0], 4, [1, 2, 5, 6]),
    ([2, 0, 1, 1, 1, 0, 0, 2, 2], 4, [0, 4, 7, 8]),
    ([2, 1, 2, 0, 1, 2, 0, 0, 0, 1, 2, 0], 4, [0, 2, 5, 10]),
    ([1, 1, 2, 0, 1, 0, 0, 2, 0, 0, 1, 1, 0, 2, 2, 2, 0], 3, [7, 13, 15]),
    ([2, 0, 1, 2, 0, 2, 0, 0, 2, 1, 1, 0, 0, 1, 1, 1, 2, 1, 1, 2, 2, 1, 0], 8, [0, 3, 5, 8, 13, 16, 19, 20]),
]


@pytest.mark.parametrize(("values", "count", "expected"), TORCH_TOPK)
def test_equal_blocks_are_chosen_as_torch_chooses_them(values, count, expected):
    scores = np.array(values, np.float32)
    assert sorted(top_indices(scores, count)) == expected
    # More blocks in the batch than the row has alone change nothing.
    wider = np.concatenate((scores, np.full(7, 9, np.float32)))[None, None]
    chosen = ops.select_blocks(Tensor(wider), np.array([[len(values)]]), count).asnumpy() == 0
    assert np.flatnonzero(chosen).tolist() == expected


def test_the_best_of_the_visible_blocks_are_chosen():
    scores = np.array([[[5, 0, 1, 4, 2, 9], [6, 5, 4, 3, 2, 1], [-1, -2, -3, 0, 2, 1]]], np.float32)
    chosen = ops.select_blocks(Tensor(scores), np.array([[5, 6, 3]]), 3).asnumpy() == 0
    assert [np.flatnonzero(row).tolist() for row in chosen[0]] == [[0, 3, 4], [0, 1, 2], [0, 1, 2]]
    chosen = ops.select_blocks(Tensor(scores), np.array([[6, 2, 4]]), 2).asnumpy() == 0
    assert [np.flatnonzero(row).tolist() for row in chosen[0]] == [[0, 5], [0, 1], [0, 3]]
    few = ops.select_blocks(Tensor(scores), np.array([[0, 2, 9]]), 6).asnumpy() == 0
    assert few.sum(-1).tolist() == [[0, 2, 6]]


def test_a_ring_keeps_the_last_slots(random, implementation):
    ring, values = Tensor(np.zeros((2, 1, 5, 3), np.float32)), random(2, 12, 3)
    for start, stop in ((0, 2), (2, 3), (3, 10), (10, 12)):
        ops.write_ring(ring, start, Tensor(values.asnumpy()[:, start:stop].copy()))
        first = max(0, stop - 5)
        np.testing.assert_array_equal(ops.read_ring(ring, first, stop).asnumpy(), values.asnumpy()[:, first:stop])


def test_blocks_are_written_where_they_belong(random, implementation):
    buffer, values = random(3, 1, 4, 2), random(5, 2)
    expected = buffer.asnumpy().copy()
    expected[[0, 2], 0, [3, 1]] = values.asnumpy()[[4, 0]]
    ops.write_blocks(buffer, np.array([0, 2]), np.array([3, 1]), values, np.array([4, 0]))
    np.testing.assert_array_equal(buffer.asnumpy(), expected)


GRADIENTS = [
    "rotary",
    "rotary back",
    "rotary with norm",
    "rotary by weight",
    "grouped linear",
    "grouped linear by weight",
    "attention",
    "attention by sinks",
    "window",
    "gates",
    "pool",
]


def gradient_cases(random):
    (cos, sin), weight, sinks = tables(random, 6, 2), random(8), random(2)
    index = np.array([[[0, 3], [1, 2]]], np.int32)
    query, bias, further = random(1, 6, 2, 8), random(1, 6, 6), Tensor(np.where(np.eye(6, 3) > 0, MASKED, 0)[None])
    further = further.astype(ms.float32)
    return {
        "rotary": (lambda x: ops.partial_rotary(x, cos, sin, 2), (6, 16)),
        "rotary back": (lambda x: ops.partial_rotary(x, cos, sin, 2, inverse=True), (6, 16)),
        "rotary with norm": (lambda x: ops.partial_rotary(x, cos, sin, 2, weight, 1e-6), (6, 16)),
        "rotary by weight": (lambda x: ops.partial_rotary(query.reshape(6, 16), cos, sin, 2, x, 1e-6), (8,)),
        "grouped linear": (lambda x: ops.grouped_linear(x, weight.reshape(4, 2), 2), (3, 4)),
        "grouped linear by weight": (lambda x: ops.grouped_linear(query.reshape(6, 16), x, 4), (8, 4)),
        "attention": (
            lambda x: ops.sink_attention(x, x[:, :, 0], bias, sinks, 0.5, x[:, :3, 1], further),
            (1, 6, 2, 8),
        ),
        "attention by sinks": (lambda x: ops.sink_attention(query, query[:, :, 0], bias, x, 0.5), (2,)),
        "window": (lambda x: ops.window_attention(x, x[:, :, 0], sinks, 0.5, 3), (1, 6, 2, 8)),
        "gates": (lambda x: ops.compressor_gates(query.reshape(12, 8), x, np.arange(12) % 3, None), (3, 8)),
        "pool": (lambda x: ops.pool_windows(x, x * 2, index), (4, 8)),
    }


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_slopes(random, name):
    forward, shape = gradient_cases(random)[name]
    x = random(*shape)
    factors = random(*forward(x).shape)

    def loss(value):
        return (forward(value) * factors).sum()

    gradient = ms.value_and_grad(loss, 0)(x)[1].asnumpy().reshape(-1)
    for index in range(gradient.size):
        sides = []
        for step in (1e-2, -1e-2):
            moved = x.asnumpy().copy()
            moved.reshape(-1)[index] += step
            sides.append(float(loss(Tensor(moved)).asnumpy()))
        assert gradient[index] == pytest.approx((sides[0] - sides[1]) / 2e-2, abs=3e-2)

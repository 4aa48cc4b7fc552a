"""Products with packed weights equal plain ones, and a row's bits do not depend on the rows beside it."""

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.ops import native
from mindformers_ext.ops.moe import sort_by_expert

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")
DTYPES = ["float32", "bfloat16", "int8"]
# Rows and depths that fill panels, blocks of the depth and registers, and that do not.
SHAPES = [(7, 5), (48, 64), (100, 37), (66, 300), (330, 20)]


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def gated(product, order):
    """silu(gate) * up in float64."""
    half = product.shape[1] // 2
    gate, up = (product[:, ::2], product[:, 1::2]) if order == "alternate" else (product[:, :half], product[:, half:])
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_equals_that_of_the_rounded_weight_and_no_row_depends_on_the_others(shape, dtype):
    weight, bias, x = normal(*shape), normal(shape[0]), normal(70, shape[1], seed=1)
    packed = ops.PackedWeight(weight, dtype)
    packed.set_bias(bias)
    whole = ops.linear(Tensor(x), packed).asnumpy()
    expected = x @ ops.rounded(weight, dtype).T.astype(np.float64) + bias
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-4)
    for count in range(71):
        np.testing.assert_array_equal(ops.linear(Tensor(x[:count].copy()), packed).asnumpy(), whole[:count])
    np.testing.assert_array_equal(ops.linear(Tensor(x[60:].copy()), packed).asnumpy(), whole[60:])


def test_product_of_hundreds_of_rows_is_that_of_each():
    packed, x = ops.PackedWeight(normal(40, 270), "bfloat16"), normal(500, 270, seed=1)
    whole = ops.linear(Tensor(x), packed).asnumpy()
    for row in (0, 239, 240, 241, 479, 480, 499):
        np.testing.assert_array_equal(ops.linear(Tensor(x[row : row + 1].copy()), packed).asnumpy()[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["alternate", "beside"])
def test_gated_product_equals_swiglu_of_the_plain_one(order, dtype):
    weight, bias, x = normal(54, 33), normal(54), normal(9, 33, seed=1)
    packed = ops.PackedWeight(weight, dtype, order)
    packed.set_bias(bias)
    product = x @ ops.rounded(weight, dtype).T.astype(np.float64) + bias
    np.testing.assert_allclose(ops.linear(Tensor(x), packed).asnumpy(), gated(product, order), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["plain", "alternate", "beside"])
def test_rows_of_a_packed_weight_are_exactly_the_rounded_ones(order, dtype):
    weight = normal(54, 33)
    weight[7] = 0
    packed = ops.PackedWeight(weight, dtype, order)
    np.testing.assert_array_equal(packed.read_rows(np.arange(54)), ops.rounded(weight, dtype))
    table = ops.embedding(Tensor(np.array([[3, 53], [0, 3]], np.int32)), packed).asnumpy()
    np.testing.assert_array_equal(table, ops.rounded(weight, dtype)[[[3, 53], [0, 3]]])
    with pytest.raises(IndexError, match="rows are 0 to 53, not -1 to 54"):
        packed.read_rows(np.array([54, -1]))


def test_part_of_a_packed_embedding_gives_zeros_for_ids_elsewhere():
    packed = ops.PackedWeight(normal(10, 16), "float32")
    rows = ops.embedding_part(Tensor(np.array([4, 5, 14, 15], np.int32)), packed, 5).asnumpy()
    np.testing.assert_array_equal(rows, [np.zeros(16), *normal(10, 16)[[0, 9]], np.zeros(16)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_bfloat16_are_packed_as_the_values_that_they_stand_for(dtype):
    values = ops.rounded(normal(20, 12), "bfloat16")
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(ops.PackedWeight(bits, dtype).read_rows(np.arange(20)), values)
    np.testing.assert_array_equal(ops.rounded(bits, dtype), values)


def test_rounding_to_bfloat16_goes_to_the_nearest_and_ties_to_even():
    values = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, -np.inf, np.nan, -0.0]], np.float32)
    expected = np.array([[1, 1 + 2**-6, 1 + 2**-7, np.inf, -np.inf, np.nan, -0.0]], np.float32)
    np.testing.assert_array_equal(ops.rounded(values, "bfloat16"), expected)
    packed = ops.PackedWeight(values, "bfloat16").read_rows(np.zeros(1, int))
    np.testing.assert_array_equal(packed, expected)
    assert np.signbit(packed[0, -1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_refuses_what_is_not_finite(bad):
    weight = normal(20, 12)
    weight[11, 3] = bad
    for keep in (lambda: ops.PackedWeight(weight, "int8"), lambda: ops.rounded(weight, "int8")):
        with pytest.raises(ValueError, match="not finite"):
            keep()


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_experts_equal_plain_ones(dtype):
    first, second = normal(4, 24, 2 * 18), normal(4, 18, 24, seed=1)
    x, factors = Tensor(normal(11, 24, seed=2)), Tensor(np.abs(normal(11, 2)))
    ids = np.stack([np.arange(11) % 4, (np.arange(11) + 2) % 3 + 1], 1).astype(np.int32)
    ids[5] = -1
    ids = Tensor(np.where(ids == 2, 3, ids))  # an expert without tokens, and one that a token may have twice
    packed = [ops.PackedStack(first, dtype, "beside"), ops.PackedStack(second, dtype)]
    plain = [Tensor(ops.rounded(values, dtype, -2)) for values in (first, second)]
    for stack, values in zip(packed, plain, strict=True):
        np.testing.assert_array_equal(stack.read(), values.asnumpy())
    outputs = [
        ops.experts(x, ids, factors, *weights, limit).asnumpy() for weights in (packed, plain) for limit in (0, 1)
    ]
    np.testing.assert_allclose(outputs[0], outputs[2], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outputs[1], outputs[3], rtol=1e-4, atol=1e-4)
    assert not outputs[0][5].any() and sort_by_expert(ids.asnumpy(), 4).rows.size == 20
    with pytest.raises(TypeError, match="either both"):
        ops.experts(x, ids, factors, packed[0], plain[1])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_values_of_another_type_are_refused_instead_of_read_as_float32(dtype):
    with pytest.raises(TypeError, match="weights are float32, or uint16 for the bits of bfloat16, not "):
        ops.PackedWeight(normal(4, 3).astype(dtype), "bfloat16")


def test_rows_that_do_not_fit_are_refused_instead_of_read_past_their_end():
    with pytest.raises(ValueError, match=r"rows of 4 values do not fit a weight of \(6, 5\)"):
        ops.linear(Tensor(normal(2, 4)), ops.PackedWeight(normal(6, 5), "float32"))


def test_a_row_of_subnormal_numbers_stays_within_eight_bits():
    weight = np.array([[1e-44, -3e-44], [1, 2]], np.float32)
    for values in (ops.rounded(weight, "int8"), ops.PackedWeight(weight, "int8").read_rows(np.arange(2))):
        assert np.abs(values[0]).max() < 1e-40 and values[1] == pytest.approx([1, 2], rel=0.01)

"""Attention with packed weights over a cache equals a plain computation, for heads of any width and number."""

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")
HIDDEN, SCALE, GROUPS = 24, 0.3, 2


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def expected(qkv, proj, x, cache, first, past):
    """In float64, with positions that rotate nothing."""
    batch, length, _ = x.shape
    stored, dim = qkv.shape[0] // GROUPS // cache[0].shape[3], cache[0].shape[3]
    parts = (x.astype(np.float64) @ qkv.T).reshape(batch, length, GROUPS, stored, dim).transpose(0, 2, 3, 1, 4)
    query, new = parts[:, :, :-2], (parts[:, :, -2], parts[:, :, -1])
    keys, values = (np.concatenate((old[:, :, :past], more), axis=2) for old, more in zip(cache, new, strict=True))
    scores = np.einsum("bghsd,bgtd->bghst", query, keys) * SCALE
    slots = np.arange(past + length)
    own = past + np.arange(length)
    seen = (slots <= own[:, None]) & (slots >= np.minimum(first[:, None], own)[..., None])
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bghst,bgtd->bsghd", weights, values).reshape(batch * length, -1) @ proj.T


def run(block, x, dim, cache, first, past):
    batch, length, _ = x.shape
    rotary = Tensor(np.ones((batch, length, dim), np.float32)), Tensor(np.zeros((batch, length, dim), np.float32))
    buffers = tuple(Tensor(part.copy()) for part in cache)
    return ops.attention_block(block, Tensor(x.reshape(-1, HIDDEN)), rotary, first, buffers, past).asnumpy()


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
@pytest.mark.parametrize("dim", [4, 16, 64, 96, 128, 136])
def test_block_equals_a_plain_computation_and_no_row_depends_on_the_others(dim, heads):
    qkv, proj = normal(GROUPS * (heads + 2) * dim, HIDDEN) / 5, normal(HIDDEN, GROUPS * heads * dim)
    packed = ops.PackedWeight(qkv, "float32"), ops.PackedWeight(proj, "float32")
    block = ops.AttentionBlock(*packed, None, GROUPS, dim, dim, 1e-6, SCALE)
    first, past, batch = np.array([0, 3, 9]), 7, 3
    cache = normal(batch, GROUPS, 20, dim, seed=1), normal(batch, GROUPS, 20, dim, seed=2)
    for length in (1, 4):
        x = normal(batch, length, HIDDEN, seed=3)
        found = run(block, x, dim, cache, first, past)
        np.testing.assert_allclose(found, expected(qkv, proj, x, cache, first, past), rtol=1e-3, atol=1e-3)
        for row in range(batch):
            one = slice(row, row + 1)
            alone = run(block, x[one], dim, tuple(part[one] for part in cache), first[one], past)
            np.testing.assert_array_equal(alone, found[row * length : (row + 1) * length])

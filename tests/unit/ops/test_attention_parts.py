"""Attention over parts of the keys joins to attention over all of them."""

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext import ops
from mindformers_ext.models.mask import attention_bias
from mindformers_ext.ops import attention_parts


@pytest.mark.parametrize("recorded", [False, True], ids=["predict", "train"])
@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 9), (0, 0, 3, 9), (0, 1, 2, 8, 9)])
def test_parts_join_to_the_whole(cuts, recorded, monkeypatch):
    monkeypatch.setattr(attention_parts, "recording_gradient", lambda: recorded)
    generator = np.random.default_rng(0)
    query, key, value = (
        generator.standard_normal(shape, dtype=np.float32) for shape in ((2, 2, 3, 4, 8), (2, 2, 9, 8), (2, 2, 9, 5))
    )
    mask = np.ones((2, 9), np.int32)
    mask[0, :4] = 0
    bias = attention_bias(mask, 2, 4, 5, 9)
    whole = ops.attention(Tensor(query), Tensor(key), Tensor(value), Tensor(bias), 0.3).asnumpy()
    outs, logs = [], []
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        part = (np.ascontiguousarray(array[:, :, begin:end]) for array in (key, value))
        out, log = ops.partial_attention(
            Tensor(query), *map(Tensor, part), Tensor(np.ascontiguousarray(bias[..., begin:end])), 0.3
        )
        outs.append(out.asnumpy())
        logs.append(log.asnumpy())
    weights = ops.join_weights(Tensor(np.stack(logs))).asnumpy()
    joined = sum(
        (out.reshape(8, 6, 5) * weight[..., None]).reshape(8, -1) for out, weight in zip(outs, weights, strict=True)
    )
    np.testing.assert_allclose(joined, whole, atol=2e-6)

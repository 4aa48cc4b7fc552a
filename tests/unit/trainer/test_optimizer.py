import numpy as np
import pytest
from mindspore import Parameter, Tensor

from mindformers_ext.trainer.optimizer import AdamW, clip_by_norm, decays, global_norm

SHAPES = {"layer.weight": (3, 5), "norm.weight": (5,), "layer.bias": (3,)}


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    return [Parameter(Tensor(rng.normal(size=shape).astype(np.float32)), name=name) for name, shape in SHAPES.items()]


def make_grads(step):
    rng = np.random.default_rng(100 + step)
    return [rng.normal(size=shape).astype(np.float32) * 10.0 ** (-step % 4) for shape in SHAPES.values()]


def as_tensors(arrays):
    return [Tensor(array) for array in arrays]


def reference_adamw(values, steps, rate, beta1, beta2, eps, decay):
    """AdamW of arXiv:1711.05101 in float64, the bias correction written out."""
    values = [value.astype(np.float64) for value in values]
    first, second = [np.zeros_like(v) for v in values], [np.zeros_like(v) for v in values]
    for step in range(1, steps + 1):
        for i, grad in enumerate(make_grads(step)):
            grad = grad.astype(np.float64)
            first[i] = beta1 * first[i] + (1 - beta1) * grad
            second[i] = beta2 * second[i] + (1 - beta2) * grad**2
            corrected = first[i] / (1 - beta1**step), second[i] / (1 - beta2**step)
            update = corrected[0] / (np.sqrt(corrected[1]) + eps) + (decay if values[i].ndim > 1 else 0.0) * values[i]
            values[i] = values[i] - rate(step) * update
    return values


@pytest.mark.parametrize(
    ("beta1", "beta2", "eps"), [(0.9, 0.95, 1e-8), (0.9, 0.999, 1e-3), (0, 0.9, 1e-8), (0, 0, 1e-3)]
)
def test_adamw_equals_a_float64_reference(beta1, beta2, eps):
    params = make_params()
    expected = reference_adamw([p.asnumpy() for p in params], 12, lambda t: 1e-2 / t, beta1, beta2, eps, 0.1)
    optimizer = AdamW(params, betas=(beta1, beta2), eps=eps, weight_decay=0.1)
    for step in range(1, 13):
        optimizer.step(as_tensors(make_grads(step)), 1e-2 / step)
    for param, value in zip(params, expected, strict=True):
        np.testing.assert_allclose(param.asnumpy(), value, rtol=2e-5, atol=2e-6)


def test_zero_learning_rate_changes_the_moments_only():
    params = make_params()
    before = [p.asnumpy().copy() for p in params]
    optimizer = AdamW(params, weight_decay=0.5)
    optimizer.step(as_tensors(make_grads(1)), 0.0)
    assert all(np.array_equal(p.asnumpy(), b) for p, b in zip(params, before, strict=True))
    assert np.any(optimizer.state_dict()["adam_m.norm.weight"])


def test_restored_optimizer_continues_bit_for_bit():
    params = make_params()
    optimizer = AdamW(params)
    for step in range(3):
        optimizer.step(as_tensors(make_grads(step)), 1e-2)
    weights = [p.asnumpy().copy() for p in params]
    state = {name: array.copy() for name, array in optimizer.state_dict().items()}
    optimizer.step(as_tensors(make_grads(3)), 1e-2)

    copies = [Parameter(Tensor(w), name=p.name) for w, p in zip(weights, params, strict=True)]
    restored = AdamW(copies)
    restored.load_state_dict(state)
    restored.step(as_tensors(make_grads(3)), 1e-2)
    for param, copy in zip(params, copies, strict=True):
        assert np.array_equal(param.asnumpy(), copy.asnumpy())
    assert restored.state_dict()["global_step"].tolist() == [4]


def test_state_has_the_names_of_the_checkpoint_format():
    assert set(AdamW(make_params()).state_dict()) == {"global_step"} | {
        f"{prefix}.{name}" for prefix in ("adam_m", "adam_v") for name in SHAPES
    }


def test_incomplete_or_foreign_state_is_refused_and_nothing_taken_over():
    optimizer = AdamW(make_params())
    state = {name: array.copy() for name, array in optimizer.state_dict().items()}
    with pytest.raises(ValueError, match="lacks 1 tensors: adam_v.norm.weight"):
        optimizer.load_state_dict({name: value for name, value in state.items() if name != "adam_v.norm.weight"})
    state["adam_m.layer.weight"] += 1
    state["adam_v.layer.bias"] = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"adam_v.layer.bias has shape \(4,\); expected \(3,\)"):
        optimizer.load_state_dict(state)
    assert not np.any(optimizer.state_dict()["adam_m.layer.weight"])


def test_decay_rules_include_before_exclude_before_default():
    weight, norm, bias = make_params()
    assert [decays(p) for p in (weight, norm, bias)] == [True, False, False]
    assert decays(norm, include=["norm"], exclude=["norm.weight"])
    assert not decays(weight, exclude=["lay*.weight"])
    assert decays(bias, include=["layer.bias"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -1}, "decay"),
    ],
)
def test_values_out_of_range_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        AdamW(make_params(), **options)


def test_global_norm_is_exact_for_large_tensors():
    values = np.random.default_rng(0).normal(size=(1 << 20,)).astype(np.float32)
    expected = np.sqrt(np.sum(values.astype(np.float64) ** 2) + 9.0)
    assert global_norm([Tensor(values), Tensor(np.array([[3.0]], np.float32))]) == pytest.approx(expected, rel=1e-6)
    assert np.isnan(global_norm([Tensor(np.array([1.0, np.nan], np.float32))]))


def test_clipping_scales_to_the_maximum_and_leaves_small_gradients_alone():
    grads = as_tensors([np.array([3.0], np.float32), np.array([4.0], np.float32)])
    assert [g.asnumpy().item() for g in clip_by_norm(grads, 5.0, 1.0)] == pytest.approx([0.6, 0.8])
    assert clip_by_norm(grads, 5.0, 5.0) is grads
    assert clip_by_norm(grads, 5.0, 0.0) is grads

"""The implementations of one operation agree, and gradients never meet the one without them."""

import functools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from mindformers_ext import ops
from mindformers_ext.ops import autograd, backend, host, native, reference
from mindformers_ext.ops.native import build


@pytest.fixture
def random():
    generator = np.random.default_rng(0)
    return lambda *shape: Tensor(generator.standard_normal(shape).astype(np.float32))


@pytest.fixture(params=[host, native], ids=["host", "native"])
def same(request):
    if request.param is native and not native.available():
        pytest.skip("no compiler for the C++ kernels")
    return functools.partial(_same, request.param)


def _same(implementation, name, *arguments):
    ours, theirs = getattr(implementation, name)(*arguments), getattr(reference, name)(*arguments)
    for one, other in zip(*[(r,) if isinstance(r, Tensor) else r for r in (ours, theirs)], strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=5e-6, atol=5e-6)


# One block of rows, and several whose last is shorter.
ROWS = [3, 1000]


WIDTHS = [1, 7, 17, 160]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_equals_the_reference(same, random, rows, width):
    same("rms_norm", random(rows, width), random(width), 1e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm_equals_the_reference(same, random, rows, width):
    same("add_rms_norm", random(rows, width), random(rows, width), random(width), 1e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_equals_the_reference(same, random, rows, width):
    same("swiglu", random(rows, 2 * width))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("batch", "length"), [(2, 5), (3, 1), (1, 700), (700, 1)])
def test_qkv_heads_equals_the_reference(same, random, batch, length, normed):
    groups, heads, dim = 2, 3, 18
    qkv = random(batch * length, groups * (heads + 2) * dim)
    norms = (random(dim), random(dim)) if normed else None
    half = random(batch, length, dim // 2), random(batch, length, dim // 2)
    cos, sin = (Tensor(np.concatenate([part.asnumpy()] * 2, -1)) for part in half)
    same("qkv_heads", qkv, cos, sin, groups, norms, 1e-6)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("batch", "length"), [(2, 5), (3, 1), (1, 700), (700, 1)])
def test_gated_heads_that_turn_in_part_equal_the_reference(same, random, batch, length, normed):
    groups, heads, dim, rotary_dim = 2, 3, 18, 6
    qkv = random(batch * length, groups * (2 * heads + 2) * dim)
    norms = (random(dim), random(dim)) if normed else None
    half = random(batch, length, rotary_dim // 2), random(batch, length, rotary_dim // 2)
    cos, sin = (Tensor(np.concatenate([part.asnumpy()] * 2, -1)) for part in half)
    same("qkv_heads", qkv, cos, sin, groups, norms, 1e-6, dim, True)


def test_gated_heads_are_the_plain_ones_without_the_gates(random):
    plain, (cos, sin) = random(6, 2, 5, 8), (random(2, 3, 8), random(2, 3, 8))
    gated = np.concatenate((plain.asnumpy()[:, :, :3], random(6, 2, 3, 8).asnumpy(), plain.asnumpy()[:, :, 3:]), 2)
    expected = reference.qkv_heads(plain.reshape(6, -1), cos, sin, 2)
    result = reference.qkv_heads(Tensor(gated.reshape(6, -1)), cos, sin, 2, gated=True)
    for one, other in zip(result, expected, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


def test_elements_of_a_head_that_do_not_turn_stay_as_they_are(random):
    qkv, cos, sin = random(3, 24), random(1, 3, 4), random(1, 3, 4)
    query, key, value = reference.qkv_heads(qkv, cos, sin, 1, dim=8)
    turned = [reference.rotary(qkv[:, start : start + 4], cos, sin) for start in (0, 8)]
    parts = qkv.asnumpy().reshape(3, 3, 8)
    for head, number in ((query, 0), (key, 1)):
        found = head.asnumpy().reshape(3, 8)
        np.testing.assert_array_equal(found[:, 4:], parts[:, number, 4:])
        np.testing.assert_array_equal(found[:, :4], turned[number].asnumpy()[0])
    np.testing.assert_array_equal(value.asnumpy().reshape(3, 8), parts[:, 2])


@pytest.mark.parametrize("rows", ROWS)
def test_gate_heads_equals_its_definition(random, rows):
    x, qkv = random(rows, 2 * 3 * 8), random(rows, 2 * 8 * 8)
    gates = qkv.asnumpy().reshape(rows, 2, 8, 8)[:, :, 3:6].astype(np.float64)
    expected = x.asnumpy() / (1 + np.exp(-gates.reshape(rows, -1)))
    for implementation in (reference, host):
        result = implementation.gate_heads(x, qkv, 2, 8).asnumpy()
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize(("batch", "length", "slots"), [(2, 4, 6), (300, 4, 6), (3, 1, 70), (9, 1, 33), (1, 60, 130)])
def test_attention_equals_the_reference(same, random, batch, length, slots, per_row):
    query, key, value = random(batch, 3, 2, length, 24), random(batch, 3, slots, 24), random(batch, 3, slots, 24)
    first = np.arange(batch if per_row else 1)[:, None, None, None] % 3
    visible = (np.arange(slots) >= first) & (np.arange(slots) < slots - 2)
    bias = np.where(np.broadcast_to(visible, (len(first), 1, length, slots)), 0, np.finfo(np.float32).min)
    same("attention", query, key, value, Tensor(bias.astype(np.float32)), 0.5)


def test_write_slots_changes_the_buffer_in_place(random):
    for implementation in (host, reference):
        buffer, values = random(2, 3, 8, 4), random(2, 3, 2, 4)
        expected = buffer.asnumpy().copy()
        expected[:, :, 5:7] = values.asnumpy()
        implementation.write_slots(buffer, 5, values)
        np.testing.assert_array_equal(buffer.asnumpy(), expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 32, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 7), (64, 96), (1003, 160)])
def test_linear_equals_the_reference(random, rows, outputs, inputs):
    x, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs)
    expected = x.asnumpy().astype(np.float64) @ weight.asnumpy().T.astype(np.float64) + bias.asnumpy()
    np.testing.assert_allclose(ops.linear(x, weight, bias).asnumpy(), expected, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(reference.linear(x, weight, bias).asnumpy(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")
def test_a_row_of_a_native_product_does_not_depend_on_the_others(random):
    x, weight = random(32, 300), random(100, 300)
    whole = native.linear(x, weight).asnumpy()
    for rows in (1, 2, 3, 5, 31):
        np.testing.assert_array_equal(native.linear(Tensor(x.asnumpy()[:rows].copy()), weight).asnumpy(), whole[:rows])


@pytest.mark.parametrize("implementation", [host, native], ids=["host", "native"])
def test_swiglu_of_very_negative_gates_is_zero(implementation):
    x = Tensor(np.array([[-200.0, 3.0, 200.0, 3.0]], np.float32))
    if implementation is native and not native.available():
        pytest.skip("no compiler for the C++ kernels")
    assert implementation.swiglu(x).asnumpy().tolist() == [[0.0, 600.0]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for the C++ kernels")
def test_the_kernels_compile_where_there_is_a_compiler(monkeypatch):
    monkeypatch.delenv("MINDFORMERS_EXT_KERNELS", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert build.load_library() is not None


def test_numpy_takes_over_where_nothing_can_be_compiled(monkeypatch, log):
    monkeypatch.delenv("MINDFORMERS_EXT_KERNELS", raising=False)
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert build.load_library() is None
    (record,) = log.records
    assert (
        record.getMessage()
        == "no C++ kernels (there is no /nonexistent/compiler); numpy is used instead, which is slower"
    )
    monkeypatch.setenv("MINDFORMERS_EXT_KERNELS", "numpy")
    assert build.load_library() is None
    assert len(log.records) == 1


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho no >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MINDFORMERS_EXT_KERNELS", raising=False)
    assert build.load_library() is None
    assert list((tmp_path / "cache" / "mindformers_ext").iterdir()) == []


def test_a_cache_folder_that_others_may_write_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "mindformers_ext").mkdir()
    (tmp_path / "mindformers_ext").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build._cache_folder() != tmp_path / "mindformers_ext"


@pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")
def test_a_forked_child_has_threads_of_its_own(random):
    x, weight = random(4, 2048), random(4096, 2048)
    expected = native.linear(x, weight).asnumpy().copy()
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(native.linear(x, weight).asnumpy(), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")
def test_threads_that_call_side_by_side_get_their_own_results(random):
    x, weight = [random(4, 512) for _ in range(4)], random(2048, 512)
    expected = [native.linear(part, weight).asnumpy().copy() for part in x]

    def call(index):
        return all(np.array_equal(native.linear(x[index], weight).asnumpy(), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, range(4))) == [True] * 4


@pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")
def test_a_kernel_refuses_what_is_not_dense_float32(random):
    with pytest.raises(TypeError, match="dense float32 tensor, not Float16"):
        native.linear(random(2, 8), random(4, 8).astype(ms.float16))
    with pytest.raises(TypeError, match="dense float32"):
        native.linear(random(2, 8), random(8, 4).T)


def test_a_damaged_library_is_built_again(monkeypatch, tmp_path):
    if not native.available():
        pytest.skip("no compiler for the C++ kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MINDFORMERS_EXT_KERNELS", raising=False)
    monkeypatch.setattr(build, "_FLAGS", ("-O0", *build._FLAGS[1:]))  # five builds, of which none is for speed
    assert build.load_library() is not None
    path = build._library_path()
    for damaged in (b"", path.read_bytes()[:3000], b"no library"):
        path.unlink()  # what is loaded stays as it is
        path.write_bytes(damaged)
        assert build.load_library() is not None
    path.unlink()
    assert build.load_library() is not None


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for the C++ kernels")
def test_other_flags_make_another_library(monkeypatch):
    monkeypatch.setenv("CXX", "g++")
    path = build._library_path()
    monkeypatch.setenv("CXX", "g++ -mno-avx512f")
    assert build._library_path() != path


def test_a_compiler_that_makes_nothing_is_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MINDFORMERS_EXT_KERNELS", raising=False)
    monkeypatch.setenv("CXX", "true")
    assert build.load_library() is None


def test_a_compiler_may_come_with_a_prefix(monkeypatch):
    monkeypatch.setenv("CXX", "env g++ -m64")
    assert build._compiler() == ["env", "g++", "-m64"]


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), ("0", None), ("many", None), ("", None)])
def test_threads_follow_the_usual_variable_or_the_cores(monkeypatch, variable, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = build.num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert build.num_threads() == (threads or cores)
    monkeypatch.setenv("MS_WORKER_NUM", "1000")
    assert build.num_threads() == (threads or 1)


def test_move_rows_changes_the_slots_alone_and_can_swap_rows(random):
    for implementation in (host, reference):
        buffer, rows = random(4, 3, 8, 2), np.array([1, 0, 0, 3])
        expected = buffer.asnumpy().copy()
        expected[:, :, 2:6] = expected[rows][:, :, 2:6]
        implementation.move_rows(buffer, rows, 2, 6)
        np.testing.assert_array_equal(buffer.asnumpy(), expected)


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
    for implementation in (host, reference, *([native] if native.available() else [])):
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
        "qkv_heads with gates": (
            lambda to, x: _joined(to.qkv_heads(x, cos[..., :4], sin[..., :4], 2, (weight, other), 1e-6, 8, True)),
            (6, 96),
        ),
        "qkv_heads by query norm": (
            lambda to, x: _joined(
                to.qkv_heads(sin.reshape(2, 24).tile((3, 1)).reshape(6, 24), cos, sin, 1, (x, x), 0.1)
            ),
            (8,),
        ),
        "gate_heads": (lambda _, x: ops.gate_heads(x[:, :16], x, 1, 8), (6, 48)),
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

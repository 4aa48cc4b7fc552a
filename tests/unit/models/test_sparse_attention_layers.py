"""Sparse attention gives one answer however its tokens arrive: at once, in pieces, one by one, alone or left-padded."""

import functools

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.models import transformer_config
from mindformers_ext.models.gpt_model import GPTModel
from mindformers_ext.ops import native

WINDOW, SPARSE_RATE, HEAVY_RATE = 6, 3, 4
SECTION = {
    "model_type": "deepseek_v4",
    "vocab_size": 50,
    "hidden_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "compress_rates": {"compressed_sparse_attention": SPARSE_RATE, "heavily_compressed_attention": HEAVY_RATE},
    "compress_ratios": [0, SPARSE_RATE, HEAVY_RATE, SPARSE_RATE, 0],
    "num_hash_layers": 1,
    "index_n_heads": 6,
    "index_head_dim": 8,
    "index_topk": 2,
    "hc_mult": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
LENGTHS = sorted({1, 2, *(edge + step for edge in (WINDOW, 3, 6, 4, 8) for step in (-1, 0, 1)), 23})


@functools.cache
def model():
    built = GPTModel(transformer_config(SECTION))
    built.init_weights(3)
    generator = np.random.default_rng(4)
    for name, parameter in built.parameters_and_names():
        if name.endswith(("ape", "bias", "sink")):  # zero at first, which would hide mistakes
            built.set_weight(name, generator.standard_normal(parameter.shape).astype(np.float32))
    built.set_train(False)
    return built


@functools.cache
def sequences():
    generator = np.random.default_rng(5)
    return [generator.integers(0, 50, length).tolist() for length in LENGTHS]


@functools.cache
def alone(number):
    """Logits of every token of a sequence that is run by itself and at once."""
    return model()(Tensor(np.array([sequences()[number]], np.int32)))["logits"].asnumpy()[0]


def left_padded(rows):
    width = max(map(len, rows))
    ids = np.array([[7] * (width - len(row)) + row for row in rows], np.int32)
    mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows], np.int32)
    return ids, mask


def run(ids, mask, pieces, cache):
    """Feeds the columns of a batch piece by piece; returns the logits of all."""
    start, logits = 0, []
    for size in pieces:
        stop = min(start + size, ids.shape[1])
        if start < stop:
            part = np.ascontiguousarray(ids[:, start:stop])
            known = None if mask.all() else Tensor(np.ascontiguousarray(mask[:, :stop]))
            logits.append(model()(Tensor(part), positions(mask, start, stop), known, cache)["logits"].asnumpy())
        start = stop
    return np.concatenate(logits, 1)


def positions(mask, start, stop):
    return Tensor(np.maximum(mask.cumsum(1) - 1, 0)[:, start:stop].astype(np.int32))


PIECES = {
    "at once": [23],
    "one by one": [1] * 23,
    "in threes": [3] * 8,
    "prompt, then steps": [9] + [1] * 14,
    "steps, then a chunk": [1] * 5 + [13, 1, 4],
    "a piece longer than window and rings": [2, 20, 1],
}


@pytest.fixture(params=["C++", "numpy"])
def kernels(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("no compiler for the C++ kernels")


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_a_left_padded_batch_in_any_pieces_equals_each_row_alone(pieces, kernels):
    ids, mask = left_padded(sequences())
    logits = run(ids, mask, pieces, model().new_cache(len(ids), ids.shape[1]))
    for number, row in enumerate(sequences()):
        np.testing.assert_allclose(logits[number, -len(row) :], alone(number), atol=2e-4, err_msg=f"{len(row)} tokens")


@pytest.mark.parametrize("number", range(len(LENGTHS)), ids=LENGTHS)
def test_a_sequence_one_by_one_equals_it_at_once(number):
    ids, mask = left_padded([sequences()[number]])
    np.testing.assert_allclose(run(ids, mask, [1] * 23, model().new_cache(1, 23))[0], alone(number), atol=2e-4)


def test_a_left_padded_batch_without_a_cache_equals_each_row_alone(kernels):
    ids, mask = left_padded(sequences())
    logits = run(ids, mask, [23], None)
    for number, row in enumerate(sequences()):
        np.testing.assert_allclose(logits[number, -len(row) :], alone(number), atol=2e-4)


def test_positions_follow_from_the_mask():
    ids, mask = left_padded(sequences())
    logits = model()(Tensor(ids), attention_mask=Tensor(mask))["logits"].asnumpy()
    for number, row in enumerate(sequences()):
        np.testing.assert_allclose(logits[number, -len(row) :], alone(number), atol=2e-4)


def test_what_a_token_sees_ends_with_it():
    row = sequences()[-1]
    changed = [*row[:-1], (row[-1] + 1) % 50]
    logits = model()(Tensor(np.array([changed], np.int32)))["logits"].asnumpy()[0]
    np.testing.assert_allclose(logits[:-1], alone(len(LENGTHS) - 1)[:-1], atol=2e-4)
    assert np.abs(logits[-1] - alone(len(LENGTHS) - 1)[-1]).max() > 1e-2


def test_blocks_matter_beyond_the_window():
    row = sequences()[-1]
    changed = [(row[0] + 1) % 50, *row[1:]]
    logits = model()(Tensor(np.array([changed], np.int32)))["logits"].asnumpy()[0]
    assert np.abs(logits[-1] - alone(len(LENGTHS) - 1)[-1]).max() > 1e-3


@pytest.mark.parametrize("shared", [0, 1, 5, 11, 16])
@pytest.mark.parametrize("pads", [0, 2])
def test_reordered_beams_go_on_as_the_rows_that_they_became(shared, pads):
    base, generator = sequences()[-1], np.random.default_rng(shared)
    kept = max(0, shared - pads)
    rows = [base[:kept] + generator.integers(0, 50, 16 - kept).tolist() for _ in range(3)]
    order = np.array([2, 1, 2])
    expected = left_padded([[*rows[source], *base[:7]] for source in order])
    ids = np.concatenate([np.zeros((3, pads), np.int32), np.array(rows, np.int32)], 1)
    mask = np.array([[0] * pads + [1] * 16] * 3, np.int32)
    cache = model().new_cache(3, 40)
    run(ids, mask, [pads + 9] + [1] * 7, cache)
    for state in cache:
        state.reorder(order, shared)
    following = np.array([base[:7]] * 3, np.int32)
    logits = []
    for step in range(7):
        mask = np.concatenate([mask, np.ones((3, 1), np.int32)], 1)
        known = None if mask.all() else Tensor(mask)
        place = positions(mask, mask.shape[1] - 1, mask.shape[1])
        token = Tensor(np.ascontiguousarray(following[:, step : step + 1]))
        logits.append(model()(token, place, known, cache)["logits"].asnumpy())
    plain = run(*expected, [23], None)
    np.testing.assert_allclose(np.concatenate(logits, 1), plain[:, -7:], atol=2e-4)


def test_rows_can_be_dropped_and_multiplied():
    ids, mask = left_padded([sequences()[-1][:14], sequences()[-2]])
    cache = model().new_cache(2, 30)
    run(ids, mask, [14], cache)
    order = np.array([1, 1, 0])
    for state in cache:
        state.reorder(order)
    ids, mask = (np.concatenate([part[order], np.ones((3, 3), np.int32)], 1) for part in (ids, mask))
    token = Tensor(np.ascontiguousarray(ids[:, 14:]))
    logits = model()(token, positions(mask, 14, 17), Tensor(mask), cache)["logits"].asnumpy()
    np.testing.assert_allclose(logits, run(ids, mask, [17], None)[:, 14:], atol=2e-4)


def test_the_state_grows_with_blocks_only_and_cannot_go_back():
    cache = model().new_cache(2, 64)
    assert sum(state.nbytes for state in cache) == 0
    sizes = []
    for _ in range(2):
        model()(Tensor(np.array([sequences()[-1]] * 2, np.int32)), past_key_values=cache)
        sizes.append([state.nbytes for state in cache])
    assert sizes[0][0] == sizes[1][0] == 2 * WINDOW * 16 * 4
    assert [state.length for state in cache] == [46] * 4
    for state in cache:
        state.crop(46)
        with pytest.raises(ValueError, match="cannot take tokens back: 45 of 46"):
            state.crop(45)
        with pytest.raises(ValueError, match="made for 64 tokens"):
            state.reserve(65)
        state.clear()
        assert (state.length, state.nbytes) == (0, 0)
    ids, mask = left_padded([sequences()[-1]] * 2)
    np.testing.assert_allclose(run(ids, mask, [23], cache)[1], alone(len(LENGTHS) - 1), atol=2e-4)


def test_blocks_double_up_to_the_longest_sequence():
    state = model().decoder.layers[1].self_attention.new_state(1, 300)
    blocks = []
    for length in (1, 3, 96, 99, 300):
        state.reserve(length)
        blocks.append(state.compressor.blocks.shape[2])
    assert blocks == [0, 32, 32, 64, 100]

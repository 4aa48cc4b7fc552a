"""The models equal transformers on checkpoints that transformers wrote."""

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.generate import GenerationConfig, generate_rows
from mindformers_ext.ops import native
from tests.unit.generate.checkpoint_models import FAMILIES, load_with_cases


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_nll_equal_transformers(family):
    model, cases = load_with_cases(family)
    for case in cases:
        ids = case["input_ids"]
        logits = model(Tensor(np.array([ids], np.int32)))["logits"].asnumpy()[0]
        np.testing.assert_allclose(logits[-1], case["logits_last"], atol=5e-4)
        nll = -log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(nll, case["nll"], atol=5e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_the_mean_nll_of_the_counted_labels(family):
    model, cases = load_with_cases(family)
    case = cases[-1]
    labels = np.array([case["input_ids"][1:]], np.int32)
    labels[0, :5] = -100
    loss = model(Tensor(np.array([case["input_ids"][:-1]], np.int32)), labels=Tensor(labels))
    assert float(loss.asnumpy()) == pytest.approx(np.mean(case["nll"][5:]), abs=5e-4)


@pytest.mark.parametrize("kernels", ["C++", "numpy"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_transformers_alone_and_in_one_batch(family, use_cache, kernels, monkeypatch):
    if kernels == "numpy":
        monkeypatch.setattr(native, "available", lambda: False)
    model, cases = load_with_cases(family)
    config = GenerationConfig(max_new_tokens=24, use_cache=use_cache)
    prompts, expected = [case["input_ids"] for case in cases], [case["greedy"] for case in cases]
    assert [row.token_ids for row in generate_rows(model, prompts, config)] == expected
    assert [generate_rows(model, [prompt], config)[0].token_ids for prompt in prompts] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_in_pieces_gives_the_same_ids(family):
    model, cases = load_with_cases(family)
    prompts, expected = [case["input_ids"] for case in cases], [case["greedy"] for case in cases]
    rows = generate_rows(model, prompts, GenerationConfig(max_new_tokens=24, prefill_chunk_size=3))
    assert [row.token_ids for row in rows] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_stop_at_any_id_of_the_eos_list(family):
    model, cases = load_with_cases(family)
    for case in cases:
        config = GenerationConfig(max_new_tokens=24, eos_token_id=case["eos_list"]["eos_token_id"])
        row = generate_rows(model, [case["input_ids"]], config)[0]
        assert (row.token_ids, row.finish_reason) == (case["eos_list"]["ids"], "eos")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_ends_early_leaves_its_partners_alone(family):
    model, cases = load_with_cases(family)
    prompts = [case["input_ids"] for case in cases]
    eos = cases[0]["greedy"][3]
    rows = generate_rows(model, prompts, GenerationConfig(max_new_tokens=24, eos_token_id=eos))
    for row, case in zip(rows, cases, strict=True):
        greedy = case["greedy"]
        assert row.token_ids == (greedy[: greedy.index(eos) + 1] if eos in greedy else greedy)

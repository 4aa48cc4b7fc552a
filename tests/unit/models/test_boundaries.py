"""The models equal transformers around every length at which one of them changes what it does."""

import functools
import pathlib
import tempfile

import boundary_cases
import numpy as np
import pytest

from mindformers_ext.checkpoint import load_weights
from mindformers_ext.generate import GenerationConfig, generate_rows
from mindformers_ext.models import transformer_config
from mindformers_ext.models.families import FAMILIES
from mindformers_ext.models.gpt_model import GPTModel

# Of the largest logit of a row.
LIMIT = 5e-4
STORED = sorted(path.stem for path in boundary_cases.FOLDER.glob("*.json"))
CASES = [(family, name) for family in STORED for name in boundary_cases.cases(family)]
every_case = pytest.mark.parametrize(("family", "name"), CASES, ids=["-".join(case) for case in CASES])


@functools.cache
def load(family, name):
    case = boundary_cases.cases(family)[name]
    model = GPTModel(transformer_config({}, case["config"]))
    with tempfile.TemporaryDirectory() as folder:
        boundary_cases.write_checkpoint(pathlib.Path(folder), case)
        load_weights(pathlib.Path(folder), model.weight_layout(), model.set_weight)
    return model, case


def check(model, prompts, logit_ids, new_tokens=12, **options):
    """Compares the logits after the prompts, run as one batch, and the greedy ids with the stored ones."""
    scores = []
    config = GenerationConfig(max_new_tokens=new_tokens, **options)
    rows = generate_rows(model, [prompt["ids"] for prompt in prompts], config, step_scores=scores)
    for row, logits, prompt in zip(rows, scores[0], prompts, strict=True):
        what = f"prompt of {len(prompt['ids'])} tokens"
        atol = LIMIT * prompt["largest"]
        np.testing.assert_allclose(logits[logit_ids], prompt["logits"], rtol=0, atol=atol, err_msg=what)
        summary = [logits.mean(), np.sqrt(np.square(logits).mean()), np.abs(logits).max()]
        expected = [prompt["mean"], prompt["rms"], prompt["largest"]]
        np.testing.assert_allclose(summary, expected, rtol=0, atol=atol, err_msg=what)
        assert row.token_ids == prompt["greedy"][:new_tokens], what


@every_case
def test_prompts_alone_equal_transformers(family, name):
    model, case = load(family, name)
    for prompt in case["prompts"]:
        check(model, [prompt], case["logit_ids"], new_tokens=5)


@every_case
def test_prompts_in_one_padded_batch_equal_transformers(family, name):
    model, case = load(family, name)
    check(model, case["prompts"], case["logit_ids"])


@pytest.mark.parametrize("size", [3, 5])
@every_case
def test_padded_batch_in_pieces_equals_transformers(family, name, size):
    model, case = load(family, name)
    prompts = [prompt for prompt in case["prompts"] if len(prompt["ids"]) <= 70]
    check(model, prompts, case["logit_ids"], prefill_chunk_size=size)


@every_case
def test_single_prompt_in_pieces_equals_transformers(family, name):
    model, case = load(family, name)
    longest = max(case["prompts"], key=lambda prompt: len(prompt["ids"]))
    check(model, [longest], case["logit_ids"], prefill_chunk_size=7)


@every_case
def test_forward_without_cache_equals_transformers(family, name):
    model, case = load(family, name)
    check(model, case["prompts"][1::3], case["logit_ids"], new_tokens=5, use_cache=False)


def test_every_family_has_stored_cases():
    stored = {boundary_cases.cases(family)[name]["config"]["model_type"] for family, name in CASES}
    assert stored == set(FAMILIES)

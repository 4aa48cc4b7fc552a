"""Scores after the processors of each option are those of transformers (tests/oracle/make_processors.py)."""

import json
import pathlib

import numpy as np
import pytest
from rowtools import kept, process

REFERENCE = json.loads((pathlib.Path(__file__).parents[2] / "data" / "processors.json").read_text(encoding="utf-8"))
PROMPT = REFERENCE["prompt_length"]


def array(rows):
    return np.array([[-np.inf if value is None else value for value in row] for row in rows], np.float32)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: str(case["options"]))
def test_scores_are_those_of_transformers(case):
    before, after = array(case["scores"]), array(case["after"])
    result = process(case["options"], before, case["ids"], prompt=PROMPT)
    assert kept(result) == kept(after)
    np.testing.assert_allclose(result, after, rtol=2e-6, atol=2e-6)
    alone = [process(case["options"], before[row], [ids], prompt=PROMPT)[0] for row, ids in enumerate(case["ids"])]
    np.testing.assert_array_equal(alone, result)


def test_every_case_changes_something_but_that_of_the_last_length():
    idle = [case["options"] for case in REFERENCE["cases"] if case["scores"] == case["after"]]
    assert idle == [{"min_new_tokens": 6, "eos_token_id": [4, 7]}, {"forced_eos_token_id": 4, "max_new_tokens": 8}]

"""The shipped quickstart files belong together, and the questions are honest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mindformers_ext.config import load_config
from mindformers_ext.predict import Tokenizer
from scripts import make_quickstart_data
from scripts.make_quickstart_data import Question, check_unique

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart"


def records(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (QUICKSTART / name).read_text(encoding="utf-8").splitlines()]


def test_committed_data_is_what_the_generator_writes(tmp_path, monkeypatch):
    exam = tmp_path / "exam.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_quickstart_data.py", "--output", str(tmp_path), "--exam", str(exam)])
    make_quickstart_data.main()
    for name in ("facts.jsonl", "sums.jsonl", "prompts.jsonl", "tokenizer/tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes(), name
    written, committed = (Tokenizer.from_folder(folder / "tokenizer") for folder in (tmp_path, QUICKSTART))
    prompts = [json.loads(line)["instruction"] for line in exam.read_text(encoding="utf-8").splitlines()]
    assert len(prompts) > 5000
    assert [written.encode(prompt) for prompt in prompts] == [committed.encode(prompt) for prompt in prompts]


def test_there_are_prompts_of_all_four_kinds():
    kinds = [record["kind"] for record in records("prompts.jsonl")]
    assert len(kinds) >= 24
    assert min(kinds.count(kind) for kind in ("arithmetic", "capital", "poem", "translation")) >= 6


def test_sums_that_are_asked_were_never_trained_in_either_order():
    trained = {record["prompt"] for record in records("sums.jsonl")}
    asked = [record["instruction"] for record in records("prompts.jsonl") if record["kind"] == "arithmetic"]
    swapped = [" ".join([*reversed(prompt.split()[:3]), "="]) for prompt in asked if "+" in prompt]
    assert not trained & {*asked, *swapped}


def test_training_sums_are_right():
    for record in records("sums.jsonl"):
        left, operator, right, _ = record["prompt"].split()
        value = int(left) + int(right) if operator == "+" else int(left) - int(right)
        assert record["response"] == f" {value}", record


def test_facts_that_are_asked_are_in_the_training_data():
    facts = {record["prompt"]: record["response"].strip() for record in records("facts.jsonl")}
    for record in records("prompts.jsonl"):
        if record["kind"] != "arithmetic":
            assert facts[record["instruction"]] == record["answer"]


def test_a_prompt_has_the_same_tokens_alone_and_before_its_answer():
    tokenizer = Tokenizer.from_folder(QUICKSTART / "tokenizer")
    for record in [*records("facts.jsonl"), *records("sums.jsonl")[::50]]:
        prompt, answer = record["prompt"], record["response"]
        assert tokenizer.encode(prompt + answer) == tokenizer.encode(prompt) + tokenizer.encode(answer)
        assert tokenizer.decode(tokenizer.encode(prompt + answer)) == prompt + answer


def test_two_answers_to_one_prompt_are_refused():
    with pytest.raises(ValueError, match="two answers"):
        check_unique([Question("word", "a =", " b"), Question("word", "a =", " c")])


def test_shipped_files_load_and_name_files_that_exist():
    train = load_config(QUICKSTART / "train.yaml")
    predict = load_config(QUICKSTART / "predict.yaml")
    dataloader = train.train_dataset.dataloader
    for path in (*dataloader.path, dataloader.tokenizer_path, predict.inference.input_data):
        assert (ROOT / path).exists(), path
    assert Tokenizer.from_folder(ROOT / dataloader.tokenizer_path).vocab_size == train.model.extra["vocab_size"]

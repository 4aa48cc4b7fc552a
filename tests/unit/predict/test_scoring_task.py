"""Records that are scored: what is asked of the model, rows, errors and the numbers of a run."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindformers_ext.predict import PromptTemplates, RunSummary, Tokenizer, format_summary, normalize_input, open_job
from mindformers_ext.predict.pairs import encode_pair
from mindformers_ext.predict.run import run_records
from mindformers_ext.predict.scoring import SCORE_NAMES, ScoringOptions, ScoringTask, choice_values

DATA = Path(__file__).parents[2] / "data" / "tokenizer"


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer.from_folder(DATA)._backend
    return Tokenizer(backend, {"eos_token": "z"})


@dataclass
class Said:
    token_logprobs: list[float]
    is_greedy: bool


def model(groups, indices):
    """Each token has the log-probability -id / 8; a continuation without an even id is greedy."""
    return [
        [Said([-token / 8 for token in ids], not any(token % 2 == 0 for token in ids)) for _, ids in group]
        for group in groups
    ]


class Rows(list):
    def write(self, index, content, rows):
        self.extend(rows)


def run(tokenizer, data, max_length=None, vocab_size=None, **options):
    rows = Rows()
    task = ScoringTask(tokenizer, ScoringOptions(**options), max_length, vocab_size)
    make = PromptTemplates(may_be_empty="target_field" in options).prompt_maker("instruction")
    result = run_records(normalize_input(data, make_prompt=make), task, model, rows, batch_size=2)
    return sorted(rows, key=lambda row: row["sample_idx"]), result


def total(ids):
    return -sum(ids) / 8


def test_the_row_of_a_target(tokenizer):
    data = {"instruction": "the cat", "answer": " é", "id": 7, "acc": "mine"}
    (row,), result = run(tokenizer, data, target_field="answer")
    context, ids = encode_pair(tokenizer, "the cat", " é")
    assert row == {
        "sample_idx": 0,
        "loglikelihood": pytest.approx(total(ids), abs=1e-4),
        "loglikelihood_per_token": pytest.approx(total(ids) / len(ids), abs=1e-4),
        "loglikelihood_per_byte": pytest.approx(total(ids) / 3, abs=1e-4),
        "is_greedy": not any(token % 2 == 0 for token in ids),
        "instruction": "the cat",
        "answer": " é",
        "id": 7,
        "record": {"acc": "mine"},
        "num_prompt_tokens": len(context),
        "num_target_tokens": len(ids),
        "token_logprobs": [round(-token / 8, 4) for token in ids],
    }
    assert result.outputs == [(0, row["loglikelihood"])]


def test_the_row_of_choices_has_the_best_by_sum_characters_and_bytes(tokenizer):
    choices = ["a", "b" * 9, "é" * 6]
    data = {"instruction": "the", "choices": choices, "right": 1}
    (row,), _ = run(tokenizer, data, target_field="choices", answer_field="right", token_logprobs=False)
    sums = [total(encode_pair(tokenizer, "the", choice)[1]) for choice in choices]
    assert row["loglikelihood"] == pytest.approx(sums, abs=1e-4)
    by_characters = [value / len(choice) for value, choice in zip(sums, choices, strict=True)]
    by_bytes = [value / len(choice.encode()) for value, choice in zip(sums, choices, strict=True)]
    chosen = {"": sums, "_norm": by_characters, "_bytes": by_bytes}
    for suffix, values in chosen.items():
        assert row["best" + suffix] == max(range(3), key=values.__getitem__)
        assert row["acc" + suffix] == float(row["best" + suffix] == 1)
    assert row["answer_idx"] == 1 and "token_logprobs" not in row
    assert row["num_target_tokens"] == [len(encode_pair(tokenizer, "the", choice)[1]) for choice in choices]


def test_the_best_choice_by_sum_by_characters_and_by_bytes():
    found = choice_values([-4.0, -6.0, -9.0], ["ab", "abcd", "éééé"], 1)
    assert [found[name] for name in ("best", "best_norm", "best_bytes")] == [0, 1, 2]
    assert [found[name] for name in ("acc", "acc_norm", "acc_bytes")] == [0.0, 1.0, 0.0]


def test_of_equal_choices_the_first_is_best(tokenizer):
    (row,), _ = run(tokenizer, {"instruction": "x", "c": ["a", "a"], "a": "a"}, target_field="c", answer_field="a")
    assert (row["best"], row["answer_idx"], row["acc"]) == (0, 0, 1.0)


def test_the_delimiter_is_scored_and_not_counted_among_bytes(tokenizer):
    (row,), _ = run(tokenizer, {"instruction": "the", "t": "cat"}, target_field="t", target_delimiter=" ")
    assert row["loglikelihood_per_byte"] == pytest.approx(total(encode_pair(tokenizer, "the", " cat")[1]) / 3, abs=1e-4)


def test_the_row_of_a_prompt_leaves_its_first_token_out(tokenizer):
    (row,), result = run(tokenizer, "the cat and")
    ids = tokenizer.encode("the cat and")
    nll = -total(ids[1:]) / (len(ids) - 1)
    assert (row["loglikelihood"], row["nll"]) == pytest.approx((total(ids[1:]), nll), abs=1e-4)
    assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-3)
    assert (row["num_prompt_tokens"], row["num_target_tokens"]) == (len(ids), len(ids) - 1)
    assert "num_words" not in row and result.summary.scores["nll"] == pytest.approx(nll, abs=1e-4)


def test_rolling_scores_every_token_and_counts_words_and_bytes_as_lm_eval(tokenizer):
    texts = ["two words", " é  è "]
    rows, result = run(tokenizer, texts, max_length=3, rolling=True)
    ids = [tokenizer.encode(text) for text in texts]
    assert [row["loglikelihood"] for row in rows] == pytest.approx([total(some) for some in ids], abs=1e-4)
    assert [row["num_target_tokens"] for row in rows] == [len(some) for some in ids]
    assert [(row["num_words"], row["num_bytes"]) for row in rows] == [(2, 9), (4, 8)]
    assert [len(row["token_logprobs"]) for row in rows] == [len(some) for some in ids]
    scores, whole = result.summary.scores, sum(map(total, ids))
    assert scores["bits_per_byte"] == pytest.approx(-whole / 17 / math.log(2), abs=1e-4)
    assert scores["byte_perplexity"] == pytest.approx(math.exp(-whole / 17), rel=1e-4)
    assert scores["word_perplexity"] == pytest.approx(math.exp(-whole / 6), rel=1e-3)
    assert scores["token_perplexity"] == pytest.approx(math.exp(-whole / sum(map(len, ids))), rel=1e-4)


def test_values_of_metrics_in_the_input_are_fields_of_the_record(tokenizer):
    (row,), _ = run(tokenizer, {"instruction": "x", "t": ["a"], "answer_metrics": {"right": 1.0}}, target_field="t")
    assert row["record"] == {"answer_metrics": {"right": 1.0}} and "answer_metrics" not in row


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "the record has no field 't', which predict.target_field names"),
        ({"t": 3}, "field 't' must be a string or an array of strings, not a number"),
        ({"t": None}, "field 't' must be a string or an array of strings, not null"),
        ({"t": ""}, "field 't' is empty"),
        ({"t": []}, "field 't' is an empty array"),
        ({"t": ["a", True]}, "element 1 of field 't' must be a string, not a boolean"),
        ({"t": ["a", ""]}, "element 1 of field 't' is empty"),
        ({"t": ["a", "b"]}, "the record has no field 'a', which predict.answer_field names"),
        ({"t": ["a", "b"], "a": 2}, "field 'a' is 2; choices are numbered from 0 to 1"),
        ({"t": ["a", "b"], "a": -1}, "field 'a' is -1; choices are numbered from 0 to 1"),
        ({"t": ["a", "b"], "a": "c"}, "field 'a' is none of the 2 choices"),
        ({"t": ["a", "b"], "a": True}, "field 'a' must be an integer, or the text of a choice, not a boolean"),
        ({"t": ["a", "b"], "a": 1.0}, "field 'a' must be an integer, or the text of a choice, not 1.0"),
        ({"t": "a", "a": 0}, "field 'a' names the right one of several choices, and the target is a string"),
    ],
)
def test_a_field_of_another_form_is_a_schema_error_in_one_sentence(tokenizer, fields, message):
    good = {"instruction": "x", "t": ["a"], "a": 0}
    rows, _ = run(tokenizer, [good, {"instruction": "x", **fields}, good], target_field="t", answer_field="a")
    assert [row.get("error_type") for row in rows] == [None, "schema", None]
    assert rows[1]["error"] == message


def test_what_is_too_long_is_an_error_or_cut_on_the_left(tokenizer):
    data = {"instruction": "the cat and the dog", "t": ["x", "yyyy"]}
    context = tokenizer.encode("the cat and the dog")
    longest = len(context) + 4 - 1
    assert "error" not in run(tokenizer, data, max_length=longest, target_field="t")[0][0]
    (row,), _ = run(tokenizer, data, max_length=longest - 1, target_field="t")
    assert row["error_type"] == "too_long"
    assert row["error"] == (
        f"choice 1: {len(context)} prompt tokens + 4 of the target, of which the last is not read, exceed the model's "
        f"length {longest - 1}; predict.truncation: left drops the first ones of the prompt"
    )
    (row,), _ = run(tokenizer, data, max_length=5, target_field="t", truncation="left")
    assert row["num_prompt_tokens"] == 5 and row["num_target_tokens"] == [1, 4]
    for truncation in ("left", "none"):
        (row,), _ = run(tokenizer, {**data, "t": ["yyyy"]}, max_length=3, target_field="t", truncation=truncation)
        assert row["error"] == "choice 0: 4 tokens of the continuation exceed the model's length 3"
    (row,), _ = run(tokenizer, data["instruction"], max_length=len(context) - 2)
    assert row["error_type"] == "too_long" and row["error"].endswith("predict.rolling: true scores longer texts")
    assert "error" not in run(tokenizer, data["instruction"], max_length=len(context) - 1)[0][0]


def test_other_records_that_cannot_be_scored(tokenizer):
    rows, _ = run(tokenizer, ["a", "\ud800", ""])
    assert [row["error_type"] for row in rows] == ["schema", "tokenize", "schema"]
    assert rows[0]["error"].endswith("predict.rolling: true scores it too")
    top = max(tokenizer.encode("hi"))
    (row,), _ = run(tokenizer, {"instruction": "x", "t": "hi"}, vocab_size=top, target_field="t")
    assert row["error_type"] == "tokenize" and str(top) in row["error"]


def test_an_empty_prompt_is_one_where_a_target_follows(tokenizer):
    (row,), _ = run(tokenizer, {"instruction": "", "t": "cat"}, target_field="t")
    assert row["num_prompt_tokens"] == 1
    assert row["loglikelihood"] == pytest.approx(total(tokenizer.encode("cat")), abs=1e-4)


def test_a_tokenizer_without_a_prefix_is_refused_before_the_first_text(tokenizer):
    with pytest.raises(ValueError, match="neither a bos_token nor an eos_token"):
        ScoringTask(Tokenizer(tokenizer._backend), ScoringOptions(rolling=True))


def test_accuracy_is_over_records_with_an_answer_and_its_error_that_of_lm_eval(tokenizer):
    data = [{"instruction": "x", "c": ["a", "b"], "r": number % 2} for number in range(4)] + [{"instruction": "x"}]
    _, result = run(tokenizer, data, target_field="c", answer_field="r")
    scores = result.summary.scores
    assert result.summary.num_errors == 1
    assert (scores["acc"], scores["acc_norm"], scores["acc_bytes"]) == (0.5, 0.5, 0.5)
    assert scores["acc_stderr"] == pytest.approx(math.sqrt(0.25 / 3))
    assert "nll" not in scores and "greedy" not in scores
    assert any(line.startswith("scores: acc 0.5000") for line in format_summary(result.summary))


def test_the_numbers_of_a_file_are_those_of_its_rows(tokenizer, tmp_path):
    data = [{"instruction": "the", "t": text} for text in ("cat", "dogs", "é")]
    task = ScoringTask(tokenizer, ScoringOptions(target_field="t"))
    path = tmp_path / "o.jsonl"
    outputs = []
    with open_job(path, {"a": 1}) as job:
        result = run_records(normalize_input(data), task, model, job, batch_size=2)
        summary = job.publish(3, outputs)
    assert outputs == result.outputs
    assert summary.scores == pytest.approx(result.summary.scores)
    again = RunSummary()
    for line in path.read_text(encoding="utf-8").splitlines():
        again.add_row(json.loads(line))
    assert again.scores == pytest.approx(summary.scores) and again.num_answers == 3
    with open_job(path, {"a": 1}) as job:
        assert job.manifest.summary().scores == summary.scores
        assert job.stored_outputs() == outputs
    assert RunSummary.from_dict(summary.to_dict()).scores == summary.scores


def test_every_field_of_a_row_is_a_name_of_ours(tokenizer):
    found = set()
    for data, options in (
        ("the cat", {"rolling": True}),
        ({"instruction": "x", "t": "y"}, {"target_field": "t"}),
        ({"instruction": "x", "t": ["y"], "a": 0}, {"target_field": "t", "answer_field": "a"}),
    ):
        (row,), _ = run(tokenizer, data, **options)
        found |= row.keys() - {"instruction", "t", "a"}
    assert found == SCORE_NAMES - {"generated_ids", "answer_metrics", "error", "error_type", "record"}


def test_a_value_beyond_float64_is_none_in_rows_and_scores(tokenizer):
    def hopeless(groups, indices):
        return [[Said([-1e6], False) for _ in group] for group in groups]

    rows = Rows()
    result = run_records(
        normalize_input(["the cat"]), ScoringTask(tokenizer, ScoringOptions()), hopeless, rows, batch_size=1
    )
    assert rows[0]["perplexity"] is None and result.summary.scores["token_perplexity"] is None
    assert "token_perplexity too large" in "".join(format_summary(result.summary))

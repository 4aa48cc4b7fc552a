"""Rows of several answers to a record, and what may be known of an answer."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_ext.predict import Completion, Tokenizer, format_summary, normalize_input, run_generation
from mindformers_ext.predict.text import answer_text
from mindformers_ext.predict.writers import write_rows

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
TOKENIZER = Tokenizer.from_folder(DATA)
EOS = 0


class Rows(list):
    """Keeps rows in the order of their records."""

    def write(self, index, content, rows):
        self[:] = sorted([*self, *rows], key=lambda row: (row["sample_idx"], row.get("sequence_idx", 0)))


def run(data, answers, **options):
    rows, records = Rows(), normalize_input(data)
    options = {"batch_size": 2, "max_new_tokens": 9} | options
    result = run_generation(records, TOKENIZER, lambda prompts, _: answers(prompts), rows, **options)
    return rows, result


def completion(text, reason="length", **known):
    return Completion(TOKENIZER.encode(text), reason, **known)


def test_every_answer_of_a_record_is_a_row_with_its_number_and_the_records_fields():
    def answers(prompts):
        return [completion(text) for _ in prompts for text in ("x", "yy", "z")]

    rows, result = run([{"instruction": text, "id": text} for text in ("a", "", "b")], answers, num_sequences=3)
    assert [(row["sample_idx"], row.get("sequence_idx"), row.get("generated_text"), row["id"]) for row in rows] == [
        *[(0, i, text, "a") for i, text in enumerate(("x", "yy", "z"))],
        (1, None, None, ""),
        *[(2, i, text, "b") for i, text in enumerate(("x", "yy", "z"))],
    ]
    assert list(rows[0])[:2] == ["sample_idx", "sequence_idx"]
    assert [index for index, _ in result.outputs] == [0, 0, 0, 2, 2, 2]


def test_the_summary_counts_records_and_prompt_tokens_once():
    rows, result = run(["ab", "", "ab"], lambda prompts: [completion("xyz")] * 2 * len(prompts), num_sequences=2)
    summary = result.summary
    assert (summary.num_records, summary.num_answers, summary.num_errors) == (3, 2, 1)
    assert summary.finish_reasons == {"length": 4}
    assert summary.prompt_tokens == 2 * len(TOKENIZER.encode("ab"))
    assert summary.new_tokens == 4 * len(TOKENIZER.encode("xyz"))
    assert "records: 3, answered: 2 (length 4), errors: 1 (schema 1)" in format_summary(summary)[0]


def test_a_wrong_number_of_answers_is_an_error_of_the_program():
    with pytest.raises(RuntimeError, match="decode returned 2 answers for 1 prompts, not 3 for each"):
        run(["a"], lambda prompts: [completion("x")] * 2, num_sequences=3)


def test_what_was_asked_for_comes_after_the_counts_and_can_be_written_as_json(tmp_path):
    known = {"score": -0.5, "logprobs": [-0.25], "top_logprobs": [[(5, -0.25), (6, -1.5)]]}
    rows, _ = run(["a"], lambda prompts: [completion("x", "time", **known)])
    assert list(rows[0])[-4:] == ["num_new_tokens", "sequence_score", "logprobs", "top_logprobs"]
    assert rows[0]["finish_reason"] == "time"
    write_rows(tmp_path / "out.jsonl", rows[:1])
    assert json.loads((tmp_path / "out.jsonl").read_text())["top_logprobs"] == [[[5, -0.25], [6, -1.5]]]


def test_scores_are_written_with_four_decimals_and_a_users_own_numbers_as_they_are():
    known = {"score": -0.12345678, "logprobs": [-1e-7], "top_logprobs": [[(5, -0.00004999), (6, -1.5)]]}
    rows, _ = run([{"instruction": "a", "weight": 0.123456789}], lambda prompts: [completion("x", **known)])
    assert (rows[0]["sequence_score"], rows[0]["weight"]) == (-0.1235, 0.123456789)
    assert json.dumps([rows[0]["logprobs"], rows[0]["top_logprobs"]]) == "[[0.0], [[[5, 0.0], [6, -1.5]]]]"


def test_a_users_field_named_like_a_new_key_is_kept_under_record():
    rows, _ = run([{"instruction": "a", "logprobs": "mine", "score": 3}], lambda prompts: [completion("x")])
    assert (rows[0]["record"], rows[0]["score"]) == ({"logprobs": "mine"}, 3)


def test_the_text_ends_before_the_stop_string_and_the_ids_do_not():
    new = TOKENIZER.encode("one STOP two")
    position = TOKENIZER.decode_new([], new, False).index("STOP")
    answer = Completion(new, "stop", stop_string="STOP", stop_position=position)
    rows, _ = run(["a"], lambda prompts: [answer])
    assert (rows[0]["generated_text"], rows[0]["stop_string"]) == ("one ", "STOP")
    assert rows[0]["generated_ids"][-len(new) :] == new


def test_a_special_token_can_be_the_stop_string():
    new = [*TOKENIZER.encode("ab"), EOS, *TOKENIZER.encode("cd")]
    special = TOKENIZER.decode([EOS], False)
    assert special and TOKENIZER.decode([EOS], True) == ""
    whole = TOKENIZER.decode_new([], new, False)
    for cut in range(len(special)):
        shown = answer_text(TOKENIZER, [], new, whole.index(special) + cut, skip_special_tokens=True)
        assert shown == "ab"
    assert answer_text(TOKENIZER, [], new, whole.rindex("d"), skip_special_tokens=True) == "abc"


@given(st.text("ab é€\n", max_size=12), st.data())
def test_every_cut_gives_the_text_before_it(text, data):
    prompt, new = TOKENIZER.encode("p"), TOKENIZER.encode(text)
    whole = TOKENIZER.decode_new(prompt, new, False)
    position = data.draw(st.integers(0, len(whole)))
    for skip in (True, False):
        assert answer_text(TOKENIZER, prompt, new, position, skip) == whole[:position]

from pathlib import Path

import pytest

from mindformers_ext.predict import (
    Completion,
    JobStoppedError,
    Record,
    RecordError,
    Timings,
    Tokenizer,
    format_summary,
    normalize_input,
    run_generation,
)

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
EOS = 0


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(DATA)


class Model:
    """Answers a prompt with its own ids and EOS; fails on batches that hold a record index of `bad`."""

    def __init__(self, bad=(), failure=None):
        self.batches = []
        self.bad = set(bad)
        self.failure = failure or RuntimeError("first line\n  C++ call stack\n  of many lines")

    def __call__(self, prompts, indices):
        self.batches.append(list(indices))
        if self.bad.intersection(indices):
            raise self.failure
        return [Completion([*prompt, EOS], "eos") for prompt in prompts]


class Rows(list):
    """Keeps rows in the order of their records, and the numbers of records in the order in which they came."""

    def __init__(self):
        super().__init__()
        self.order = []

    def write(self, index, content, rows):
        assert content
        self.order.append(index)
        self[:] = sorted([*self, *rows], key=lambda row: (row["sample_idx"], row.get("sequence_idx", 0)))


def run(tokenizer, data, model=None, **options):
    rows = Rows()
    options = {"batch_size": 3, "max_new_tokens": 4} | options
    result = run_generation(normalize_input(data), tokenizer, model or Model(), rows, **options)
    return rows, result


def test_an_answer_row_has_these_keys_in_this_order(tokenizer):
    rows, result = run(tokenizer, {"id": 7, "instruction": "hi", "tags": ["x"]})
    ids = tokenizer.encode("hi")
    expected = {
        "sample_idx": 0,
        "generated_ids": [*ids, *ids, EOS],
        "generated_text": "hi",
        "id": 7,
        "instruction": "hi",
        "tags": ["x"],
        "finish_reason": "eos",
        "num_prompt_tokens": 2,
        "num_new_tokens": 3,
    }
    assert rows == [expected] and list(rows[0]) == list(expected)
    assert result.outputs == [(0, [*ids, *ids, EOS])]


def test_an_error_row_has_these_keys_in_this_order(tokenizer):
    rows, result = run(tokenizer, {"id": 7, "instruction": ""})
    expected = {"sample_idx": 0, "error": "field 'instruction' is empty", "error_type": "schema", "id": 7}
    assert rows == [expected | {"instruction": ""}]
    assert list(rows[0]) == [*expected, "instruction"]
    assert result.outputs == []


@pytest.mark.parametrize("prompt", ["hi", ""])
def test_own_fields_named_like_ours_are_kept_under_record(tokenizer, prompt):
    own = {"error": "mine", "generated_text": "old", "sample_idx": 99, "record": 1, "instruction": prompt}
    rows, _ = run(tokenizer, own)
    assert rows[0]["sample_idx"] == 0
    assert rows[0]["record"] == {"error": "mine", "generated_text": "old", "sample_idx": 99, "record": 1}
    assert rows[0]["instruction"] == prompt
    assert ("error" in rows[0]) is (prompt == "")


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 100])
def test_every_record_has_one_row_in_input_order_at_any_batch_size(tokenizer, batch_size):
    data = [{"instruction": "x" * (i % 4), "id": i} for i in range(50)]
    rows, result = run(tokenizer, data, batch_size=batch_size)
    assert [row["sample_idx"] for row in rows] == [row["id"] for row in rows] == list(range(50))
    assert [index for index, _ in result.outputs] == [i for i in range(50) if i % 4]
    assert rows == run(tokenizer, data, batch_size=1)[0]


def test_batches_are_full_whatever_errors_lie_between(tokenizer):
    model = Model()
    run(tokenizer, [{"instruction": text} for text in ("", "a", "", "b", "c", "d", "", "e")], model)
    assert model.batches == [[1, 3, 4], [5, 7]]


def test_prompts_of_a_window_are_answered_with_those_of_their_length_the_longest_first(tokenizer):
    model = Model()
    rows, _ = run(tokenizer, ["z" * (1 + index % 5) for index in range(10)], model, batch_size=2)
    lengths = [len(tokenizer.encode("z" * (1 + index % 5))) for index in range(10)]
    first, rest = model.batches[:4], model.batches[4:]
    order = [index for batch in first for index in batch]
    assert sorted(order) == list(range(8)) and rest == [[9, 8]]
    assert [lengths[index] for index in order] == sorted((lengths[index] for index in order), reverse=True)
    assert [row["sample_idx"] for row in rows] == list(range(10))


def test_a_bounded_number_of_records_is_read_ahead_whatever_they_are(tokenizer):
    rows = Rows()

    def source():
        for index in range(500):
            assert index - len(rows.order) < 2 * 4 * 2  # a window of prompts, and as many errors
            bad = index % 3 == 1 or 100 < index < 300
            yield Record(index, {}, None, RecordError("parse", "bad")) if bad else Record(index, {}, "a")

    run_generation(source(), tokenizer, Model(), rows, batch_size=2, max_new_tokens=1)
    assert len(rows) == 500


def test_a_prompt_that_does_not_fit_is_an_error_and_never_cut(tokenizer):
    model = Model()
    rows, _ = run(tokenizer, ["hi", "hi there"], model, max_new_tokens=4, max_length=6)
    assert [row.get("error_type") for row in rows] == [None, "too_long"] and model.batches == [[0]]
    (row,), _ = run(tokenizer, ["hi"], max_new_tokens=4, max_length=5)
    assert row["error"] == "2 prompt tokens + max_new_tokens 4 exceed the model's length 5"


def test_a_prompt_with_an_id_beyond_the_model_is_a_tokenize_error(tokenizer):
    top = max(tokenizer.encode("hi"))
    (row,), _ = run(tokenizer, ["hi"], vocab_size=top)
    assert row["error_type"] == "tokenize" and str(top) in row["error"]
    assert "error" not in run(tokenizer, ["hi"], vocab_size=top + 1)[0][0]


def test_half_a_surrogate_pair_is_a_tokenize_error_and_its_neighbours_live(tokenizer):
    rows, _ = run(tokenizer, ["a", "\ud800", "b"])
    assert [row.get("error_type") for row in rows] == [None, "tokenize", None]
    assert rows[1]["instruction"] == "\ud800"


@pytest.mark.parametrize("guilty", [0, 5, 7])
def test_a_failing_record_is_found_and_only_it_is_lost(tokenizer, guilty):
    data = [f"prompt {i}" for i in range(12)]
    clean, _ = run(tokenizer, data, batch_size=8)
    rows, result = run(tokenizer, data, Model(bad=[guilty]), batch_size=8)
    assert [row for row in rows if row["sample_idx"] != guilty] == [r for r in clean if r["sample_idx"] != guilty]
    assert rows[guilty]["error_type"] == "forward"
    assert rows[guilty]["error"] == "RuntimeError: first line"
    assert result.summary.errors == {"forward": 1} and result.summary.num_answers == 11


@pytest.mark.parametrize("bug", [TypeError, AttributeError, NameError, KeyError, IndexError])
def test_a_mistake_of_the_program_ends_the_run_at_once(tokenizer, bug):
    rows, model = Rows(), Model(bad=[3], failure=bug("bug"))
    with pytest.raises(bug):
        run_generation(normalize_input(["a"] * 8), tokenizer, model, rows, batch_size=2, max_new_tokens=1)
    assert [row["sample_idx"] for row in rows] == [0, 1] and model.batches == [[0, 1], [2, 3]]  # equal lengths


@pytest.mark.parametrize("failure", [ValueError("x"), FloatingPointError("x"), MemoryError("x"), RuntimeError("x")])
def test_what_a_record_can_bring_about_costs_that_record(tokenizer, failure):
    rows, _ = run(tokenizer, ["a", "b"], Model(bad=[1], failure=failure))
    assert ["error" in row for row in rows] == [False, True]


def test_a_record_without_finite_scores_is_one_line_and_others_still_have_their_traceback(tokenizer, log):
    class Both(Model):
        def __call__(self, prompts, indices):
            raise FloatingPointError("no finite score") if indices == [0] else RuntimeError("kernel")

    run(tokenizer, ["a", "b"], Both(), batch_size=1)
    assert [record.exc_info is not None for record in log.records] == [False, True]
    assert "no finite score" in log.records[0].getMessage()


def test_nothing_is_collected_on_demand(tokenizer):
    rows, result = run(tokenizer, ["a", "b"], collect=False)
    assert len(rows) == 2 and result.outputs == [] and result.summary.num_answers == 2


def test_out_of_memory_has_its_own_class(tokenizer):
    rows, _ = run(tokenizer, ["a", "b"], Model(bad=[1], failure=MemoryError()))
    assert rows[1]["error_type"] == "oom" and rows[1]["error"] == "MemoryError: MemoryError"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(4)])
def test_a_stop_is_not_taken_for_a_failing_record(tokenizer, failure):
    rows = Rows()
    with pytest.raises(type(failure)):
        run_generation(
            normalize_input(["a", "b", "c"]), tokenizer, Model([2], failure), rows, batch_size=2, max_new_tokens=1
        )
    assert [row["sample_idx"] for row in rows] == [0, 1]


def test_a_decode_that_loses_a_row_is_an_error_of_the_program(tokenizer):
    with pytest.raises(RuntimeError, match="1 answers for 2 prompts"):
        run(tokenizer, ["a", "b"], lambda prompts, indices: [Completion([1], "length")])


def test_a_failing_writer_ends_the_run(tokenizer):
    class Full:
        def write(self, index, content, rows):
            raise JobStoppedError("No space left on device")

    model = Model()
    with pytest.raises(JobStoppedError, match="No space"):
        run_generation(normalize_input(["a", "b"]), tokenizer, model, Full(), batch_size=1, max_new_tokens=1)
    assert model.batches == [[0]]


@pytest.mark.parametrize("name", ["batch_size", "max_new_tokens"])
def test_zero_is_refused(tokenizer, name):
    with pytest.raises(ValueError, match=name):
        run(tokenizer, ["a"], **{name: 0})


def test_special_tokens_in_the_text_on_demand(tokenizer):
    assert run(tokenizer, ["hi"])[0][0]["generated_text"] == "hi"
    assert run(tokenizer, ["hi"], skip_special_tokens=False)[0][0]["generated_text"] == "hi<|endoftext|>"


def test_without_a_writer_the_outputs_are_the_same(tokenizer):
    result = run_generation(normalize_input(["a", ""]), tokenizer, Model(), batch_size=2, max_new_tokens=1)
    assert result.outputs == run(tokenizer, ["a", ""])[1].outputs
    assert result.summary.num_records == 2


def test_neither_prompts_nor_answers_reach_log_or_terminal(tokenizer, log, capsys):
    run(tokenizer, ["secret one", "", "secret two"], Model(bad=[2]), batch_size=1, progress=True)
    output = capsys.readouterr()
    assert "secret" not in log.text + output.err + output.out
    assert output.out == ""
    assert "predict: 2 records, " in log.text
    assert "records 2: forward: RuntimeError: first line" in log.text


def test_many_failures_are_logged_a_few_times_only(tokenizer, log):
    run(tokenizer, ["a"] * 100, Model(bad=range(100)), batch_size=1)
    assert len(log.records) <= 6


def test_summary_lines(tokenizer):
    _, result = run(tokenizer, ["hi", "", "\ud800", "there"])
    summary = result.summary
    assert summary.errors == {"schema": 1, "tokenize": 1} and summary.finish_reasons == {"eos": 2}
    assert summary.prompt_tokens == len(tokenizer.encode("hi")) + len(tokenizer.encode("there"))
    assert summary.new_tokens == summary.prompt_tokens + 2
    summary.wall_seconds = 1.25
    lines = format_summary(summary, Timings(0.5, 100, 2.0, 30))
    assert lines[0] == "records: 4, answered: 2 (eos 2), errors: 2 (schema 1, tokenize 1)"
    assert lines[1].endswith("wall time: 1.2 s")
    assert lines[2] == "prefill: 200.0 tokens/s (100 tokens in 0.5 s), decode: 15.0 tokens/s (30 tokens in 2.0 s)"
    assert format_summary(summary, Timings(0.0, 0, 0.0, 0))[2].startswith("prefill: no time measured")

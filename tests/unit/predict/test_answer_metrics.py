"""Metrics over answers: the definitions of docs/evaluation.md, worked out by hand."""

import math

import pytest

from mindformers_ext.config import ConfigError
from mindformers_ext.config.evaluation import SCORE_METRICS, build_metrics
from mindformers_ext.predict.answer_metrics import (
    AnswerMetrics,
    format_metrics,
    import_function,
    last_number,
    metric_values,
    reference_texts,
)
from mindformers_ext.predict.score_sums import add_score, score_metrics


def rows(*pairs, field="answer"):
    return [{"sample_idx": i, "generated_text": text, field: reference} for i, (text, reference) in enumerate(pairs)]


def metrics(*entries, **options):
    return AnswerMetrics(build_metrics(entries, ("predict", "metrics")), "answer", **options)


def value(entry, text, reference):
    (row,) = rows((text, reference))
    (found,) = metrics(entry).row_values(row).values()
    return found


def half_right(answer, reference, row):
    assert row["generated_text"] == answer
    return 0.5 if reference in answer else False


def broken(answer, reference, row):
    raise KeyError("no such thing")


def not_finite(answer, reference, row):
    return math.nan


def leaving(answer, reference, row):
    raise SystemExit(3)


NOT_CALLABLE = 3


@pytest.mark.parametrize(
    ("options", "text", "reference", "expected"),
    [
        ({}, " Paris", "Paris", 1),
        ({}, "Paris.", "Paris", 0),
        ({"strip": False}, " Paris", "Paris", 0),
        ({}, "paris", "Paris", 0),
        ({"ignore_case": True}, "paris", "Paris", 1),
        ({"ignore_punctuation": True}, "Paris!", "Paris", 1),
        ({"ignore_punctuation": True}, "Paris !", "Paris", 1),
        ({"ignore_numbers": True}, "Paris 75", "Paris", 1),
        ({"regexes_to_ignore": ["the ", "a "]}, "the Seine", "a Seine", 1),
        ({"regexes_to_ignore": ["THE "], "ignore_case": True}, "the Seine", "Seine", 0),  # before the case is lowered
        ({}, "82", 82, 1),
        ({}, "0.5", 0.5, 1),
        ({}, "true", True, 1),
        ({}, "Holland", ["Netherlands", "Holland"], 1),
        ({}, "x", [], None),
        ({}, "x", "", None),
        ({}, "x", None, None),
        ({}, "x", {"text": "x"}, None),
        ({"extract": r"#### (-?\d+)"}, "so 3.\n#### 42", "42", 1),
        ({"extract": r"\d+"}, "1 then 2", "1", 1),
        ({"extract": r"\d+", "group_select": -1}, "1 then 2", "2", 1),
        ({"extract": r"(a)|(b)", "group_select": 1}, "a b", "b", 1),
        ({"extract": r"\d+", "group_select": 2}, "1 then 2", "2", 0),
        ({"extract": r"\d+"}, "none", "1", 0),
        ({"extract": r"\d+"}, "none", None, None),
    ],
)
def test_exact_match(options, text, reference, expected):
    assert value({"type": "exact_match", **options}, text, reference) == expected


@pytest.mark.parametrize(
    ("options", "text", "reference", "expected"),
    [
        ({}, "It is Paris, of course", "Paris", 1),
        ({}, "It is paris", "Paris", 0),
        ({"ignore_case": True}, "It is PARIS", "Paris", 1),
        ({}, "It is Rome", ["Paris", "Rome"], 1),
        ({"ignore_punctuation": True}, "anything", "!!", None),  # nothing is left of the reference
        ({}, "anything", " ", None),
    ],
)
def test_contains(options, text, reference, expected):
    assert value({"type": "contains", **options}, text, reference) == expected


@pytest.mark.parametrize(
    ("options", "text", "reference", "expected"),
    [
        ({}, "37 + 45 = 82", "82", 1),
        ({}, "82.0", 82, 1),
        ({}, "the 82nd, or 83", 82, 0),
        ({}, "1,234.50 dollars.", "1234.5", 1),
        ({}, "\u22127", -7, 1),
        ({}, "3-5", 5, 1),
        ({}, "minus five", -5, 0),
        ({}, "9", "no number", None),
        ({}, "9", ["eight", 9], 1),
        ({}, "0.30000000000000001", "0.3", 0),
        ({"tolerance": 0.01}, "3.14", "3.1415", 1),
        ({"tolerance": 0.001}, "3.14", "3.1415", 0),
        ({"relative_tolerance": 0.01}, "-99.5", -100, 1),
        ({"relative_tolerance": 0.001}, "99.5", 100, 0),
        ({"extract": r"= (\S+)"}, "1 + 1 = 2, not 3", 2, 1),
        ({"tolerance": 1}, "1e999", "1e998", 0),
    ],
)
def test_numeric_match(options, text, reference, expected):
    assert value({"type": "numeric_match", **options}, text, reference) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a .5 b", "0.5"),
        ("-.5", "-0.5"),
        ("1e-6", "0.000001"),
        ("12,34", "34"),
        ("x-3", "3"),
        ("( -3)", "-3"),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    found = last_number(text)
    assert found is None if number is None else found == type(found)(number)


def test_a_very_long_number_is_read_in_bounded_time():
    assert last_number("9" * 100_000) is not None


def test_regex_needs_no_reference():
    assert value({"type": "regex", "pattern": r"^\s*\d+\s*$"}, " 82 ", None) == 1
    assert value({"type": "regex", "pattern": r"(?i)paris"}, "Rome", None) == 0


@pytest.mark.parametrize("path", [f"{__name__}:half_right", f"{__name__}.half_right"])
def test_a_function_of_the_users(path):
    found = metrics(path)
    for row in rows(("a b", "b"), ("a", "c")):
        found.add(row)
    assert found.result()["metrics"] == {"half_right": {"value": 0.25, "stderr": 0.25, "records": 2}}


@pytest.mark.parametrize("name", ["broken", "not_finite", "leaving"])
def test_a_function_that_fails_counts_as_wrong_and_is_told_once(name, log):
    found = metrics({"type": "function", "function": f"{__name__}:{name}"}, "exact_match")
    for row in rows(("a", "a"), ("b", "b")):
        found.add(row)
    result = found.result()["metrics"]
    assert result[name] == {"value": 0.0, "stderr": 0.0, "records": 2, "failures": 2}
    assert result["exact_match"]["value"] == 1.0
    assert log.text.count("failed at record 0 and counts as 0 there") == 1 and "record 1" not in log.text


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_package:function", "cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:no_such_function", "cannot be imported: AttributeError"),
        (f"{__name__}.NOT_CALLABLE", "is no function: NOT_CALLABLE is of type int"),
    ],
)
def test_a_function_that_cannot_be_had_is_named(path, problem):
    with pytest.raises(ValueError, match=f"the metric {path} {problem}"):
        import_function(path)


def test_records_without_reference_do_not_count_and_are_told(log):
    found = metrics("exact_match", {"type": "regex", "pattern": "a"})
    for row in rows(("a", "a"), ("a", "b"), ("a", None)):
        found.add(row)
    result = found.result()
    assert metric_values(result) == {"exact_match": 0.5, "regex": 1.0}
    assert (result["records"], result["metrics"]["exact_match"]["records"]) == (3, 2)
    assert "exact_match: 1 of 3 records have nothing to compare with in their field 'answer'" in log.text
    assert "regex" not in log.text


def test_errors_count_as_wrong_and_are_counted_apart():
    found = metrics("exact_match", {"type": "regex", "pattern": "."})
    found.add({"sample_idx": 0, "error": "no prompt", "error_type": "schema"})
    found.add(rows(("a", "a"), ("b", "b"))[1])
    result = found.result()
    assert result["errors"] == 1 and metric_values(result) == {"exact_match": 0.5, "regex": 0.5}


def test_several_answers_count_by_their_mean_and_by_any():
    found = metrics("exact_match", num_sequences=2)
    for index, texts in enumerate([("a", "x"), ("x", "x"), ("a", "a")]):
        for text in texts:
            found.add({"sample_idx": index, "generated_text": text, "answer": "a"})
    result = found.result()
    assert metric_values(result) == {"exact_match": 0.5, "exact_match_any": 2 / 3}
    assert result["records"] == 3
    (line,) = format_metrics(result)
    assert line == "exact_match: 0.5000 +- 0.2887, any of a record's answers 0.6667 (3 records)"


def test_the_standard_error_is_that_of_the_mean():
    found = metrics("exact_match")
    for row in rows(("a", "a"), ("a", "a"), ("a", "a"), ("a", "b")):
        found.add(row)
    assert found.result()["metrics"]["exact_match"]["stderr"] == pytest.approx(math.sqrt(0.25 / 4))


def test_a_reference_whose_name_is_one_of_ours_is_found_where_the_row_keeps_it():
    (row,) = rows(("a", "a"))
    del row["answer"]
    found = AnswerMetrics(build_metrics(["exact_match"], ()), "error")
    assert found.row_values({**row, "record": {"error": "a"}}) == {"exact_match": 1.0}


def test_references_are_texts():
    assert reference_texts(["a", 1, 2.5, None, ["b"], ""]) == ["a", "1", "2.5"]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["exact_mach"], r"predict.metrics\[0\]: unknown metric 'exact_mach'; did you mean exact_match\?"),
        (["f1"], r"unknown metric 'f1'; use one of exact_match, contains, regex, numeric_match, function"),
        ([{"ignore_case": True}], r"predict.metrics\[0\].type: is missing; a metric is one of exact_match,"),
        ([3], "expected the name of a metric or a mapping with its type, got the number 3"),
        ([{"type": "exact_match", "ignorecase": True}], r"unknown key; did you mean predict.metrics\[0\].ignore_case"),
        ([{"type": "regex"}], r"predict.metrics\[0\].pattern: is missing; a metric of type regex needs it"),
        ([{"type": "regex", "pattern": "("}], "pattern: expected text that is a regular expression"),
        ([{"type": "numeric_match", "tolerance": -1}], "tolerance: expected a number >= 0"),
        (["exact_match", "exact_match"], r"metrics\[1\]: the name 'exact_match' comes twice"),
        (["my module:f"], "function: expected text naming a function"),
        ([{"type": "function", "function": "f"}], "function: expected text naming a function"),
    ],
)
def test_mistakes_are_refused_with_place_and_nearest_name(entries, problem):
    with pytest.raises(ConfigError, match=problem):
        build_metrics(entries, ("predict", "metrics"))


def test_one_metric_may_come_twice_under_two_names():
    found = build_metrics(["exact_match", {"type": "exact_match", "name": "loose", "ignore_case": True}], ())
    assert [section.name for section in found] == ["exact_match", "loose"]


def test_the_names_of_scores_that_a_best_checkpoint_may_follow_are_those_that_there_are():
    sums: dict[str, float] = {}
    score = {"loglikelihood": -1.0, "num_target_tokens": 2}
    add_score(sums, {"best": 0, "acc": 1, "acc_norm": 1, "acc_bytes": 0})
    add_score(sums, {**score, "is_greedy": True})
    add_score(sums, {**score, "num_words": 1, "num_bytes": 4})
    assert score_metrics(sums).keys() == set(SCORE_METRICS)

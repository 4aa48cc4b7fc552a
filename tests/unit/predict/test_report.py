"""The page about an output: what it counts, compares, cuts and refuses, and that no text gets out of its place."""

import gzip
import json
import os
import re
import stat
from html.parser import HTMLParser

import pytest

from mindformers_ext.predict.metrics import Latencies
from mindformers_ext.predict.report.__main__ import main
from mindformers_ext.predict.report.charts import length_histogram, time_histogram
from mindformers_ext.predict.report.collect import MAX_NAMES, OTHERS, Choice, RunFacts
from mindformers_ext.predict.report.correctness import Accuracy, is_right
from mindformers_ext.predict.report.excerpts import visible
from mindformers_ext.predict.writers import write_rows

HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</style></title></svg><svg onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}&amp;&#60;b&#62;",
    "line\u2028sep\u2029par\x85nel",
    "half \ud800 of a pair \udfff",
    "nul \x00 escape \x1b[31m",
    "marks \u202e\u202d\u2066\u200f\u061c\ufeff\u200b of direction",
    "tag \U000e0041",
]


def answer(index, text="yes", new=(5, 6), prompt=(1, 2, 3), **fields):
    row = {"sample_idx": index, "generated_ids": [*prompt, *new], "generated_text": text, **fields}
    ends = {"finish_reason": "eos", "num_prompt_tokens": len(prompt), "num_new_tokens": len(new)}
    return row | {name: value for name, value in ends.items() if name not in fields}


def error(index, error_type="parse", message="not valid JSON", **fields):
    return {"sample_idx": index, "error": message, "error_type": error_type, **fields}


def choice(index, best, totals, gold, **fields):
    return {
        "sample_idx": index,
        "loglikelihood": totals,
        "best": best,
        "acc": float(best == gold),
        "acc_norm": 0.0,
        "acc_bytes": 0.0,
        "num_prompt_tokens": 3,
        "num_target_tokens": [2] * len(totals),
        **fields,
    }


class Page(HTMLParser):
    """The text of a page, its tags and its attributes."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags, self.attributes, self.pieces = [], [], []
        self.feed(self.source)
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.pieces.append(data)


@pytest.fixture
def report(tmp_path):
    """Writes rows, each list as an output, and returns the page about them."""

    def make(*outputs, flags=(), suffix=".jsonl"):
        paths = []
        for number, rows in enumerate(outputs):
            paths.append(tmp_path / f"run{number}{suffix}")
            write_rows(paths[-1], rows)
        page = tmp_path / "page.html"
        assert main([*map(str, paths), "--output", str(page), *flags]) == 0
        return Page(page)

    return make


def test_the_summary_counts_records_answers_errors_and_tokens(report):
    rows = [answer(0), answer(1, new=(5,)), error(2), error(3, "oom", "no memory")]
    text = report(rows).text
    assert "records 4 answered 2 errors 2 prompt tokens 6 new tokens 3" in text
    assert "eos 2 (100.0%)" in text and "parse 1 (50.0%)" in text and "no memory" in text


def test_a_record_with_several_answers_counts_once(report):
    text = report([answer(0, sequence_idx=0), answer(0, sequence_idx=1), answer(1, sequence_idx=0)]).text
    assert "records 2 answered 2" in text and "3 rows: records have several answers" in text
    assert "prompt tokens 6 new tokens 6" in text


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_of_an_output_that_keeps_rows_is_read(tmp_path, suffix, packed):
    path = tmp_path / f"run{suffix}"
    write_rows(path, [answer(0), answer(1, "no\u2028pe")])
    if packed:
        path = tmp_path / f"run{suffix}.gz"
        path.write_bytes(gzip.compress((tmp_path / f"run{suffix}").read_bytes()))
    assert main([str(path)]) == 0
    page = Page(tmp_path / f"{path.name}.report.html")
    assert "records 2" in page.text and "no⟨U+2028⟩pe" in page.text


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_any_kind_stays_text(report, text):
    row = answer(0, text, note=text, finish_reason=text, kind=text)
    row["<b>" + text] = text
    bad = [row, error(1, text, text, note=text, kind=text, answer="x"), answer(2, answer=text, kind=text)]
    other = [answer(0, "other" + text, new=(7,), note=text, kind=text), answer(2, text, answer=text, kind=text)]
    pages = [report(bad, flags=["--reference", "answer", "--by", "kind"]), report(bad, other)]
    for page in pages:
        assert "script" not in page.tags and "img" not in page.tags
        assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
        assert " ".join(visible(text).split()) in page.text
        hidden = [c for c in page.source if c in "\u2028\u2029\x85\x00\x1b\u202e\u202d\u2066\u200f\u061c\ufeff\u200b"]
        assert hidden == [] and "\U000e0041" not in page.source


def test_nothing_is_fetched_from_anywhere(report):
    page = report([answer(0, "see https://example.org/x.js")], [answer(0)])
    attributes = [value for _, value in page.attributes if value and re.search(r"//|url\(", value)]
    assert attributes == [] and "@import" not in page.source and "url(" not in page.source
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_a_long_answer_is_cut_and_says_so(report):
    page = report([answer(0, "x" * 1_000_000, note="y" * 1_000_000)])
    assert "999,000 more characters" in page.text and "999,700 more characters" in page.text
    assert len(page.source) < 60_000


def test_tables_are_cut_and_say_so(report):
    rows = [answer(n, "no", answer="yes") for n in range(30)]
    page = report(rows, flags=["--rows", "10", "--reference", "answer"])
    assert page.text.count("The first 10 of 30") == 2 and page.tags.count("article") == 20


def test_broken_lines_are_named_and_the_rest_is_shown(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(answer(0)), "{", "[1]", '{"sample_idx": 1}', json.dumps(answer(2) | {"num_new_tokens": -1})]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    assert main([str(path)]) == 0
    page = Page(tmp_path / "run.jsonl.report.html")
    told = capsys.readouterr().err
    for line in range(2, 7):
        assert f"line {line}: " in page.text and f"{path}: line {line}: " in told
    assert "5 places without a row are left out" in page.text and "records 1 " in page.text


def test_of_many_broken_lines_the_first_are_named_and_all_counted(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(answer(0)) + "\n" + "x\n" * 100)
    assert main([str(path)]) == 0
    assert "100 places without a row" in Page(tmp_path / "run.jsonl.report.html").text
    assert "and 80 more" in Page(tmp_path / "run.jsonl.report.html").text


def test_a_cut_off_file_gives_the_rows_before_the_cut(tmp_path):
    data = gzip.compress(b"".join(json.dumps(answer(n)).encode() + b"\n" for n in range(2000)), compresslevel=0)
    (tmp_path / "run.jsonl.gz").write_bytes(data[: len(data) // 2])
    assert main([str(tmp_path / "run.jsonl.gz")]) == 0
    text = Page(tmp_path / "run.jsonl.gz.report.html").text
    assert "the compressed file is damaged" in text and re.search(r"records [1-9][\d,]* answered", text)


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("run.txt", b"yes\n", [], "a .txt output keeps the texts alone"),
        ("run", b"yes\n", [], "a .txt output keeps the texts alone"),
        ("run.csv", b"yes\n", [], "this is no output"),
        ("run.jsonl", b"", [], "there are no rows in it"),
        ("run.json", b"[]", [], "there are no rows in it"),
        ("run.jsonl", b'{"instruction": "an input"}\n', [], "not one row of an output is in it; line 1: "),
        ("run.jsonl", json.dumps(answer(0)).encode(), ["--reference", "gold"], "no row has a field 'gold' for --refer"),
        ("run.jsonl", json.dumps(answer(0)).encode(), ["--by", "kind"], "nothing tells which rows are right"),
        (
            "run.jsonl",
            json.dumps(answer(0, gold="yes")).encode(),
            ["--reference", "gold", "--by", "kind"],
            "no row has a field 'kind' for --by; there are finish_reason, ",
        ),
        ("run.jsonl", json.dumps(answer(0)).encode(), ["--metric", "acc"], "no row has a field 'acc' for --metric"),
        ("run.jsonl", json.dumps(answer(0)).encode(), ["--output", "page.txt"], "must end in .html"),
        ("run.jsonl", json.dumps(answer(0)).encode(), ["--output", "no/page.html"], "of the page does not exist"),
    ],
)
def test_what_is_no_output_or_no_page_is_refused_in_a_sentence(
    tmp_path, monkeypatch, capsys, name, content, flags, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    assert main([name, *flags]) == 1
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == [name]


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none.jsonl'}: No such file or directory\n"
    assert main([str(tmp_path)]) == 1
    assert "is not a regular file" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert main([str(tmp_path / "pipe.jsonl")]) == 1
    assert "is not a regular file" in capsys.readouterr().err


def test_the_page_never_takes_the_place_of_what_it_is_about(tmp_path, capsys):
    result = tmp_path / "run.jsonl"
    write_rows(result, [answer(0)])
    before = result.read_bytes()
    os.link(result, tmp_path / "page.html")
    assert main([str(result), "--output", str(tmp_path / "page.html")]) == 1
    assert "is the file" in capsys.readouterr().err
    os.unlink(tmp_path / "page.html")
    os.symlink(result, tmp_path / "page.html")
    assert main([str(result), "--output", str(tmp_path / "page.html")]) == 1
    assert "is a link" in capsys.readouterr().err and result.read_bytes() == before


def test_the_page_replaces_an_older_one_at_once_and_only_the_group_reads_it(tmp_path):
    result, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    write_rows(result, [answer(0)])
    page.write_text("old")
    page.chmod(0o666)
    assert main([str(result), "--output", str(page)]) == 0
    assert stat.S_IMODE(page.stat().st_mode) == 0o640 and "records 1" in Page(page).text
    assert sorted(os.listdir(tmp_path)) == ["page.html", "run.jsonl"]


def test_accuracy_is_told_by_the_values_of_a_field(report):
    rows = [answer(n, " yes " if n % 3 else "no", gold="yes", kind="abc"[n % 2], level=n % 2) for n in range(12)]
    text = report(rows, flags=["--reference", "gold", "--by", "kind", "--by", "level"]).text
    assert "equal to gold 66.7%" in text and "equal to gold by kind" in text and "equal to gold by level" in text
    assert re.search(r"a 66.7% 30.0% to 90.3% 6", text) and re.search(r"\b1 66.7% 30.0% to 90.3% 6", text)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (answer(0, " 82\n", gold="82"), True),
        (answer(0, "82", gold=82), True),
        (answer(0, "8", gold="82"), False),
        (answer(0, "82", gold="8"), False),
        (answer(0, "b", gold=["a", "b"]), True),
        (answer(0, "82"), None),
        (error(0, gold="82"), False),
        (answer(0, "82", record={"gold": "82"}), True),
    ],
)
def test_an_answer_is_right_if_it_is_one_of_the_references(row, expected):
    assert is_right(row, "gold") is expected


def test_the_interval_is_that_of_wilson():
    accuracy = Accuracy()
    for right in (1.0, 1.0, 1.0, 0.0):
        accuracy.add(right)
    assert accuracy.interval == pytest.approx((0.300636, 0.954414), abs=1e-5)
    accuracy.add(0.5)
    assert accuracy.interval is None and accuracy.mean == 0.7


def test_metrics_that_rows_carry_tell_what_is_right(report):
    rows = [answer(n, answer_metrics={"close": n / 4, "exact": float(n == 3)}, kind="k") for n in range(4)]
    assert "close 0.375" in report(rows, flags=["--by", "kind"]).text
    assert "exact 25.0%" in report(rows, flags=["--metric", "exact", "--by", "kind"]).text


def test_choices_are_counted_and_compared(report):
    rows = [choice(0, 1, [-3.0, -1.0], 1, kind="k"), choice(1, 0, [-1.0, -2.0], 1, kind="k")]
    text = report(rows, flags=["--by", "kind"]).text
    assert "acc 50.0%" in text and "choice 1, log-likelihood [-3.0, -1.0]" in text and "acc by kind" in text
    near = [choice(0, 1, [-3.0004, -1.0], 1), choice(1, 1, [-1.0, -0.9], 1)]
    text = report(rows, near).text
    assert "1 of 2 rows differ" in text and "other choice" in text


@pytest.mark.parametrize(
    "odd",
    [
        {"acc": "1"},
        {"acc": 1.0, "acc_norm": None},
        {"loglikelihood": -1.0},
        {"num_target_tokens": 2},
        {"best": None, "loglikelihood": -1.0, "num_target_tokens": 2, "is_greedy": "yes"},
        {"best": None, "loglikelihood": -1.0, "num_target_tokens": 2, "num_words": 1},
        {"best": None, "loglikelihood": -1.0},
    ],
)
def test_a_score_that_lacks_what_is_summed_is_no_row(tmp_path, capsys, odd):
    row = {name: value for name, value in (choice(0, 1, [-3.0, -1.0], 1) | odd).items() if value is not None}
    write_rows(tmp_path / "run.jsonl", [row, choice(1, 1, [-3.0, -1.0], 1)])
    assert main([str(tmp_path / "run.jsonl")]) == 0
    assert "line 1: is no row of an output" in capsys.readouterr().err


def test_a_reference_cannot_judge_scores_and_that_is_said(tmp_path, capsys):
    write_rows(tmp_path / "run.jsonl", [error(0), choice(1, 1, [-3.0, -1.0], 1, answer=1)])
    assert main([str(tmp_path / "run.jsonl"), "--reference", "answer"]) == 1
    assert "--reference is compared with answers, and these rows are scores" in capsys.readouterr().err


def test_texts_have_their_likelihood_and_perplexity(report):
    row = {"sample_idx": 0, "loglikelihood": -4.0, "nll": 2.0, "num_prompt_tokens": 3, "num_target_tokens": 2}
    text = report([row], [row | {"loglikelihood": -5.0}]).text
    assert "nll A 2.0000 B 2.5000" in text and "other score" in text


def test_two_runs_are_compared_at_the_first_different_token(report):
    before = [
        answer(0, "one two three", new=(5, 6, 7, 8), logprobs=[-0.1, -0.2, -0.3, -0.4]),
        answer(1, "same"),
        answer(2, "ends", new=(5, 6)),
        answer(3, prompt=(1, 2, 3)),
        error(4),
        answer(5),
        answer(6, finish_reason="eos"),
        answer(7, "with  space"),
        answer(8),
    ]
    after = [
        answer(0, "one two four", new=(5, 6, 9, 8), logprobs=[-0.1, -0.2, -0.31, -0.4]),
        answer(1, "same"),
        answer(2, "ends later", new=(5, 6, 7)),
        answer(3, prompt=(1, 9, 3)),
        answer(4),
        error(5, "oom"),
        answer(6, finish_reason="length"),
        answer(7, "with space"),
        answer(9),
    ]
    text = report(before, after).text
    assert "9 of 10 rows differ" in text
    for kind, count in {
        "other tokens": 2,
        "same": 1,
        "other prompt": 1,
        "error in A only": 1,
        "error in B only": 1,
        "other end": 1,
        "other text": 1,
        "only in A": 1,
        "only in B": 1,
    }.items():
        assert f"{kind} {count}" in text
    assert "0 other tokens, from token 2 of the answer on" in text
    assert "A token 7, log-probability -0.3 one two three B token 9, log-probability -0.31 one two four" in text
    assert "2 other tokens, from token 2 of the answer on A token end ends B token 7 ends later" in text
    assert "3 other prompt, from token 1 of the prompt on" in text and "no such row" in text


def test_two_runs_are_compared_by_what_they_answered_right(report):
    before = [answer(n, "yes" if n < 3 else "no", gold="yes") for n in range(6)]
    after = [answer(n, "yes" if n in (0, 3) else "no", gold="yes") for n in range(6)]
    text = report(before, after, flags=["--reference", "gold"]).text
    assert "right in A 1 2 wrong in A 1 2" in text


def test_two_runs_that_are_not_in_order_are_refused(tmp_path, capsys):
    write_rows(tmp_path / "a.jsonl", [answer(1), answer(0)])
    write_rows(tmp_path / "b.jsonl", [answer(0), answer(1)])
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 1
    assert "row 0 comes after row 1" in capsys.readouterr().err


def test_speeds_and_latencies_come_from_the_metrics_of_the_same_run(tmp_path, report):
    latencies = [{"up_to_seconds": 0.5, "records": 1}, {"up_to_seconds": 1.0, "records": 1}]
    metrics = {
        "records": {"total": 2},
        "tokens": {"new": 4},
        "wall_seconds": 3.25,
        "decode": {"tokens_per_second": 1234.5},
        "latency_seconds": {"p50": 0.5, "p90": 1.0},
        "latency_histogram": latencies,
        "ranks": [{"peak_memory_bytes": 5e8}],
        "decoding": {"do_sample": {"value": False, "origin": "default"}},
    }
    path = tmp_path / "run0.jsonl.metrics.json"
    path.write_text(json.dumps(metrics))
    rows = [answer(0), answer(1)]
    text = report(rows).text
    assert "wall time 3.2 s decode tokens/s 1,234.5 processes 1 peak memory 500 MB" in text
    assert "50 % 0.5 s 90 % 1 s" in text and "do_sample false" in text and "latency of their batch" in text
    text = report([*rows, answer(2)]).text
    assert "it tells of other rows: 2 records and 4 new tokens, and here are 3 and 6" in text
    path.write_text("[")
    assert "run0.jsonl.metrics.json is not read: not valid JSON" in report(rows).text
    path.write_text('{"records": 7, "tokens": [], "ranks": "x"}')
    assert "no records and no new tokens" in report(rows).text


def test_bars_cover_all_numbers_and_keep_their_sum():
    for numbers in ({5: 3}, {0: 1, 39: 1}, {1: 2, 40: 1, 41: 5}, {0: 1, 10**9: 2}, {999: 1, 1000: 1, 12345: 7}):
        chart = length_histogram("t", "tokens", [("A", numbers), ("B", {})])
        assert len(chart.series[0].bars) <= 40 and sum(bar.count for bar in chart.series[0].bars) == sum(
            numbers.values()
        )
        assert max(bar.height for bar in chart.series[0].bars) == 100 and chart.series[1].note == "none"
        assert chart.series[0].bars[0].count and chart.series[0].bars[-1].count
    assert length_histogram("t", "tokens", [("A", {})]) is None


def test_bars_of_times_have_one_scale_for_both_runs():
    times = iter([0.0, 1.0, 1.0, 3.0, 3.0, 3.5])
    latencies = Latencies(clock=lambda: next(times))
    for size in (3, 1, 2):
        latencies.timed(lambda prompts, indices: [])([[1]] * size, list(range(size)))
    bins = [(one["up_to_seconds"], one["records"]) for one in latencies.histogram()]
    assert bins[-1] == (2.0, 1) and sum(count for _, count in bins) == 6
    chart = time_histogram("t", [("A", bins, ""), ("B", [(4.0, 5)], "")])
    assert [sum(bar.count for bar in series.bars) for series in chart.series] == [6, 5]
    assert chart.high == "4 s" and not any(bar.count for bar in chart.series[0].bars[10:])
    assert Latencies().histogram() == [] and time_histogram("t", [("A", [], "")]) is None


def test_names_without_end_do_not_fill_the_memory():
    facts = RunFacts(Choice(reference="gold", by=["kind"]))
    for index in range(MAX_NAMES + 50):
        facts.add(answer(index, gold="yes", kind=f"{index}" + "x" * 500, finish_reason=f"{index}"))
    assert len(facts.groups["kind"]) == MAX_NAMES + 1 == len(facts.finish_reasons)
    assert facts.groups["kind"][OTHERS].total == 50 and max(map(len, facts.groups["kind"])) <= 80

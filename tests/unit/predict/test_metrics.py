"""The numbers of a run: joined over processes, as lines and as a file."""

import json
import os
import stat
from dataclasses import asdict

import pytest

from mindformers_ext.predict.metrics import (
    Latencies,
    RankReport,
    check_outputs,
    format_measures,
    joined_timings,
    joined_traffic,
    lookup_counts,
    metrics_path,
    run_metrics,
    shared_prefixes,
    write_metrics,
)
from mindformers_ext.predict.progress import Progress, estimate_total
from mindformers_ext.predict.summary import RunSummary, Timings


def report(rank, leads=True, **changes):
    fields = {
        "timings": Timings(1.0 + rank, 100, 2.0 + rank, 30),
        "forwards": 7,
        "weight_bytes": 1_000_000,
        "cache_bytes": 2_000,
        "peak_memory_bytes": 3_000_000_000,
    }
    return RankReport(rank, leads, **(fields | changes))


def test_tokens_of_replicas_add_up_and_the_slowest_gives_the_time():
    reports = [report(0), report(1, leads=False), report(2), report(3, leads=False)]
    assert joined_timings(reports) == Timings(3.0, 200, 4.0, 60)


def test_traffic_is_the_bytes_of_all_and_the_calls_of_the_busiest():
    reports = [report(0, traffic={"tp": (10, 400)}), report(1, traffic={"tp": (12, 600), "pp": (1, 8)})]
    assert joined_traffic(reports, 4) == {
        "pp": {"calls": 1, "bytes": 8, "calls_per_new_token": 0.25, "bytes_per_new_token": 2.0},
        "tp": {"calls": 12, "bytes": 1000, "calls_per_new_token": 3.0, "bytes_per_new_token": 250.0},
    }
    assert joined_traffic(reports, 0)["pp"] == {"calls": 1, "bytes": 8}


def test_lines_say_what_each_process_holds_sends_and_waits():
    reports = [
        report(0, idle_share=0.25, traffic={"tp": (10, 400)}),
        report(1, weight_bytes=2_000_000, idle_share=0.5, traffic={"tp": (10, 400)}),
    ]
    assert format_measures(reports, 10) == [
        "weights per rank: 1.0 MB to 2.0 MB (rank 0 1.0 MB, 1 2.0 MB)",
        "cache per rank: 2.0 kB",
        "peak memory per rank: 3.0 GB",
        "sent per new token: tp 80 B in 1.00 calls",
        "idle share of the pipeline by rank: 25%, 50%",
    ]
    assert len(format_measures([report(0)], 0)) == 3


def test_shared_prefixes_and_drafts_are_those_of_all_replicas():
    reports = [
        report(0, shared_tokens=90, prefix_tokens=30, prefix_bytes=1000, drafted_tokens=8, accepted_tokens=5),
        report(1, leads=False, shared_tokens=90, prefix_tokens=30, prefix_bytes=2000, drafted_tokens=8),
        report(2, shared_tokens=10, drafted_tokens=2, accepted_tokens=2),
    ]
    assert shared_prefixes(reports) == {"shared_tokens": 100, "computed_tokens": 30, "bytes": 2000}
    assert lookup_counts(reports) == {"drafted": 10, "accepted": 7}
    assert format_measures(reports, 0)[3:] == [
        "shared prefixes: 100 prompt tokens from 30 computed ones, 2.0 kB kept",
        "prompt lookup: 7 of 10 drafted tokens were chosen",
    ]


def test_a_report_survives_json():
    original = report(3, idle_share=0.5, traffic={"tp": (1, 2)})
    assert RankReport.from_dict(json.loads(json.dumps(asdict(original)))) == original


def test_percentiles_count_records_not_batches():
    times = iter([0.0, 1.0, 1.0, 6.0, 6.0, 8.0])
    latencies = Latencies(clock=lambda: next(times))
    assert latencies.percentiles() is None
    decode = latencies.timed(lambda prompts, indices: [])
    for size in (8, 1, 1):
        decode([[1]] * size, list(range(size)))
    assert latencies.percentiles() == {"p50": 1.0, "p90": 2.0, "p99": 5.0, "max": 5.0}


def test_a_batch_that_fails_has_no_latency():
    latencies = Latencies()

    def fails(prompts, indices):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        latencies.timed(fails)([[1]], [0])
    assert latencies.percentiles() is None


def test_the_file_is_whole_private_and_replaces_the_one_before(tmp_path):
    summary = RunSummary(wall_seconds=2.0, seed=7)
    summary.add_answer(5)
    summary.add_sequence(3, "eos")
    path = metrics_path(tmp_path / "out.jsonl")
    assert path == str(tmp_path / "out.jsonl.metrics.json")
    for wall in (2.0, 3.0):
        summary.wall_seconds = wall
        write_metrics(path, run_metrics(summary, 3, [report(0)], Latencies(), {"batch_size": 4}))
    content = json.loads((tmp_path / "out.jsonl.metrics.json").read_text())
    assert content["records"] == {"total": 1, "answered": 1, "failed": 0, "resumed": 0}
    assert (content["wall_seconds"], content["seed"], content["batch_size"]) == (3.0, 7, 4)
    assert content["decode"] == {"tokens": 30, "seconds": 2.0, "tokens_per_second": 15.0}
    assert content["versions"]["numpy"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    assert os.listdir(tmp_path) == ["out.jsonl.metrics.json"]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    path = tmp_path / "out.jsonl.metrics.json"
    path.write_text("before")
    with pytest.raises(ValueError, match="Circular"):
        loop = {}
        loop["self"] = loop
        write_metrics(path, loop)
    assert (path.read_text(), os.listdir(tmp_path)) == ("before", [path.name])


def test_a_metrics_file_never_takes_the_place_of_the_input(tmp_path):
    source = tmp_path / "out.jsonl.metrics.json"
    source.write_text("[]")
    check_outputs(str(tmp_path / "out.jsonl"), str(source), {}, metrics_file=False)
    with pytest.raises(ValueError, match=r"out\.jsonl\.metrics\.json"):
        check_outputs(str(tmp_path / "out.jsonl"), str(source), {}, metrics_file=True)


def test_progress_in_a_log_is_a_line_every_half_minute(caplog):
    now = [0.0]
    summary = RunSummary()
    with caplog.at_level("INFO"), Progress(True, total=40, terminal=False, clock=lambda: now[0]) as progress:
        for _ in range(4):
            now[0] += 20.0
            summary.add_answer(200)
            summary.add_sequence(100, "eos")
            progress.update(1, summary)
    assert [record.message for record in caplog.records] == [
        "predict: 1 of about 40 records, 10.0 tokens/s in, 5.0 out, 0 errors, about 13:00 left",
        "predict: 3 of about 40 records, 10.0 tokens/s in, 5.0 out, 0 errors, about 12:20 left",
    ]


def test_a_run_that_goes_on_tells_the_time_that_is_left_once_it_has_answered_something(caplog):
    now = [0.0]
    summary = RunSummary()
    with caplog.at_level("INFO"), Progress(True, total=40, terminal=False, clock=lambda: now[0]) as progress:
        for _ in range(20):
            now[0] += 1.0
            summary.num_resumed += 1
            progress.update(1, summary)
        summary.errors["schema"] += 1
        progress.update(1, summary)
        assert not caplog.records
        now[0] = 30.0
        progress.update(0, summary)
        summary.add_answer(60)
        progress.update(1, summary)
    assert [record.message for record in caplog.records] == [
        "predict: 21 of about 40 records, 0.0 tokens/s in, 0.0 out, 1 errors",
        "predict: 22 of about 40 records, 2.0 tokens/s in, 0.0 out, 1 errors, about 4:30 left",
    ]


def test_records_are_estimated_without_reading_them(tmp_path):
    lines, rest = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text('{"a": 1}\n{"a": 2}')
    rest.write_text("[]")
    found = [estimate_total(data) for data in (["a", "b"], str(lines), str(rest), "a prompt", {"instruction": "a"})]
    assert found == [2, 2, None, 1, 1]
    (tmp_path / "empty.txt").write_text("")
    assert estimate_total(str(tmp_path / "empty.txt")) == 0

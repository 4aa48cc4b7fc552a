"""The numbers of a finished run: what each process measured, joined, as lines of the log and as a JSON file."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindformers_ext.predict.identity import package_versions
from mindformers_ext.predict.isolation import Decode
from mindformers_ext.predict.output_files import check_output, replace_file
from mindformers_ext.predict.summary import RunSummary, Timings

METRICS_SUFFIX = ".metrics.json"
LATENCY_BINS = 20
_PACKAGES = ("mindformers_ext", "mindspore", "numpy", "tokenizers", "safetensors")


@dataclass(frozen=True)
class RankReport:
    """What one process measured in a run; bytes and seconds.

    Attributes:
        rank: its global rank.
        leads: whether its tokens and forwards are those of its replica: one process of each is.
        timings: where its time went.
        forwards: runs of the model, idle ones aside.
        weight_bytes: parameters that it keeps.
        cache_bytes: the most that a cache has held.
        peak_memory_bytes: the most memory that the process has had, since it began.
        shared_tokens: prompt tokens that were taken from the state of a common beginning.
        prefix_tokens: tokens that were computed for such states.
        prefix_bytes: the most that these have held.
        drafted_tokens: tokens that prompt lookup proposed.
        accepted_tokens: those of them that were chosen.
        idle_share: share of the time in which a stage of a pipeline waited for others, 0 to 1; None without a pipeline.
        traffic: calls and bytes that it sent, by group.
    """

    rank: int
    leads: bool
    timings: Timings
    forwards: int
    weight_bytes: int
    cache_bytes: int
    peak_memory_bytes: int
    idle_share: float | None = None
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    shared_tokens: int = 0
    prefix_tokens: int = 0
    prefix_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RankReport:
        """Makes a report of what `dataclasses.asdict` and JSON made of it."""
        traffic = {name: (calls, sent) for name, (calls, sent) in fields["traffic"].items()}
        return cls(**{**fields, "timings": Timings(**fields["timings"]), "traffic": traffic})


class Latencies:
    """Seconds from the start to the end of each record, or of the batch that it was answered in."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._batches: list[tuple[float, int]] = []

    def timed(self, decode: Decode) -> Decode:
        """Returns ``decode``, which notes how long each batch takes that it answers."""

        def answer(prompts: list[Any], indices: list[int]) -> list[Any]:
            start = self._clock()
            answers = decode(prompts, indices)
            self._batches.append((self._clock() - start, len(prompts)))
            return answers

        return answer

    def add(self, seconds: float) -> None:
        """Notes how long a record took."""
        self._batches.append((seconds, 1))

    def percentiles(self) -> dict[str, float] | None:
        """``p50``, ``p90``, ``p99`` and ``max`` over the records: the smallest time that so many took at most.

        None without an answered record.
        """
        total = sum(count for _, count in self._batches)
        if not total:
            return None
        ordered = sorted(self._batches)
        found = {}
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            covered = 0
            for seconds, count in ordered:
                covered += count
                if covered >= share * total:
                    found[name] = seconds
                    break
        return found

    def histogram(self) -> list[dict[str, float]]:
        """``up_to_seconds`` and ``records`` of bins of equal width that follow each other from 0 to the longest time.

        Empty without an answered record.
        """
        longest = max((seconds for seconds, _ in self._batches), default=0.0)
        if longest <= 0:
            return []
        counts = [0] * LATENCY_BINS
        for seconds, count in self._batches:
            counts[min(int(seconds / longest * LATENCY_BINS), LATENCY_BINS - 1)] += count
        return [
            {"up_to_seconds": longest * (index + 1) / LATENCY_BINS, "records": count}
            for index, count in enumerate(counts)
        ]


def joined_timings(reports: Sequence[RankReport]) -> Timings:
    """Tokens of all replicas, and the time of the slowest one."""
    leading = [report.timings for report in reports if report.leads]
    return Timings(
        prefill_seconds=max(one.prefill_seconds for one in leading),
        prefill_tokens=sum(one.prefill_tokens for one in leading),
        decode_seconds=max(one.decode_seconds for one in leading),
        decode_tokens=sum(one.decode_tokens for one in leading),
    )


def joined_traffic(reports: Sequence[RankReport], new_tokens: int) -> dict[str, dict[str, float]]:
    """By group: bytes that all processes sent, calls of the process with the most, and both for each new token."""
    joined: dict[str, dict[str, float]] = {}
    for name in sorted({name for report in reports for name in report.traffic}):
        counts = [report.traffic.get(name, (0, 0)) for report in reports]
        calls, sent = max(calls for calls, _ in counts), sum(sent for _, sent in counts)
        joined[name] = {"calls": calls, "bytes": sent}
        if new_tokens:
            joined[name] |= {"calls_per_new_token": calls / new_tokens, "bytes_per_new_token": sent / new_tokens}
    return joined


def shared_prefixes(reports: Sequence[RankReport]) -> dict[str, int]:
    """Prompt tokens of all replicas that were shared, what was computed for that, and the most that a process kept."""
    leading = [report for report in reports if report.leads]
    return {
        "shared_tokens": sum(report.shared_tokens for report in leading),
        "computed_tokens": sum(report.prefix_tokens for report in leading),
        "bytes": max(report.prefix_bytes for report in reports),
    }


def lookup_counts(reports: Sequence[RankReport]) -> dict[str, int]:
    """Tokens that prompt lookup proposed on all replicas, and those that were chosen."""
    leading = [report for report in reports if report.leads]
    return {
        "drafted": sum(report.drafted_tokens for report in leading),
        "accepted": sum(report.accepted_tokens for report in leading),
    }


def format_measures(reports: Sequence[RankReport], new_tokens: int) -> list[str]:
    """Returns lines of what processes hold, send and wait."""
    lines = [
        f"{name}: {_by_rank(reports, values)}"
        for name, values in (
            ("weights per rank", [report.weight_bytes for report in reports]),
            ("cache per rank", [report.cache_bytes for report in reports]),
            ("peak memory per rank", [report.peak_memory_bytes for report in reports]),
        )
    ]
    shared, drafts = shared_prefixes(reports), lookup_counts(reports)
    if shared["shared_tokens"]:
        lines.append(
            f"shared prefixes: {shared['shared_tokens']} prompt tokens from {shared['computed_tokens']} computed ones, "
            f"{_bytes(shared['bytes'])} kept"
        )
    if drafts["drafted"]:
        lines.append(f"prompt lookup: {drafts['accepted']} of {drafts['drafted']} drafted tokens were chosen")
    sent = [
        f"{name} {_bytes(counts['bytes_per_new_token'])} in {counts['calls_per_new_token']:.2f} calls"
        for name, counts in joined_traffic(reports, new_tokens).items()
        if new_tokens
    ]
    if sent:
        lines.append(f"sent per new token: {', '.join(sent)}")
    idle = [f"{report.idle_share:.0%}" for report in reports if report.idle_share is not None]
    if idle:
        lines.append(f"idle share of the pipeline by rank: {', '.join(idle)}")
    return lines


def check_outputs(
    output: str, input_data: Any, protected: Mapping[str, str | os.PathLike[str]], metrics_file: bool
) -> None:
    """Refuses an output, or a metrics file beside it, that could not be written or would harm another file.

    Raises:
        ValueError: see `check_output`; so the rest.
        PermissionError: see there.
        FileNotFoundError: see there.
    """
    check_output(output, input_data, protected)
    if metrics_file:
        check_output(metrics_path(output), input_data, protected)


def metrics_path(output: str | os.PathLike[str]) -> str:
    """Where the metrics of an output go."""
    return os.fsdecode(output) + METRICS_SUFFIX


def run_metrics(
    summary: RunSummary,
    new_tokens: int,
    reports: Sequence[RankReport],
    latencies: Latencies,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns what the metrics file says.

    Args:
        summary: counts of the output, to which earlier runs of the job may have added.
        new_tokens: those of this run.
        reports: of all processes, by rank.
        latencies: of rank 0.
        settings: what the run was asked for, as JSON can hold it.
    """
    timings = joined_timings(reports)
    return {
        "records": {
            "total": summary.num_records,
            "answered": summary.num_answers,
            "failed": summary.num_errors,
            "resumed": summary.num_resumed,
        },
        "finish_reasons": dict(sorted(summary.finish_reasons.items())),
        "errors": dict(sorted(summary.errors.items())),
        **({"answers": summary.metrics} if summary.metrics else {}),
        **({"scores": summary.scores} if summary.scores else {}),
        "wall_seconds": summary.wall_seconds,
        "tokens": {"prompt": summary.prompt_tokens, "new": summary.new_tokens},
        "prefill": _rate(timings.prefill_tokens, timings.prefill_seconds),
        "decode": _rate(timings.decode_tokens, timings.decode_seconds),
        "shared_prefixes": shared_prefixes(reports),
        "prompt_lookup": lookup_counts(reports),
        "latency_seconds": latencies.percentiles(),
        "latency_histogram": latencies.histogram(),
        "traffic": joined_traffic(reports, new_tokens),
        "ranks": [asdict(report) for report in reports],
        "seed": summary.seed,
        **settings,
        "versions": {"python": platform.python_version()} | package_versions(_PACKAGES),
    }


def write_metrics(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Writes a JSON file, mode 0o640; it appears, or changes, as a whole.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"
    data = text.encode("utf-8", "backslashreplace")
    replace_file(Path(os.path.abspath(path)), lambda file: file.write(data))


def replace_answers(path: str | os.PathLike[str], answers: Mapping[str, Any]) -> None:
    """Puts what metrics say of the answers into a metrics file, which keeps the rest.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it is no metrics file.
    """
    content = json.loads(Path(path).read_bytes())
    if not isinstance(content, dict):
        raise ValueError("it is no metrics file")
    write_metrics(path, {**content, "answers": dict(answers)})


def _rate(tokens: int, seconds: float) -> dict[str, float | None]:
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if seconds > 0 else None}


def _by_rank(reports: Sequence[RankReport], values: Sequence[int]) -> str:
    """One value where all are equal, else the range and each rank's."""
    if len(set(values)) == 1:
        return _bytes(values[0])
    each = ", ".join(f"{report.rank} {_bytes(value)}" for report, value in zip(reports, values, strict=True))
    return f"{_bytes(min(values))} to {_bytes(max(values))} (rank {each})"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

"""The page: what was gathered, put into the template."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import jinja2

from mindformers_ext.predict.report.charts import Histogram, length_histogram, time_histogram
from mindformers_ext.predict.report.collect import Choice, RunFacts
from mindformers_ext.predict.report.compare import Comparison
from mindformers_ext.predict.report.correctness import Accuracy
from mindformers_ext.predict.report.excerpts import visible
from mindformers_ext.predict.report.run_metrics import RunMetrics
from mindformers_ext.predict.score_sums import score_metrics

MAX_GROUPS = 40

# A name, and for each run what its bar says and how long it is, 0 to 1.
Bars: TypeAlias = "tuple[str, list[tuple[str, float]]]"


@dataclass(frozen=True)
class Run:
    """One output and all that is known of it; `label` is A or B where there are two."""

    label: str
    path: str
    facts: RunFacts
    metrics: RunMetrics

    @property
    def name(self) -> str:
        """The name of the file."""
        return os.path.basename(self.path)

    @property
    def file_note(self) -> str:
        """Size and age of the file."""
        status = os.stat(self.path)
        written = datetime.fromtimestamp(status.st_mtime, timezone.utc)
        return f"{status.st_size:,} bytes, written {written:%Y-%m-%d %H:%M} UTC"


def render_page(runs: list[Run], comparison: Comparison | None, choice: Choice) -> str:
    """Returns the HTML of a report; all text in it is escaped, whatever it holds.

    Args:
        runs: one, or two to be compared.
        comparison: of the two.
        choice: what was asked for.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    metric = _metric_name(runs, choice)
    environment.filters |= {"number": lambda value: f"{value:,}", "percent": "{:.1%}".format, "mean": _mean}
    return environment.get_template("page.html.jinja").render(
        runs=runs,
        comparison=comparison,
        choice=choice,
        no_run=Run("", "", runs[0].facts, RunMetrics()),
        numbers=_numbers(runs, metric),
        metric=metric,
        means=[_mean(run.facts.accuracy) for run in runs],
        histograms=_histograms(runs),
        positions=None if comparison is None else _positions(comparison),
        percentiles=_percentiles(runs),
        finish_reasons=_counted([run.facts.finish_reasons for run in runs]),
        errors=_counted([{name: one.count for name, one in run.facts.errors.items()} for run in runs]),
        groups={name: _grouped(runs, name) for name in choice.by},
        max_groups=MAX_GROUPS,
    )


def _finalize(value: Any) -> Any:
    """Every text that the template prints goes through here, before it is escaped."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _metric_name(runs: list[Run], choice: Choice) -> str:
    if not any(run.facts.accuracy.total for run in runs):
        return ""
    return f"equal to {choice.reference}" if choice.reference is not None else choice.metric or runs[0].facts.metric


def _mean(accuracy: Accuracy) -> str:
    if not accuracy.total:
        return "not known"
    return f"{accuracy.mean:.1%}" if accuracy.is_share else f"{accuracy.mean:.4g}"


def _numbers(runs: list[Run], metric: str) -> dict[str, list[str]]:
    """Metrics of scores but `metric`, which has a place of its own, and speeds, by name."""
    of_runs = []
    for run in runs:
        scores = score_metrics(run.facts.score_sums)
        scores = {name: n for name, n in scores.items() if name != metric and not name.endswith("_stderr")}
        shown = {name.replace("_", " "): "too large" if n is None else f"{n:.4f}" for name, n in scores.items()}
        of_runs.append(shown | run.metrics.speed)
    names = dict.fromkeys(name for numbers in of_runs for name in numbers)
    return {name: [numbers.get(name, "not known") for numbers in of_runs] for name in names}


def _positions(comparison: Comparison) -> Histogram | None:
    title = "Answers by the place of the first different token"
    return length_histogram(title, "tokens before it", [("", comparison.positions)])


def _percentiles(runs: list[Run]) -> list[Bars]:
    longest = max((max(run.metrics.percentiles.values(), default=0.0) for run in runs), default=0.0)
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.metrics.percentiles):
        values = [run.metrics.percentiles.get(name) for run in runs]
        cells = [("not known", 0.0) if value is None else (f"{value:.3g} s", value / longest) for value in values]
        rows.append((name, cells))
    return rows


def _histograms(runs: list[Run]) -> list[Histogram]:
    charts = [
        length_histogram(
            "Records by length of the prompt", "tokens", [(r.label, r.facts.prompt_lengths) for r in runs]
        ),
        length_histogram("Answers by length", "tokens", [(r.label, r.facts.new_lengths) for r in runs]),
        length_histogram("Scored texts by length", "tokens", [(r.label, r.facts.target_lengths) for r in runs]),
        time_histogram(
            "Records by latency of their batch",
            [(r.label, r.metrics.latencies, _latency_note(r.metrics)) for r in runs],
        ),
    ]
    return [chart for chart in charts if chart is not None]


def _latency_note(metrics: RunMetrics) -> str:
    records = sum(count for _, count in metrics.latencies)
    return f"{records:,} records" if records else "not known"


def _counted(counts: Sequence[Mapping[str, int]]) -> list[Bars]:
    """The most frequent names first, with their counts and shares in each run."""
    names: set[str] = set().union(*counts)
    totals = [max(sum(count.values()), 1) for count in counts]
    rows = []
    for name in sorted(names, key=lambda name: (-max(count.get(name, 0) for count in counts), name)):
        shares = [count.get(name, 0) / total for count, total in zip(counts, totals, strict=True)]
        cells = [(f"{count.get(name, 0):,} ({share:.1%})", share) for count, share in zip(counts, shares, strict=True)]
        rows.append((name, cells))
    return rows


def _grouped(runs: list[Run], name: str) -> list[tuple[str, list[Accuracy | None]]]:
    """Values of a field, the most frequent first, with the accuracy of each run."""
    groups = [run.facts.groups[name] for run in runs]
    values: set[str] = set().union(*groups)
    largest = {value: max(group[value].total for group in groups if value in group) for value in values}
    return [
        (value, [group.get(value) for group in groups])
        for value in sorted(values, key=lambda value: (-largest[value], value))
    ]

"""What the metrics file beside an output adds to it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindformers_ext.predict.metrics import metrics_path
from mindformers_ext.predict.strict_json import parse_json

MAX_BYTES = 16 * 1024**2
_PERCENTILES = {"p50": "50 %", "p90": "90 %", "p99": "99 %", "max": "all"}


@dataclass(frozen=True)
class RunMetrics:
    """Numbers of a run by what they say, ready to be shown.

    Attributes:
        speed: name and value.
        percentiles: share of the records, and the seconds that so many took at most.
        latencies: (upper end in seconds, records) of bins that follow each other from 0.
        settings: name and value of what the run was asked for, and with what.
        note: why there is nothing else; empty if there is.
    """

    speed: dict[str, str] = field(default_factory=dict)
    percentiles: dict[str, float] = field(default_factory=dict)
    latencies: list[tuple[float, int]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    note: str = ""


def metrics_beside(result: str) -> str | None:
    """Returns the path of the metrics file of an output, which may have been compressed since; None without one."""
    names = [result, result[: -len(".gz")]] if result.lower().endswith(".gz") else [result]
    return next((path for path in map(metrics_path, names) if os.path.isfile(path)), None)


def read_run_metrics(result: str, records: int, new_tokens: int) -> RunMetrics:
    """Reads the metrics file beside an output, if it is of the run that made these rows.

    Args:
        result: the output.
        records: how many it has.
        new_tokens: how many its answers have.
    """
    path = metrics_beside(result)
    if path is None:
        return RunMetrics(
            note=f"There is no {metrics_path(os.path.basename(result))} beside it: no speeds, no latencies."
        )
    name = os.path.basename(path)
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        with open(path, "rb") as file:
            values = parse_json(file.read())
    except (OSError, ValueError) as error:
        return RunMetrics(note=f"{name} is not read: {error}.")
    told = _number(values, "records", "total"), _number(values, "tokens", "new")
    if told != (records, new_tokens):
        return RunMetrics(
            note=f"{name} is not shown, since it tells of other rows: {_count(told[0])} records and {_count(told[1])} "
            f"new tokens, and here are {records:,} and {new_tokens:,}."
        )
    return RunMetrics(_speed(values), _percentiles(values), _latencies(values), _settings(values))


def _at(values: Any, *names: str) -> Any:
    for name in names:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _number(values: Any, *names: str) -> float | None:
    value = _at(values, *names)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _count(value: float | None) -> str:
    return "no" if value is None else f"{value:,.0f}"


def _speed(values: Any) -> dict[str, str]:
    rows = {
        "wall time": (_number(values, "wall_seconds"), "{:,.1f} s"),
        "prefill tokens/s": (_number(values, "prefill", "tokens_per_second"), "{:,.1f}"),
        "decode tokens/s": (_number(values, "decode", "tokens_per_second"), "{:,.1f}"),
        "records of earlier runs": (_number(values, "records", "resumed") or None, "{:,.0f}"),
    }
    ranks = _at(values, "ranks")
    if isinstance(ranks, list) and ranks:
        rows["processes"] = (len(ranks), "{}")
        peaks = [size for rank in ranks if (size := _number(rank, "peak_memory_bytes")) is not None]
        rows["peak memory"] = (max(peaks) / 1e6 if peaks else None, "{:,.0f} MB")
    return {name: form.format(value) for name, (value, form) in rows.items() if value is not None}


def _percentiles(values: Any) -> dict[str, float]:
    found = {words: _number(values, "latency_seconds", name) for name, words in _PERCENTILES.items()}
    return {words: value for words, value in found.items() if value is not None}


def _latencies(values: Any) -> list[tuple[float, int]]:
    bins = _at(values, "latency_histogram")
    if not isinstance(bins, list):
        return []
    pairs = [(_number(one, "up_to_seconds"), _number(one, "records")) for one in bins]
    return [(end, int(count)) for end, count in pairs if end is not None and count is not None]


def _settings(values: Any) -> dict[str, str]:
    found: dict[str, Any] = {}
    decoding = _at(values, "decoding")
    if isinstance(decoding, Mapping):
        found |= {name: _at(option, "value") for name, option in decoding.items()}
    found["seed"] = _at(values, "seed")
    found["batch_size"] = _at(values, "batch_size")
    layout = _at(values, "layout")
    if isinstance(layout, Mapping):
        found |= {f"layout {name}": value for name, value in layout.items() if value != 1}
    versions = _at(values, "versions")
    if isinstance(versions, Mapping):
        found |= dict(versions)
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in found.items()
        if value is not None
    }

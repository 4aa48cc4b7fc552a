"""What this process measures while a prediction runs, and what is told of it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mindformers_ext.generate import GenerationStats
from mindformers_ext.parallel.groups import ParallelContext
from mindformers_ext.predict.metrics import (
    Latencies,
    RankReport,
    format_measures,
    joined_timings,
    metrics_path,
    run_metrics,
    write_metrics,
)
from mindformers_ext.predict.summary import RunSummary, Timings, format_summary
from mindformers_ext.runtime import logger

_BYTES_PER_VALUE = 4  # parameters are float32 or int32 in memory


class RunMeter:
    """Measures a run from the moment when it is made.

    Args:
        model: what predicts.
        context: the place of this process.
    """

    def __init__(self, model: Any, context: ParallelContext) -> None:
        self._model, self._context = model, context
        self._runtime = getattr(model, "runtime", None)  # of a pipeline
        self._traffic = context.traffic.by_group()
        self._waited, self._ran = self._pipeline_seconds()

    def reports(self, stats: GenerationStats) -> list[RankReport]:
        """Returns what all processes measured, by rank; all of the job call it."""
        report = asdict(self.report(stats))
        gathered = self._context.world.all_gather_object(report)
        return sorted(map(RankReport.from_dict, gathered), key=lambda one: one.rank)

    def report(self, stats: GenerationStats) -> RankReport:
        """Returns what this process measured so far."""
        sent = {}
        for name, count in self._context.traffic.by_group().items():
            before = self._traffic.get(name)
            calls = count.calls - (before.calls if before else 0)
            if calls:
                sent[name] = (calls, count.bytes - (before.bytes if before else 0))
        waited, ran = self._pipeline_seconds()
        return RankReport(
            rank=self._context.rank,
            leads=self._context.unit.rank == 0,
            timings=Timings(stats.prefill_seconds, stats.prefill_tokens, stats.decode_seconds, stats.decode_tokens),
            forwards=stats.forwards,
            weight_bytes=weight_bytes(self._model),
            cache_bytes=stats.cache_bytes,
            shared_tokens=stats.shared_tokens,
            prefix_tokens=stats.prefix_tokens,
            prefix_bytes=stats.prefix_bytes,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            peak_memory_bytes=_peak_memory(),
            idle_share=(waited - self._waited) / (ran - self._ran) if ran > self._ran else None,
            traffic=sent,
        )

    def layout(self) -> dict[str, Any]:
        """Returns the degrees of the job, and how many parts of a batch a pipeline has on its way."""
        parts = 1 if self._runtime is None else self._runtime.micro_batch_num
        return asdict(self._context.dims) | {"micro_batches": parts}

    def _pipeline_seconds(self) -> tuple[float, float]:
        return (0.0, 0.0) if self._runtime is None else (self._runtime.seconds_waiting, self._runtime.seconds_total)


def report_run(
    summary: RunSummary,
    new_tokens: int,
    reports: Sequence[RankReport],
    latencies: Latencies,
    settings: Mapping[str, Any],
    output: str,
    metrics_file: bool,
) -> None:
    """Logs what a run did, and writes it beside its output.

    Args:
        summary: counts of the output.
        new_tokens: those of this run; earlier ones of the job may have made others.
        reports: of all processes.
        latencies: of this process.
        settings: what the run was asked for, as JSON can hold it.
        output: the output file; empty on processes that write none.
        metrics_file: whether there is to be one.
    """
    for line in format_summary(summary, joined_timings(reports)) + format_measures(reports, new_tokens):
        logger.info(line)
    if not output:
        return
    logger.info("results: %s", output)
    if metrics_file:
        path = metrics_path(output)
        try:
            write_metrics(path, run_metrics(summary, new_tokens, reports, latencies, settings))
            logger.info("metrics: %s", path)
        except OSError as error:  # the results are complete
            logger.warning("the metrics of the run could not be written to %s: %s", path, error)


def weight_bytes(model: Any) -> int:
    """Returns the bytes of the parameters that this process keeps between forwards."""
    if hasattr(model, "weight_regions"):
        return _BYTES_PER_VALUE * sum(region.size for region in model.weight_regions().values())
    return sum(parameter.size * parameter.itemsize for parameter in model.get_parameters())


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""The keys of metrics over answers, and of the `EvaluationCallback`; docs/evaluation.md says what they mean."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from mindformers_ext.config.build import build_section
from mindformers_ext.config.errors import KeyPath, Source, show
from mindformers_ext.config.generation import GenerationSection, conflicts
from mindformers_ext.config.schema import PredictSection, Regex
from mindformers_ext.config.section import Check, Count, Name, NonNegativeFloat, Section, yaml_fields

FunctionPath = Annotated[
    str,
    Check(
        "naming a function, as package.module:function or package.module.function",
        lambda value: all(part.isidentifier() for part in value.replace(":", ".", 1).split(".")) and _has_module(value),
    ),
]


def _has_module(path: str) -> bool:
    return len(path.replace(":", ".", 1).split(".")) > 1


@dataclass(slots=True, kw_only=True)
class MetricSection(Section):
    """One metric over answers; `name` stands for it in results and is its type where it is left out."""

    name: Name | None = None


@dataclass(slots=True, kw_only=True)
class ExtractingSection(MetricSection):
    """A metric that may look at a part of the answer alone, as the regex filter of lm-evaluation-harness finds it."""

    extract: Regex | None = None
    group_select: int = 0


@dataclass(slots=True, kw_only=True)
class ExactMatchSection(ExtractingSection):
    """Whether answer and reference are equal after the same changes to both."""

    regexes_to_ignore: list[Regex] | None = None
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    strip: bool = True


@dataclass(slots=True, kw_only=True)
class ContainsSection(ExactMatchSection):
    """Whether the answer has the reference in it, after the same changes to both."""


@dataclass(slots=True, kw_only=True)
class NumericMatchSection(ExtractingSection):
    """Whether the last numbers of answer and reference are equal."""

    tolerance: NonNegativeFloat = 0.0
    relative_tolerance: NonNegativeFloat = 0.0


@dataclass(slots=True, kw_only=True)
class RegexSection(MetricSection):
    """Whether a pattern is found in the answer."""

    pattern: Regex = ""


@dataclass(slots=True, kw_only=True)
class FunctionSection(MetricSection):
    """What a function of the user's says."""

    function: FunctionPath = ""


METRICS: dict[str, type[MetricSection]] = {
    "exact_match": ExactMatchSection,
    "contains": ContainsSection,
    "regex": RegexSection,
    "numeric_match": NumericMatchSection,
    "function": FunctionSection,
}
# Ends the name of a value that asks whether any of a record's answers is right.
ANY_SUFFIX = "_any"
# What the task `score` gives instead of metrics over answers, see `predict.score_sums`.
SCORE_METRICS = (
    *("acc", "acc_norm", "acc_bytes", "greedy", "target_perplexity", "nll", "token_perplexity"),
    *("word_perplexity", "byte_perplexity", "bits_per_byte"),
)
_SMALLER_IS_BETTER = ("nll", "perplexity", "bits_per_byte", "loss")
_REQUIRED = {"regex": "pattern", "function": "function"}


def build_metrics(entries: Sequence[Any], path: KeyPath, source: Source | None = None) -> list[MetricSection]:
    """Builds metrics from a list of types, of import paths of functions, and of mappings with a ``type``.

    Args:
        entries: the list.
        path: its place, for messages.
        source: where it came from.

    Returns:
        The metrics, each with a `name` of its own.

    Raises:
        ConfigError: an unknown type or key, a value out of range, or a name that comes twice.
    """
    source = source or Source()
    metrics: dict[str, MetricSection] = {}
    for index, entry in enumerate(entries):
        place = (*path, index)
        metric = _metric(entry, place, source)
        assert metric.name is not None
        if metric.name in metrics:
            raise source.error(place, f"the name {metric.name!r} comes twice; give one of them another name")
        metrics[metric.name] = metric
    return list(metrics.values())


def _metric(entry: Any, path: KeyPath, source: Source) -> MetricSection:
    if isinstance(entry, str):
        entry = {"type": entry} if entry in METRICS or not _has_module(entry) else {"function": entry}
    if not isinstance(entry, Mapping):
        raise source.error(path, f"expected the name of a metric or a mapping with its type, got {show(entry)}")
    options = dict(entry)
    kind = options.pop("type", "function" if "function" in options else None)
    if kind is None:
        raise source.error((*path, "type"), f"is missing; a metric is one of {', '.join(METRICS)}")
    if not isinstance(kind, str) or kind not in METRICS:
        near = difflib.get_close_matches(str(kind), METRICS, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(METRICS)}"
        raise source.error(path, f"unknown metric {kind!r:.60}; {advice}")
    required = _REQUIRED.get(kind)
    if required is not None and required not in options:
        raise source.error((*path, required), f"is missing; a metric of type {kind} needs it")
    metric: MetricSection = build_section(METRICS[kind], options, path, source)
    if metric.name is None:
        metric.name = metric.function.replace(":", ".").split(".")[-1] if isinstance(metric, FunctionSection) else kind
    return metric


@dataclass(slots=True, kw_only=True)
class EvaluationSection(Section):
    """The arguments of an `EvaluationCallback`."""

    input_data: str | list[Any] | dict[str, Any] | None = None
    output_dir: Name | None = None
    eval_steps: Count | None = None
    eval_on_start: bool = False
    eval_on_end: bool = True
    max_new_tokens: Count | None = None
    batch_size: Count | None = None
    task: Literal["generate", "score"] | None = None
    dataset_field: Name | None = None
    metrics: list[Any] | None = None
    reference_field: Name | None = None
    metrics_in_rows: bool | None = None
    target_field: Name | None = None
    answer_field: Name | None = None
    target_delimiter: str | None = None
    rolling: bool | None = None
    generation: GenerationSection = field(default_factory=GenerationSection)
    metric_for_best_model: Name | None = None
    greater_is_better: bool | None = None
    best_dir: Name | None = None

    def predict_options(self) -> dict[str, Any]:
        """Returns the keys of ``predict`` that differ in the evaluation."""
        names = yaml_fields(PredictSection).keys() & yaml_fields(EvaluationSection).keys()
        return {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}

    def folders(self, saved: Path) -> tuple[Path, Path]:
        """Returns where the evaluations go, and where the best checkpoint, of a training that saves to ``saved``."""
        output = Path(f"{saved}_evaluation" if self.output_dir is None else self.output_dir)
        return output, output / "best" if self.best_dir is None else Path(self.best_dir)

    def prefers_greater(self) -> bool:
        """Whether a greater value of the metric is better; where nobody says, its name does."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not (self.metric_for_best_model or "").endswith(_SMALLER_IS_BETTER)


def build_evaluation(options: Mapping[str, Any], path: KeyPath, source: Source | None = None) -> EvaluationSection:
    """Builds the arguments of an `EvaluationCallback`.

    Args:
        options: the keys beside ``type``.
        path: the place of the callback, for messages.
        source: where it came from.

    Raises:
        ConfigError: an unknown key, a value out of range, or keys that do not go together.
    """
    source = source or Source()
    section = build_section(EvaluationSection, dict(options), path, source)
    if section.input_data is None:
        raise source.error((*path, "input_data"), "is missing; give the file to evaluate on")
    if section.input_data == "-":
        raise source.error((*path, "input_data"), "standard input can be read once only; give a file")
    for key, problem in conflicts(section.generation):
        raise source.error((*path, "generation", key), problem)
    if section.eval_steps is None and not section.eval_on_start and not section.eval_on_end:
        raise source.error(path, "never evaluates; give eval_steps, eval_on_start or eval_on_end")
    build_metrics(section.metrics or [], (*path, "metrics"), source)
    if section.best_dir is not None and section.metric_for_best_model is None:
        raise source.error((*path, "best_dir"), "needs metric_for_best_model, which says what best means")
    return section


def best_metric_mistake(name: str, predict: PredictSection) -> str | None:
    """Returns what is wrong with `metric_for_best_model`, None if the evaluation of `predict` has such a value."""
    metrics = build_metrics(predict.metrics or [], ("predict", "metrics"))
    values = [value for metric in metrics for value in (metric.name or "", f"{metric.name}{ANY_SUFFIX}")]
    if predict.task == "score":
        values = list(SCORE_METRICS)
    if name in values:
        return None
    if not values:
        return f"'{name}' needs metrics, among which it is one"
    near = difflib.get_close_matches(name, values, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(values)}"
    return f"'{name}' is none of the metrics; {advice}"

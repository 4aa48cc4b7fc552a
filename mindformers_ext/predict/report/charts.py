"""Histograms: the numbers of their bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_BARS = 40
_STEPS = (1, 2, 5)


@dataclass(frozen=True)
class Bar:
    """One bar: what it counts, in words and in number, and its height, 0 to 100 for the highest of the chart."""

    label: str
    count: int
    height: float


@dataclass(frozen=True)
class Series:
    """The bars of one run, and a line that sums them up."""

    name: str
    bars: list[Bar]
    note: str


@dataclass(frozen=True)
class Histogram:
    """Bars over the same range for each run.

    Attributes:
        title: what is counted by what.
        low, high: the ends of the range, as text.
        highest: the count of the highest bar.
        series: a run each.
    """

    title: str
    low: str
    high: str
    highest: int
    series: list[Series]


def length_histogram(title: str, unit: str, counts: Sequence[tuple[str, Mapping[int, int]]]) -> Histogram | None:
    """Returns bars of equal width over whole numbers; None if there is nothing to count.

    Args:
        title: of the chart.
        unit: what the numbers count, as "tokens".
        counts: for each run its name, and how often each number is there.
    """
    numbers = [number for _, count in counts for number in count]
    if not numbers:
        return None
    width = _width(max(numbers) - min(numbers) + 1)
    first, last = min(numbers) // width, max(numbers) // width
    binned = []
    for _, count in counts:
        sums = [0] * (last - first + 1)
        for number, how_often in count.items():
            sums[number // width - first] += how_often
        binned.append(sums)
    labels = []
    for index in range(first, last + 1):
        low, high = index * width, (index + 1) * width - 1
        labels.append(f"{low:,} {unit}" if width == 1 else f"{low:,} to {high:,} {unit}")
    notes = [_spread(count, unit) for _, count in counts]
    ends = f"{first * width:,}", f"{(last + 1) * width - 1:,} {unit}"
    return _histogram(title, ends, labels, [name for name, _ in counts], binned, notes)


def time_histogram(title: str, counts: Sequence[tuple[str, Sequence[tuple[float, int]], str]]) -> Histogram | None:
    """Returns bars of equal width over seconds; None if there is nothing to count.

    Args:
        title: of the chart.
        counts: for each run its name, (upper end in seconds, count) of bins that follow each other from 0, and a line
            that sums them up. A bin is counted where its middle lies.
    """
    longest = max((end for _, bins, _ in counts for end, count in bins if count), default=0.0)
    if longest <= 0:
        return None
    number = max(len(bins) for _, bins, _ in counts)
    width = longest / number
    binned = []
    for _, bins, _ in counts:
        sums = [0] * number
        low = 0.0
        for high, count in bins:
            sums[min(int((low + high) / 2 / width), number - 1)] += count
            low = high
        binned.append(sums)
    labels = [f"{index * width:.3g} to {(index + 1) * width:.3g} s" for index in range(number)]
    names, notes = [name for name, _, _ in counts], [note for _, _, note in counts]
    return _histogram(title, ("0", f"{longest:.3g} s"), labels, names, binned, notes)


def quantile(counts: Mapping[int, int], share: float) -> int:
    """Returns the smallest number that so large a share of all is not above."""
    wanted, covered = share * sum(counts.values()), 0
    for number in sorted(counts):
        covered += counts[number]
        if covered >= wanted:
            return number
    raise ValueError("there is nothing to count")


def _histogram(
    title: str, ends: tuple[str, str], labels: list[str], names: list[str], binned: list[list[int]], notes: list[str]
) -> Histogram:
    highest = max(max(sums) for sums in binned)
    series = [
        Series(name, [Bar(label, n, 100 * n / highest) for label, n in zip(labels, sums, strict=True)], note)
        for name, sums, note in zip(names, binned, notes, strict=True)
    ]
    return Histogram(title, *ends, highest, series)


def _spread(counts: Mapping[int, int], unit: str) -> str:
    if not counts:
        return "none"
    total = sum(counts.values())
    mean = sum(number * count for number, count in counts.items()) / total
    return (
        f"median {quantile(counts, 0.5):,}, mean {mean:,.1f}, 90 % up to {quantile(counts, 0.9):,}, "
        f"largest {max(counts):,} {unit}"
    )


def _width(span: int) -> int:
    """The smallest of 1, 2, 5, 10 ... for which at most `MAX_BARS` bars cover `span` numbers, wherever they begin."""
    power = 1
    while True:
        for step in _STEPS:
            if span / (step * power) <= MAX_BARS - 1 or span <= MAX_BARS and step * power == 1:
                return step * power
        power *= 10

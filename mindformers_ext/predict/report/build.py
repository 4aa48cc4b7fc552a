"""Reads one output, or two side by side, and writes the page about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mindformers_ext.predict.output_files import replace_file
from mindformers_ext.predict.report.collect import Choice, RunFacts
from mindformers_ext.predict.report.compare import Comparison, aligned
from mindformers_ext.predict.report.page import Run, render_page
from mindformers_ext.predict.report.reading import BrokenRow, check_result, read_results
from mindformers_ext.predict.report.run_metrics import metrics_beside, read_run_metrics

PAGE_SUFFIXES = (".html", ".htm")


def write_report(results: Sequence[str], output: str, choice: Choice) -> list[Run]:
    """Writes the page, at once and with mode 0o640, and returns what it tells of each result.

    Args:
        results: an output of a prediction, or two that are compared.
        output: the page; a file that is there is replaced.
        choice: what the page shows.

    Raises:
        ValueError: a result is no output, has no rows or, of two, not in order; no row has a field of `choice`; or the
            page has no name of a page, or would take the place of something else than a file.
        OSError: a result cannot be read, or the page not be written.
    """
    for path in results:
        check_result(path)
    _check_page(Path(os.path.abspath(output)), results)
    facts = [RunFacts(choice) for _ in results]
    comparison = None
    if len(results) == 1:
        for found in read_results(results[0]):
            if isinstance(found, BrokenRow):
                facts[0].add_broken(found)
            else:
                facts[0].add(found)
    else:
        comparison = Comparison(choice)
        one, other = results
        on_broken = facts[0].add_broken, facts[1].add_broken
        for a, b in aligned((one, other), read_results(one), read_results(other), on_broken):
            for fact, row in zip(facts, (a, b), strict=True):
                if row is not None:
                    fact.add(row)
            comparison.add(a, b)
    for path, fact in zip(results, facts, strict=True):
        _check_rows(path, fact)
        fact.check_choice(path)
    labels = ("A", "B") if comparison is not None else ("",)
    runs = [
        Run(label, path, fact, read_run_metrics(path, fact.records, fact.new_tokens))
        for label, path, fact in zip(labels, results, facts, strict=True)
    ]
    page = render_page(runs, comparison, choice).encode()
    replace_file(Path(os.path.abspath(output)), lambda file: file.write(page))
    return runs


def _check_page(page: Path, results: Sequence[str]) -> None:
    if page.suffix.lower() not in PAGE_SUFFIXES:
        raise ValueError(f"the page {str(page)!r} must end in .html")
    if page.is_symlink() or (page.exists() and not page.is_file()):
        raise ValueError(f"the page {str(page)!r} is a link, a directory or a device; give the name of a file")
    beside = [path for path in map(metrics_beside, results) if path is not None]
    for path in [*results, *beside]:
        if page.exists() and os.path.samefile(page, path):
            raise ValueError(f"the page {str(page)!r} is the file {path!r} that it is about; give another name")
    if not page.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(page.parent)!r} of the page does not exist")


def _check_rows(path: str, facts: RunFacts) -> None:
    if facts.rows:
        return
    if facts.broken:
        broken = facts.broken[0]
        raise ValueError(f"{path}: not one row of an output is in it; {broken.place}: {broken.message}")
    raise ValueError(f"{path}: there are no rows in it")

"""Write an HTML page about an output: ``python -m mindformers_ext.predict.report result.jsonl [other.jsonl]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mindformers_ext.predict.report.build import write_report
from mindformers_ext.predict.report.collect import Choice

SUFFIX = ".report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 after a message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m mindformers_ext.predict.report", description=__doc__)
    parser.add_argument(
        "results", nargs="+", metavar="result", help=".jsonl or .json output, also .gz; two are compared"
    )
    parser.add_argument("--output", help=f"the page; default: the first result's name with {SUFFIX}")
    parser.add_argument("--reference", help="field with the right answer, or a list of right answers")
    parser.add_argument("--metric", help="metric that the rows carry, instead of a reference; default: their first")
    parser.add_argument("--by", action="append", default=[], help="field by whose values accuracy is told apart")
    parser.add_argument("--rows", type=int, default=100, help="rows in each table, 100")
    options = parser.parse_args(arguments)
    if len(options.results) > 2:
        parser.error("give one result, or two to be compared")
    if options.reference is not None and options.metric is not None:
        parser.error("give --reference or --metric, not both")
    if options.rows < 1:
        parser.error("--rows must be at least 1")
    output = options.results[0] + SUFFIX if options.output is None else options.output
    try:
        runs = write_report(
            options.results, output, Choice(options.reference, options.metric, options.by, options.rows)
        )
    except (ValueError, OSError) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"error: {told}", file=sys.stderr)
        return 1
    for run in runs:
        for broken in run.facts.broken:
            print(f"{run.path}: {broken.place}: {broken.message}", file=sys.stderr)
        if run.facts.num_broken:
            print(f"{run.path}: {run.facts.num_broken} places without a row are left out", file=sys.stderr)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

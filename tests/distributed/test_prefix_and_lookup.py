"""Shared prefixes and prompt lookup change no row in any layout."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory, launch_job):
    """The job's module, the folders of a job of 2 ranks and of one process without either, and the job's log."""
    many, one = tmp_path_factory.mktemp("many"), tmp_path_factory.mktemp("one")
    prefix_job, job = launch_job("prefix_job", many, 2)
    for family in {family for family, *_ in prefix_job.RUNS}:
        prefix_job.predict(one, family, family, {}, 2, {}, False)
    return prefix_job, many, one, job.logs[0]


def metrics(path):
    return json.loads(Path(f"{path}.metrics.json").read_text())


def test_every_layout_shares_and_decodes_ahead_with_the_rows_of_one_process(found):
    job, many, one, log = found
    for family, layout, _, _ in job.RUNS:
        expected = (one / f"{family}.jsonl").read_bytes()
        shared, lookup = (many / f"{family}-{layout}-{name}.jsonl" for name in ("shared", "lookup"))
        assert shared.read_bytes() == expected, shared.name
        assert lookup.read_bytes() == expected, lookup.name
        counts = metrics(shared)["shared_prefixes"]
        assert (counts["shared_tokens"] > 0) == (layout != "context"), shared.name
        assert metrics(lookup)["prompt_lookup"]["drafted"] > 0, lookup.name
    assert log.count("predict.share_prefix: every prompt is computed as a whole: under context parallelism") == 1


def test_several_rows_with_drafts_are_refused_under_context_parallelism(found):
    log = found[3]
    assert "refused: generation.prompt_lookup_num_tokens: under context parallelism drafts are tried for one row" in log

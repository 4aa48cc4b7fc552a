"""Records that do not divide by ranks, answers that end at different steps, and seeds: as on one process."""

import json

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folders(tmp_path_factory, launch_job):
    """The folders of a job of 4 ranks and of one process, after them, and what the job printed."""
    many, one = tmp_path_factory.mktemp("many"), tmp_path_factory.mktemp("one")
    records_job, job = launch_job("records_job", many, 4)
    for name in records_job.RUNS:
        records_job.run(one, name, {})
    return many, one, job.stdout


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("nine-on-replicas", 9),
        ("one-on-replicas", 1),
        ("none-on-replicas", 0),
        ("lengths-on-shards", 9),
        ("lengths-on-shared-sequences", 9),
        ("lengths-on-heads-and-stages", 9),
        ("tied-on-stages", 5),
        ("seeded-on-stages", 5),
    ],
)
def test_the_file_is_that_of_one_process_with_each_record_once(folders, name, rows):
    many, one, _ = folders
    found = (many / f"{name}.jsonl").read_bytes()
    assert len(found.splitlines()) == rows
    assert found == (one / f"{name}.jsonl").read_bytes()
    assert not (many / f"{name}.jsonl.journal").exists()


@pytest.mark.parametrize("where", ["shards", "shared-sequences", "heads-and-stages"])
def test_the_answers_really_end_at_different_steps(folders, where):
    rows = [json.loads(line) for line in (folders[0] / f"lengths-on-{where}.jsonl").read_text().splitlines()]
    assert len({row["num_new_tokens"] for row in rows}) >= 3


def test_ranks_whose_generators_of_random_numbers_differ_draw_the_same_tokens(folders):
    assert "ranks with different generators drew the same tokens" in folders[2]

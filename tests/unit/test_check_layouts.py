"""scripts/check_layouts.py tells files that are equal from those that are not, and walks every kind of layout."""

import json

import pytest

from scripts import check_layouts

ROW = {"generated_ids": [1, 2], "sequence_score": -0.5, "top_logprobs": [[[2, -0.25], [3, -1.5]]]}


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({}, "equal"),
        ({"sequence_score": -0.5001}, "equal ids"),
        ({"top_logprobs": [[[2, -0.2501], [3, -1.5]]]}, "equal ids"),
        ({"sequence_score": -0.5002}, "DIFFERENT"),
        ({"generated_ids": [1, 3]}, "DIFFERENT"),
        ({"generated_ids": [1]}, "DIFFERENT"),
        ({"top_logprobs": [[[4, -0.25], [3, -1.5]]]}, "DIFFERENT"),
        ({"logprobs": [-0.25]}, "DIFFERENT"),
    ],
)
def test_files_are_equal_or_differ_in_the_last_digit_of_scores_or_are_different(change, result, tmp_path):
    for name, row in (("ours", ROW | change), ("theirs", ROW)):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    assert check_layouts.compare(tmp_path / "ours", tmp_path / "theirs")["result"] == result


def test_a_missing_row_makes_files_different(tmp_path):
    (tmp_path / "ours").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "theirs").write_text((json.dumps(ROW) + "\n") * 2)
    assert check_layouts.compare(tmp_path / "ours", tmp_path / "theirs")["result"] == "DIFFERENT"


def test_the_layouts_of_eight_ranks_hold_every_degree_and_product():
    walked = check_layouts.layouts(8)
    assert len(walked) == len(set(walked))
    assert {"dp8", "fsdp8", "tp8", "cp4", "cp4ulysses", "cp4hybrid", "pp4", "pp2uneven"} <= set(walked)
    assert {"tp2cp2", "tp2pp2", "cp2pp2", "tp2cp2pp2", "fsdp2tp2cp2", "tp2ep2", "fsdp8ep8"} <= set(walked)
    assert check_layouts.parallelism("fsdp2pp4uneven", 6) == {
        "data_parallel_shard": 2,
        "sequence_parallel": False,
        "pipeline_parallel": 4,
        "pipeline_parallel_layers_per_stage": ["0-0", "1-1", "2-3", "4-5"],
    }
    assert check_layouts.parallelism("tp2cp4hybrid", 4) == {
        "data_parallel_shard": 1,
        "sequence_parallel": True,
        "tensor_parallel": 2,
        "context_parallel": 4,
        "context_parallel_method": "hybrid",
        "ulysses_degree_in_cp": 2,
    }

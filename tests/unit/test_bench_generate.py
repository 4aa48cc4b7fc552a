"""scripts/bench_generate.py and its neighbours run on a small shape, and their tables show what was measured."""

import argparse
import importlib
import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

from mindformers_ext.checkpoint import check_weights
from mindformers_ext.models import transformer_config
from mindformers_ext.models.families import weight_layout
from mindformers_ext.ops import native

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
needs_kernels = pytest.mark.skipif(not native.available(), reason="no compiler for the C++ kernels")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("bench_generate")
    for key, value in TINY.items():
        monkeypatch.setitem(module.SHAPE, key, value)
    return module


def options(**changed):
    usual = {"batch_sizes": [1, 2], "prompt_lengths": [5], "new_tokens": 3, "runs": 1, "weight_dtypes": ["bfloat16"]}
    return argparse.Namespace(**usual | {"families": ["qwen3"], "compare": None, "peer_dtypes": []} | changed)


@needs_kernels
def test_each_type_is_measured_at_each_batch_size_beside_a_plain_read(bench, capsys):
    rows = bench.compare("qwen3", options(weight_dtypes=["float32", "bfloat16", "int8"]))
    assert [(row["dtype"], row["batch_size"]) for row in rows] == [
        (dtype, size) for size in (1, 2) for dtype in ("float32", "bfloat16", "int8")
    ]
    sizes = {row["dtype"]: row["weight_bytes"] for row in rows}
    assert sizes["float32"] == 2 * sizes["bfloat16"] and sizes["int8"] < sizes["bfloat16"]
    assert all(row["share_of_memory_limit"] > 0 and row["read_gb_per_second"] > 0 for row in rows)
    assert all(row["share_of_arithmetic_limit"] > 0 and row["gflops_limit"] > 1 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_lines_fit_the_header_and_ratios_name_both_types(bench):
    row = {"family": "qwen3", "prompt_length": 64, "batch_size": 8, "who": "ours", "dtype": "int8", "weight_bytes": 2e9}
    row |= {"prefill_tokens_per_second": 200.0, "decode_tokens_per_second": 30.0, "decode_step_ms": 100.0}
    line = bench.table_line(row | {"share_of_memory_limit": 0.75, "share_of_arithmetic_limit": 0.5})
    assert len(line) == len(bench.HEADER) and line.split()[-3:] == ["20.0", "75%", "50%"]
    peer = row | {"who": "transformers", "dtype": "float32", "prefill_tokens_per_second": 100.0}
    assert bench.ratio_lines([row, peer]) == [
        "    ours int8 / transformers float32 prefill x 2.00, float32 decode x 1.00"
    ]
    assert bench.ratio_lines([row]) == []


def test_sides_take_turns_and_the_first_round_does_not_count(bench):
    calls = []

    def side(name, values):
        return lambda: calls.append(name) or next(values)

    sides = [side("a", iter([90, 1, 3, 2])), side("b", iter([80, 6, 4, 5]))]
    assert bench.medians_in_turn(sides, 3) == [2, 5]
    assert calls == ["a", "b"] * 4


@needs_kernels
def test_products_are_measured_for_each_number_of_rows_and_type(bench, monkeypatch, capsys):
    products = importlib.import_module("bench_products")
    arguments = ["--rows", "1", "9", "--weights", "2", "--outputs", "70", "--inputs", "30", "--runs", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_products.py", *arguments])
    products.main()
    *_, table, last = capsys.readouterr().out.splitlines()
    assert table.split()[0] == "9"
    for rows in json.loads(last)["results"].values():
        assert [row["rows"] for row in rows] == [1, 9]
        assert all(row["gflops"] > 0 and row["gflops_limit"] > 0 for row in rows)
        assert rows[1]["gflops"] / rows[0]["gflops"] == pytest.approx(
            9 * rows[1]["gb_per_second"] / rows[0]["gb_per_second"]
        )


@needs_kernels
def test_profile_counts_the_operations_of_one_decode_step(bench):
    (entry,) = bench.profile(options(batch_sizes=[2], new_tokens=5))
    calls = {row["operation"]: row["calls"] for row in entry["operations"]}
    assert calls["dense_layers"] == calls["linear"] == calls["embedding"] == calls["rms_norm"] == 1
    assert not {"attention_block", "mlp", "add_rms_norm"} & set(calls)
    total = sum(row["ms"] for row in entry["operations"])
    assert total == pytest.approx(entry["step_ms"])


def test_plot_without_matplotlib_says_how_to_get_it_before_anything_runs(bench, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_generate.py", "--plot", "out.png"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib: pip install 'mindformers_ext\[bench\]'"):
        bench.main()


def test_startup_writes_a_checkpoint_that_fits_the_model(bench, tmp_path):
    startup = importlib.import_module("bench_startup")
    shape = bench.SHAPE | {"vocab_size": 3000}
    size = startup.write_checkpoint(tmp_path, shape)
    config = json.loads((tmp_path / "config.json").read_text())
    report = check_weights(tmp_path, weight_layout(transformer_config({}, config)))
    assert report.stored_bytes == size and set(report.dtypes) == {"BF16"}


@needs_kernels
def test_narrow_weights_of_the_quickstart_answer_nearly_as_float32_ones(bench, monkeypatch, capsys):
    check = importlib.import_module("check_weight_dtypes")
    monkeypatch.setattr(sys, "argv", ["check_weight_dtypes.py", "--num_texts", "5", "--new_tokens", "4"])
    check.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["float32"]["equal_ids"] == 1 and results["float32"]["nll"] > 0
    assert results["int8"]["equal_ids"] > 0.9 and abs(results["int8"]["difference"]) < 0.1
    assert results["int8"]["bytes"] < results["bfloat16"]["bytes"] < results["float32"]["bytes"]


def test_agreement_counts_equal_answers_and_ids_before_the_first_difference(bench):
    check = importlib.import_module("check_weight_dtypes")
    assert check.agreement([[1, 2, 3], [4, 9, 6]], [[1, 2, 3], [4, 5, 6]]) == (0.5, 4 / 6)
    assert check.agreement([[1]], [[1, 2]]) == (0.0, 0.5)
    assert np.isclose(check.agreement([[1, 2]], [[1]])[1], 1.0)

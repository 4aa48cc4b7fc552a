"""The launcher with the real msrun: what the workers return is what the job returns, on one node and on two."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
from launching import JOBS, ROOT, end_job, finish_job, run_job, start_job

pytestmark = pytest.mark.distributed

PROGRAM = """
import os, sys
if sys.argv[1] == "early" and os.environ["RANK_ID"] == "1":
    sys.exit("no such file")
import numpy as np
from mindspore import Tensor, communication, ops
communication.init("mccl")
total = ops.AllReduce()(Tensor(np.full(3, communication.get_rank() + 1, np.float32)))
print("sum", total.asnumpy().tolist(), flush=True)
sys.exit(3 if communication.get_rank() == 0 else 0)
"""


def launch(folder, mode, code):
    (folder / "job.py").write_text(PROGRAM)
    return run_job(folder, f"job.py {mode}", 2, (code,))


def test_workers_that_finish_with_error_records_are_not_killed(tmp_path):
    done = launch(tmp_path, "all", 3)
    assert "sum [3.0, 3.0, 3.0]" in done.stdout
    assert "sum [3.0, 3.0, 3.0]" in done.logs[1]


def test_a_worker_that_dies_before_joining_ends_the_job_instead_of_the_cluster_timeout(tmp_path):
    done = launch(tmp_path, "early", 1)
    assert "worker 1 failed with exit code 1" in done.stderr
    assert "no such file" in done.stderr


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch_nodes(folder, program, workers_per_node):
    """Two launchers on this host, each in a folder of its own; returns the jobs of both."""
    port, nodes = free_port(), []
    for node in range(2):
        where = folder / f"node{node}"
        where.mkdir(exist_ok=True)
        place = (2 * workers_per_node, workers_per_node, "127.0.0.1", port, node)
        nodes.append(start_job(where, program, *place, "logs", "True", 120))
    try:
        return [finish_job(node) for node in nodes]
    finally:
        for node in nodes:
            end_job(node)


def test_two_nodes_answer_with_the_yaml_of_the_documentation_as_one_process_does(tmp_path):
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    product = page.split("### Products")[1].split("```yaml\n")[1].split("```")[0]
    for folder in (tmp_path / "node0", tmp_path / "node1"):
        (folder / "path" / "to").mkdir(parents=True)
        (folder / "path" / "to" / "model").symlink_to(ROOT / "tests" / "data" / "checkpoints" / "qwen3")
        (folder / "predict.yaml").write_text(product)
    arguments = (
        '--config predict.yaml --predict_data "two  words \\"quoted\\" $HOME" second --inference.max_new_tokens 5'
    )
    results = launch_nodes(tmp_path, f"{ROOT / 'run_mindformer.py'} {arguments}", 2)
    assert [job.code for job in results] == [0, 0], results
    rows = [json.loads(line) for line in (tmp_path / "node0" / "result.jsonl").read_text().splitlines()]
    assert [row["instruction"] for row in rows] == ['two  words "quoted" $HOME', "second"]
    assert not (tmp_path / "node1" / "result.jsonl").exists()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = re.sub("tensor_parallel: 2|pipeline_parallel: 2", lambda match: match[0][:-1] + "1", product)
    (tmp_path / "node1" / "predict.yaml").write_text(words)
    prompts = ["--predict_data", 'two  words "quoted" $HOME', "second"]
    command = [sys.executable, str(ROOT / "run_mindformer.py"), "--config", "predict.yaml", *prompts]
    command += ["--inference.max_new_tokens", "5"]
    subprocess.run(command, cwd=tmp_path / "node1", env=env, check=True, capture_output=True, timeout=200)
    assert (tmp_path / "node1" / "result.jsonl").read_text() == (tmp_path / "node0" / "result.jsonl").read_text()


def test_a_node_whose_worker_is_killed_ends_both_nodes(tmp_path):
    first, second = launch_nodes(tmp_path, f"{JOBS / 'fault_job.py'} {tmp_path} kill", 1)
    assert (first.code, second.code) == (5, 137), (first, second)
    assert "worker 1 failed with exit code 137, ended by SIGKILL" in second.stderr
    assert "worker 0 failed because another one did" in first.stderr
    assert "rank 1 has ended, and this rank cannot go on without it" in first.stderr

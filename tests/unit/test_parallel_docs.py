"""docs/parallel.md: its YAMLs load and fit the processes that it states, and the tests that it names exist."""

import re
from pathlib import Path

import pytest
import yaml

from mindformers_ext.config import load_config
from mindformers_ext.parallel import ParallelDims

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
LAYOUTS = re.findall(r"^### (.+?)\n(.*?)^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_there_is_a_yaml_for_every_layout():
    degrees = [yaml.safe_load(text)["parallelism"] for _, _, text in LAYOUTS]
    assert [set(section) & {"tensor_parallel", "context_parallel", "expert_parallel"} for section in degrees] == [
        set(), set(), {"tensor_parallel"}, {"context_parallel"}, {"expert_parallel"}, set(), {"tensor_parallel"}
    ]  # fmt: skip
    assert [section.get("pipeline_parallel", 1) for section in degrees] == [1, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("name", "said", "text"), LAYOUTS, ids=[name for name, _, _ in LAYOUTS])
def test_the_yaml_loads_and_fits_its_number_of_processes(name, said, text):
    config = load_config(yaml.safe_load(text))
    assert config.warnings == []
    count = re.search(r"(\d+) processes", said)
    assert (count is None) == (name == "Replicas")
    processes = int(count[1]) if count else 3
    dims = ParallelDims.from_config(config.parallelism, processes)
    assert dims.world_size == processes
    if count:  # nothing is left for replicas, so the number is the smallest that the YAML fits
        assert dims.dp_replicate == 1


def test_the_launch_commands_have_the_nine_arguments_of_the_launcher():
    commands = re.findall(r"^bash scripts/msrun_launcher.sh \"[^\"]+\" (.*)$", PAGE, re.MULTILINE)
    assert [len(command.split()) for command in commands] == [1, 8, 8]
    for node, command in enumerate(commands[1:]):
        workers, local, _, port, number, _, join, seconds = command.split()
        assert int(workers) == 2 * int(local) and int(number) == node and join == "True"
        assert 1024 <= int(port) <= 65535 and int(seconds) > 0


def test_the_tests_that_it_names_exist():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) >= 7
    for name in named:
        assert f"def {name}(" in sources, name


def test_the_limits_of_the_watchdog_are_those_of_the_configuration():
    page = (ROOT / "docs" / "yaml.md").read_text(encoding="utf-8")
    predict = load_config(yaml.safe_load(LAYOUTS[0][2])).predict
    for name in ("start_timeout", "step_timeout"):
        assert f"| `{name}` | {getattr(predict, name):g} |" in page

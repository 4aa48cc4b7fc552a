"""Jobs of several processes."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "jobs"
LAUNCHER = Path(__file__).parents[2] / "scripts" / "msrun_launcher.sh"


@pytest.fixture(scope="session")
def launch_job():
    """Runs a program of ``jobs/`` on a number of ranks, in a folder; returns its module and what it printed."""

    def launch(name, folder, ranks):
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", str(LAUNCHER), f"python {JOBS / name}.py {folder}", str(ranks)],
            cwd=folder, env=env, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        sys.path.insert(0, str(JOBS))
        try:
            return importlib.import_module(name), done.stdout
        finally:
            sys.path.pop(0)

    return launch

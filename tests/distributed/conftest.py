"""Jobs of several processes."""

import importlib
import sys

import pytest
from launching import JOBS, run_job


@pytest.fixture(scope="session")
def launch_job():
    """Runs a program of ``jobs/`` on a number of ranks, in a folder; returns its module and the job."""

    def launch(name, folder, ranks):
        job = run_job(folder, f"{JOBS / name}.py {folder}", ranks)
        sys.path.insert(0, str(JOBS))
        try:
            return importlib.import_module(name), job
        finally:
            sys.path.pop(0)

    return launch

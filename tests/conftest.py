"""Every test runs on the CPU in PyNative mode, as a user's run does."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _runtime():
    from mindformers_ext.runtime import setup_runtime

    setup_runtime("CPU")

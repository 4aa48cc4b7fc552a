"""Every test runs on the CPU in PyNative mode, as a user's run does."""

import logging

import pytest


@pytest.fixture(autouse=True, scope="session")
def _runtime():
    from mindformers_ext.runtime import setup_runtime

    setup_runtime("CPU")


class _Log(logging.Handler):
    """What the package logged."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def messages(self):
        return [record.getMessage() for record in self.records]

    @property
    def text(self):
        return "\n".join(self.messages)


@pytest.fixture
def log(monkeypatch):
    """Not caplog: what that sees of the package's logger depends on whether a Trainer was built before."""
    handler, logger = _Log(), logging.getLogger("mindformers_ext")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.manager._clear_cache()

"""What tests of several floors need."""

import pytest
from torch_ties import select_blocks

from mindformers_ext import ops


@pytest.fixture
def torch_ties(monkeypatch):
    """Lets the indexer choose among equals as torch does: for comparisons with transformers only."""
    monkeypatch.setattr(ops, "select_blocks", select_blocks)

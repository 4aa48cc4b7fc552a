"""What fails on one rank is the same error on all of them."""

import pytest

from mindformers_ext.parallel import groups
from mindformers_ext.parallel.agreement import RankError
from mindformers_ext.predict import BatchError, JobStoppedError
from mindformers_ext.trainer import replicas


def failed(rank, kind, message=""):
    return RankError(rank, (kind, "Exception"), message, victim=False)


@pytest.mark.parametrize(
    ("reports", "error", "message"),
    [
        ([failed(1, "MemoryError")], BatchError, "MemoryError: MemoryError"),
        ([failed(0, "RuntimeError", "kernel\n  stack"), failed(1, "MemoryError")], BatchError, "RuntimeError: kernel"),
        (
            [failed(0, "RuntimeError", "kernel"), failed(1, "JobStoppedError", "SIGTERM was received")],
            JobStoppedError,
            "SIGTERM was received",
        ),
    ],
)
def test_all_ranks_raise_the_same_and_a_stop_comes_before_a_fault(monkeypatch, reports, error, message):
    monkeypatch.setattr(replicas, "gather_errors", lambda context, own: reports)
    answer = replicas.shared_decode(lambda prompts, indices: [], groups.single(), 1, lambda: None, replicas.COMPLETIONS)
    with pytest.raises(error) as raised:
        answer([[1]], [0])
    assert str(raised.value) == message
    if error is BatchError:
        assert raised.value.error.type == ("oom" if "Memory" in message else "forward")

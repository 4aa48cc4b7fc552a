"""The connections of a job: what one rank meets reaches the others, and no call ends with the data of another."""

import socket
import threading

import numpy as np
import pytest

from mindformers_ext.parallel.mesh import Mesh, PeerError, PeerLostError, connect, listen

LARGE = 1 << 22  # more than the buffers of a connection hold


def meshes(size):
    ends = {rank: {} for rank in range(size)}
    for a in range(size):
        for b in range(a):
            ends[a][b], ends[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return [Mesh(rank, ends[rank]) for rank in range(size)]


@pytest.fixture(autouse=True)
def without_tcp(monkeypatch):
    """The socket pairs of the tests know no TCP options."""
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *options: None)


def run(*actions):
    """Runs one function a rank at the same time; returns what each returned or raised."""
    results = [None] * len(actions)

    def call(index):
        try:
            results[index] = actions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    return results


def swap(mesh, other, array, group=7):
    received = np.zeros_like(array)
    mesh.exchange(1, group, {other: array}, {other: received})
    return received


def failure(rank, message="bad record"):
    return {"rank": rank, "kinds": ["RuntimeError"], "message": message, "victim": False}


def test_large_arrays_cross_each_other():
    a, b = meshes(2)
    mine, yours = np.arange(LARGE, dtype=np.uint8), np.arange(LARGE, dtype=np.uint8)[::-1].copy()
    got, given = run(lambda: swap(a, 1, mine), lambda: swap(b, 0, yours))
    assert (got == yours).all() and (given == mine).all()


@pytest.mark.parametrize("size", [4, LARGE])
def test_a_rank_that_waits_gets_the_report_of_the_one_that_failed_and_both_go_on(size):
    a, b = meshes(2)
    data = np.ones(size, np.uint8)

    def waits():
        with pytest.raises(PeerError, match="rank 1 failed: bad record"):
            swap(a, 1, data)
        with pytest.raises(PeerError):  # nothing works until the failure is agreed on
            swap(a, 1, data)
        reports = a.end_epoch(failure(1) | {"victim": True})
        return reports, swap(a, 1, data)

    def fails():
        return b.end_epoch(failure(1)), swap(b, 0, data + 1)

    (reports, got), (same, given) = run(waits, fails)
    assert reports == same == [failure(1) | {"victim": True}, failure(1)]
    assert (got == 2).all() and (given == 1).all()


def test_a_failure_reaches_a_rank_that_waits_for_one_that_waits():
    a, b, c = meshes(3)
    data = np.ones(LARGE, np.uint8)

    def waits(mesh, other):
        try:
            swap(mesh, other, data)
        except PeerError as error:
            assert error.rank == 2
            return mesh.end_epoch(failure(2) | {"victim": True})

    results = run(lambda: waits(a, 1), lambda: waits(b, 2), lambda: c.end_epoch(failure(2)))
    assert results[0] == results[1] == results[2]
    received = run(lambda: swap(a, 1, data), lambda: swap(b, 0, data), lambda: None)
    assert (received[0] == 1).all()


def test_a_report_of_any_size_arrives():
    a, b = meshes(2)
    long = failure(1, "x" * (1 << 21))
    assert run(lambda: a.end_epoch(None), lambda: b.end_epoch(long)) == [[None, long]] * 2


def test_a_rank_whose_call_failed_waits_for_nobody():
    a, b = meshes(2)

    def fails():
        with pytest.raises(PeerError):
            swap(a, 1, np.ones(3))
        seen = a.waiting_for
        a.end_epoch(None)
        return seen

    assert run(fails, lambda: b.end_epoch(failure(1)))[0] == ()


@pytest.mark.parametrize("other", [{"group": 8}, {"size": 5}, {"kind": 2}])
def test_another_call_of_a_peer_is_an_error_on_both_and_never_a_result(other):
    a, b = meshes(2)

    def call(mesh, peer, kind=1, group=7, size=4):
        received = np.zeros(size, np.uint8)
        mesh.exchange(kind, group, {peer: np.ones(size, np.uint8)}, {peer: received})
        return received

    for result in run(lambda: call(a, 1), lambda: call(b, 0, **other)):
        assert isinstance(result, ConnectionError) and "makes another call" in str(result)


def test_a_peer_that_is_done_is_an_error_for_one_that_still_waits():
    a, b = meshes(2)
    waited, _ = run(
        lambda: pytest.raises(ConnectionError, swap, a, 1, np.ones(3)) and a.end_epoch(None), lambda: b.end_epoch(None)
    )
    assert waited == [None, None]


def test_a_peer_that_has_ended_is_noticed_by_all_that_wait_and_by_all_that_agree():
    a, b, c = meshes(3)
    b.close()
    for result in run(lambda: swap(a, 1, np.ones(3)), lambda: c.end_epoch(None), lambda: a.end_epoch(None)):
        assert isinstance(result, PeerLostError) and result.rank == 1


def test_a_stranger_cannot_join(monkeypatch):
    monkeypatch.undo()
    listeners = [listen("127.0.0.1") for _ in range(2)]
    addresses = [listener.getsockname() for listener in listeners]
    with (
        socket.create_connection(addresses[0]) as stranger,
        socket.create_connection(addresses[0]) as talker,
        socket.create_connection(addresses[0]) as brief,
    ):
        stranger.sendall(b"x" * 16 + (1).to_bytes(4, "big"))
        talker.sendall(b"secret")
        talker.shutdown(socket.SHUT_WR)
        brief.close()
        joined = run(*(lambda r=r: connect(r, addresses, listeners[r], b"secret of the jb") for r in range(2)))
    a, b = joined
    asked = a._peers[1].connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert asked, "a host that vanishes would not be noticed"
    got, given = run(lambda: swap(a, 1, np.full(3, 4)), lambda: swap(b, 0, np.full(3, 5)))
    assert got.tolist() == [5] * 3 and given.tolist() == [4] * 3
    a.close()
    b.close()

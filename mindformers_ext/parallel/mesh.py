"""Connections between the processes of a job on CPUs, over which a failure of one process reaches all others.

Every pair of processes has a TCP connection, and what travels on it are frames: a head that says which call they belong
to, then data. A process that fails says so to all others (`Mesh.end_epoch`), so nobody waits for data that will not
come: it gets the report in their place, fails too, and says so. A process that dies closes its connections, which is
seen at once. After a failure all go on in the next epoch; frames of an older one are skipped.

MindSpore's own sums on a CPU can do none of this: a process that left a call out leaves its peers waiting for 30
seconds, and one that makes another call in its place gives them wrong sums without an error.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

_DISCARD_BYTES = 1 << 16
_HELLO = struct.Struct("!16sI")
_CONNECT_SECONDS = 120.0
_HELLO_SECONDS = 10.0
_TRIES_BEFORE_SLEEP = 20
# A host that vanishes closes nothing: after 60 s of silence it is asked, and 10 questions later taken for lost.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 30, socket.TCP_KEEPCNT: 10}
TOKEN_BYTES = 16

Report: TypeAlias = dict[str, Any] | None


class PeerError(RuntimeError):
    """Another rank failed.

    Attributes:
        rank: its global rank.
        kind: class of its exception.
        kinds: that class and its bases.
        reason: its message.
    """

    def __init__(self, rank: int, kinds: Sequence[str], message: str) -> None:
        super().__init__(f"rank {rank} failed: {message or kinds[0]}")
        self.rank = rank
        self.reason = message
        self.kind = kinds[0]
        self.kinds = tuple(kinds)


class PeerLostError(ConnectionError):
    """The job cannot go on because another rank does not: its process ended, or failed for good.

    Attributes:
        rank: its global rank.
    """

    def __init__(self, rank: int, message: str = "") -> None:
        super().__init__(message or f"rank {rank} has ended, and this rank cannot go on without it")
        self.rank = rank


class _Head(NamedTuple):
    """What stands before the data of a frame."""

    kind: int  # 0: the report that ends an epoch; otherwise a call
    epoch: int
    group: int
    sequence: int
    size: int

    def pack(self) -> bytes:
        return _HEAD.pack(*self)


_HEAD = struct.Struct("!BIIIQ")


class _Peer:
    """The connection to one other rank."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.rank = rank
        self.connection = connection
        self.lost = False
        self.report: tuple[Report] | None = None  # the report that ended this epoch, once it is here
        self._outgoing: deque[memoryview] = deque()
        self._expected: tuple[_Head, memoryview] | None = None
        self._head_bytes = bytearray(_HEAD.size)
        self._head: _Head | None = None
        self._filling = memoryview(self._head_bytes)  # the part that is still to come of head or data
        self._skipping = 0  # bytes of the frame that nobody wants

    def post(self, head: _Head, data: memoryview | bytes) -> None:
        """Queues a frame."""
        self._outgoing.append(memoryview(head.pack()))
        if head.size:
            self._outgoing.append(memoryview(data))

    def expect(self, head: _Head, data: memoryview) -> None:
        """Says which frame comes next, and where its data go."""
        self._expected = (head, data)

    def flush(self) -> bool:
        """Sends what the connection takes; True once nothing is left."""
        try:
            while self._outgoing:
                sent = self.connection.sendmsg(list(self._outgoing)[:2])
                while sent:
                    first = self._outgoing[0]
                    if sent < len(first):
                        self._outgoing[0] = first[sent:]
                        break
                    sent -= len(first)
                    self._outgoing.popleft()
        except BlockingIOError:
            return False
        except OSError:
            # What it had sent before it ended may still tell why, so reading decides.
            self._outgoing.clear()
        return True

    def read(self, epoch: int, ending: bool) -> bool:
        """Reads what is there; True once the frame that is expected is complete, or the report when `ending`.

        Raises:
            PeerError: the report came in place of the frame, and says that the rank failed.
            PeerLostError: the connection is closed.
            ConnectionError: another frame came.
        """
        while True:
            if self.report is not None:
                if ending:
                    return True
                self._raise_report(self.report[0])
            if not self._fill():
                return False
            if self._head is None:
                self._head = _Head(*_HEAD.unpack(self._head_bytes))
                self._choose_target(self._head, epoch, ending)
                if self._skipping or len(self._filling):
                    continue
            if self._finish_frame(epoch):
                return True

    def _fill(self) -> bool:
        """Receives until the part that is awaited is complete; False when nothing more has arrived."""
        try:
            while self._skipping or len(self._filling):
                if self._skipping:
                    count = len(self.connection.recv(min(self._skipping, _DISCARD_BYTES)))
                    self._skipping -= count
                else:
                    count = self.connection.recv_into(self._filling)
                    self._filling = self._filling[count:]
                if not count:
                    raise ConnectionResetError
        except BlockingIOError:
            return False
        except OSError:
            self.lost = True
            raise PeerLostError(self.rank) from None
        return True

    def _choose_target(self, head: _Head, epoch: int, ending: bool) -> None:
        if head.kind == 0 and head.epoch == epoch:
            self._report_bytes = bytearray(head.size)
            self._filling = memoryview(self._report_bytes)
        elif self._expected is not None and head == self._expected[0]:
            self._filling = self._expected[1]
        else:
            self._skipping = head.size
            if head.epoch == epoch and not ending:
                mine = None if self._expected is None else self._expected[0]
                raise ConnectionError(
                    f"rank {self.rank} makes another call: it sent {head.size} bytes in its call {head.sequence} of "
                    f"group {head.group:08x}, expected were {mine.size if mine else 0} bytes in call "
                    f"{mine.sequence if mine else 0} of group {mine.group if mine else 0:08x}"
                )

    def _finish_frame(self, epoch: int) -> bool:
        """Closes the frame that is complete; True if it was the expected one."""
        assert self._head is not None
        head, self._head = self._head, None
        self._filling = memoryview(self._head_bytes)
        if head.kind == 0 and head.epoch == epoch:
            self.report = (json.loads(self._report_bytes),)
            return False
        if self._expected is not None and head == self._expected[0]:
            self._expected = None
            return True
        return False

    def _raise_report(self, report: Report) -> None:
        if report is None:
            raise ConnectionError(f"rank {self.rank} is done, while this rank still expects data of it")
        raise PeerError(report["rank"], report["kinds"], report["message"])

    def forget(self) -> None:
        """Expects no data any more."""
        self._expected = None


class Mesh:
    """This process and its connections to all others of the job.

    Attributes:
        rank: global rank of this process.
        waiting_for: ranks from which it is expecting data right now.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.waiting_for: tuple[int, ...] = ()
        self._epoch = 0
        self._sequences: dict[int, int] = {}
        self._broken: Exception | None = None  # what made the calls of this epoch fail
        self._peers = {other: _Peer(other, connection) for other, connection in connections.items()}

    def exchange(
        self, kind: int, group: int, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]
    ) -> None:
        """Sends arrays to ranks and fills arrays with what ranks send; returns when both are done.

        Every member of a group makes the same calls in the same order. Arrays are contiguous and not empty.

        Args:
            kind: which collective it is, 1 to 255.
            group: a number that all members give their group.
            sends: arrays by global rank.
            receives: arrays by global rank, which are written.

        Raises:
            PeerError: another rank failed.
            PeerLostError: the process of another rank has ended.
            ConnectionError: another rank makes another call.
        """
        if self._broken is not None:
            raise self._broken
        sequence = self._sequences[group] = self._sequences.get(group, 0) + 1
        for other, array in sends.items():
            head = _Head(kind, self._epoch, group, sequence, array.nbytes)
            self._peers[other].post(head, array.reshape(-1).view(np.uint8).data)
        for other, array in receives.items():
            head = _Head(kind, self._epoch, group, sequence, array.nbytes)
            self._peers[other].expect(head, array.reshape(-1).view(np.uint8).data)
        try:
            self._progress([self._peers[other] for other in sends], [self._peers[other] for other in receives])
        except (PeerError, ConnectionError) as error:
            self._broken = error
            raise

    def end_epoch(self, report: Report) -> list[Report]:
        """Tells all ranks whether this one failed and returns what each of them tells, in the order of ranks.

        Every rank of the job calls it, whatever happened before. Calls after it are free of those before.

        Args:
            report: None, or what failed: `rank`, `kinds`, `message`, and what else the caller wants to tell.

        Raises:
            PeerLostError: the process of a rank has ended.
        """
        data = json.dumps(report).encode()
        head = _Head(0, self._epoch, 0, 0, len(data))
        for peer in self._peers.values():
            peer.forget()
            peer.post(head, data)
        lost: PeerLostError | None = None
        remaining = list(self._peers.values())
        while remaining:
            try:
                self._progress(remaining, remaining, ending=True)
                remaining = []
            except PeerLostError as error:
                lost = lost or error
                remaining = [peer for peer in remaining if not peer.lost]
        if lost is not None:
            raise lost
        reports: dict[int, Report] = {self.rank: report}
        for peer in self._peers.values():
            assert peer.report is not None
            reports[peer.rank] = peer.report[0]
            peer.report = None
        self._epoch += 1
        self._broken = None
        self._sequences.clear()
        return [reports[rank] for rank in sorted(reports)]

    def close(self) -> None:
        """Closes all connections."""
        for peer in self._peers.values():
            peer.connection.close()

    def _progress(self, senders: Sequence[_Peer], receivers: Sequence[_Peer], ending: bool = False) -> None:
        """Moves data until the queues of `senders` are empty and what is expected of `receivers` is here."""
        tries = 0
        while True:
            # Reading may raise: then this rank waits for nobody.
            self.waiting_for = ()
            senders = [peer for peer in senders if not peer.flush()]
            receivers = [peer for peer in receivers if not peer.read(self._epoch, ending)]
            if not senders and not receivers:
                return
            self.waiting_for = tuple(peer.rank for peer in receivers or senders)
            if tries < _TRIES_BEFORE_SLEEP:
                # What is awaited is mostly under way: to sleep and be woken takes longer than to look again.
                tries += 1
                os.sched_yield()
                continue
            poll = select.poll()
            for peer in senders:
                poll.register(peer.connection, select.POLLOUT)
            for peer in receivers:
                poll.register(peer.connection, select.POLLIN | (select.POLLOUT if peer in senders else 0))
            poll.poll()


def listen(host: str) -> socket.socket:
    """Returns a socket that waits for connections of other ranks, on a free port of address ``host``."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen(1024)
    return listener


def connect(rank: int, addresses: Sequence[tuple[str, int]], listener: socket.socket, token: bytes) -> Mesh:
    """Connects this rank with all others, each of which calls this too.

    Args:
        rank: global rank of this process.
        addresses: where every rank listens.
        listener: see `listen`; it is closed.
        token: secret of the job; a connection that does not begin with it is dropped.

    Raises:
        ConnectionError: a rank cannot be reached, or did not connect in time.
    """
    connections: dict[int, socket.socket] = {}
    for other in range(rank):
        try:
            connection = socket.create_connection(addresses[other], _CONNECT_SECONDS)
        except OSError as error:
            host, port = addresses[other]
            raise ConnectionError(f"rank {rank} cannot reach rank {other} at {host}:{port}: {error}") from None
        connection.sendall(_HELLO.pack(token, rank))
        connections[other] = connection
    deadline = time.monotonic() + _CONNECT_SECONDS
    with listener:
        while len(connections) < len(addresses) - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [other for other in range(rank + 1, len(addresses)) if other not in connections]
                raise ConnectionError(f"ranks {missing} did not connect to rank {rank}") from None
            caller = _caller(connection, token)
            if caller is None or caller in connections or not rank < caller < len(addresses):
                connection.close()
            else:
                connections[caller] = connection
    return Mesh(rank, connections)


def _caller(connection: socket.socket, token: bytes) -> int | None:
    """Returns the rank that a new connection comes from; None if it does not know the secret."""
    connection.settimeout(_HELLO_SECONDS)
    hello = b""
    try:
        while len(hello) < _HELLO.size:
            piece = connection.recv(_HELLO.size - len(hello))
            if not piece:
                return None
            hello += piece
    except OSError:
        return None
    secret, rank = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(secret, token) else None

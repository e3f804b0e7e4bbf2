"""How an endpoint is reached: where it listens, who dials, and what a connection tells of its peer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.connection_pool import ConnectionPool
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.handshake import Admission, PeerIdentity, listen_tcp
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.errors import ClusterError, MismatchError
from tests.waiting import until

BUFFER = 1 << 16


def test_it_is_at_its_address_alone() -> None:
    with listen_tcp("127.0.0.1", BUFFER) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_address_of_another_machine_covers_all_of_this_one() -> None:
    with listen_tcp("192.0.2.123", BUFFER) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_each_takes_a_port_of_the_range() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = int(probe.getsockname()[1])
    # Of a few ports here others may have some: not all of them are free for sure, and none is given twice.
    ports = range(first, first + 40)
    with ExitStack() as stack:
        taken = [stack.enter_context(listen_tcp("127.0.0.1", BUFFER, ports)).getsockname()[1] for _ in range(20)]
        assert len(set(taken)) == 20
        assert set(taken) <= set(ports)


def test_a_full_range_is_told() -> None:
    with listen_tcp("127.0.0.1", BUFFER) as other:
        port = int(other.getsockname()[1])
        with pytest.raises(ClusterError, match=f"no port from {port} to {port} is free") as caught:
            listen_tcp("127.0.0.1", BUFFER, range(port, port + 1))
    assert "cluster.ports" in (caught.value.help or "")


def test_a_port_is_free_again_once_its_process_is_gone() -> None:
    with listen_tcp("127.0.0.1", BUFFER) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listener.accept()
            # The side that hangs up first keeps the port waiting.
            accepted.close()
    with listen_tcp("127.0.0.1", BUFFER, range(port, port + 1)) as again:
        assert again.getsockname()[1] == port


def test_hang_up_is_known_before_the_last_words_are_read() -> None:
    here, there = socket.socketpair()
    connection = Connection("name", here, PeerIdentity("peer", "me", "name"), lambda: None)
    there.send(b"last words")

    before = connection.hung_up()
    there.close()

    assert (before, connection.hung_up()) == (False, True)
    connection.close()


def test_bytes_that_the_peer_acknowledged_are_not_in_transit() -> None:
    """Also where it does not read them, and has no room for more."""
    listener = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listener.getsockname())
    there, _ = listener.accept()
    listener.close()
    connection = Connection("name", here, PeerIdentity("peer", "me", "name"), lambda: None)
    while connection.try_write(bytes(1 << 20)):
        pass
    until(lambda: not connection.in_transit, "the acknowledgement of what was sent")
    there.close()
    connection.close()
    assert not connection.in_transit


class Side:
    """One endpoint's pool, and the sockets of those that dial it."""

    def __init__(self) -> None:
        info: Any = SimpleNamespace(incarnation="here")
        unused: Any = None
        self.opened: list[Connection] = []
        self.pool = ConnectionPool(info, unused, Settings(), lambda: None, self.opened.append)
        self.sockets: list[socket.socket] = []

    def socket(self) -> socket.socket:
        """Return one end of a new pair."""
        near, far = socket.socketpair()
        self.sockets += [near, far]
        return near

    def admit(self, name: str, replaces: str = "") -> Admission:
        """Have the peer dial; return what it is answered."""
        verdicts: list[Admission] = []
        dialer = PeerIdentity("there", seeks="here", connection=name, replaces=replaces)
        acceptance: Any = SimpleNamespace(dialer=dialer, answer=lambda verdict, _: verdicts.append(verdict))
        self.pool.admit(self.socket(), acceptance)
        return verdicts[0]


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    for sock in made.sockets:
        sock.close()


def test_dial_ends_where_the_peer_got_through(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    dialed = side.socket()

    def reach(*_: object) -> socket.socket:
        assert side.admit("theirs") is Admission.WELCOME
        return dialed

    monkeypatch.setattr(side.pool, "_reach", reach)
    peer: Any = SimpleNamespace(incarnation="there")
    assert side.pool.connect(peer, deadline=float("inf")).name == "theirs"
    assert len(side.opened) == 1
    assert dialed.fileno() == -1, "nothing was sent there"


def test_second_dial_of_a_peer_waits_for_the_answer_to_the_first(side: Side) -> None:
    second: list[Admission] = []

    def answer(verdict: Admission, _: object) -> None:
        second.append(side.admit("second"))

    dialer = PeerIdentity("there", seeks="here", connection="first")
    acceptance: Any = SimpleNamespace(dialer=dialer, answer=answer)
    side.pool.admit(side.socket(), acceptance)
    assert second == [Admission.DUPLICATE]
    assert [connection.name for connection in side.opened] == ["first"]


def test_connection_comes_after_those_that_it_replaces(side: Side) -> None:
    side.admit("first")
    assert side.admit("second") is Admission.DUPLICATE
    assert side.admit("second", replaces="first") is Admission.WELCOME
    first, second = side.opened
    assert (first.replaced, second.former, side.pool.get("there")) == (True, (first,), second)


def test_connection_is_made_again_where_its_answer_was_lost(side: Side) -> None:
    def answer(*_: object) -> None:
        raise BrokenPipeError

    acceptance: Any = SimpleNamespace(dialer=PeerIdentity("there", seeks="here", connection="first"), answer=answer)
    with pytest.raises(BrokenPipeError):
        side.pool.admit(side.socket(), acceptance)
    assert side.admit("second") is Admission.WELCOME


HERE, THERE = WorkerAddress("here", 0), WorkerAddress("there", 0)


class SlowEndpoint:
    """An endpoint whose peer refuses each message before its send has ended."""

    waits: Any = None

    def __init__(self) -> None:
        self.made = PeerStream(str(HERE), str(THERE))

    def stream(self, *_: object) -> PeerStream:
        return self.made

    def seconds(self, timeout: float | None) -> float:
        return timeout or 5.0

    def send(self, stream: PeerStream, message: Any, work: Any) -> None:
        stream.unacknowledged[1] = message.acknowledgement, None
        stream.queue(lambda: stream.acknowledged(1, MismatchError("uint8[5]", "uint8[3]")), work)
        work.wait()


def test_refusal_before_a_send_ends_is_reported_once() -> None:
    endpoint: Any = SlowEndpoint()
    group = CollectiveGroup(endpoint, HERE, [THERE], endpoint)
    group.send_tensor(np.zeros(5, np.uint8), THERE)  # type: ignore[arg-type] - arrays go where tensors do
    assert len(endpoint.made.take_mismatches()) == 1
    assert endpoint.made.unacknowledged == {}

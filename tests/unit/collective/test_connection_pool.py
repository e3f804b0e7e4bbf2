"""A pair of endpoints has one connection at a time, whichever side dials."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.connection_pool import ConnectionPool
from rlinf_core.collective.connections.handshake import Admission, PeerIdentity
from rlinf_core.collective.endpoint_info import Settings


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

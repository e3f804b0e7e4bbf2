"""What a connection knows of its other end."""

from __future__ import annotations

import socket

from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.handshake import PeerIdentity
from tests.waiting import until


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

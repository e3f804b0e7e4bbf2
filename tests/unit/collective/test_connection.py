"""What a connection knows of its other end."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.handshake import PeerIdentity


def test_hang_up_is_known_before_the_last_words_are_read() -> None:
    here, there = socket.socketpair()
    watcher: Any = SimpleNamespace(arrived=print, place=print, spin=0.0)
    connection = Connection("name", here, PeerIdentity("peer", "me", "name"), watcher)
    there.send(b"last words")

    before = connection.hung_up()
    there.close()

    assert (before, connection.hung_up()) == (False, True)
    connection.close()

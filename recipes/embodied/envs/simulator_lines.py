"""Messages between an env worker and a simulator process: lines of JSON over a socket pair that only these two have."""

from __future__ import annotations

import json
import select
import socket
from typing import Any


class Lines:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = b""
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
        """
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next message; None where none has come in so many seconds.

        Raises:
            EOFError: the other end is closed.
        """
        while b"\n" not in self._received:
            if seconds is not None and not self._poll.poll(seconds * 1000):
                return None
            try:
                part = self._socket.recv(1 << 16)
            except ConnectionError:
                part = b""
            if not part:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

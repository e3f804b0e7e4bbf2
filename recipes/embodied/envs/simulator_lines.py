"""Messages between an env worker and a simulator process: lines of JSON over a socket pair that only these two have.

A step of fast simulators takes less time than JSON does. Most messages are equal to the one before, so each end keeps
the last one of either direction, as text and as an object: do not change an object that was sent or received.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final

# Messages are short; those that are not come in several pieces.
_PIECE_BYTES: Final = 1 << 12


class Lines:
    """One end of the pair.

    Args:
        end: of the pair.
        seconds: how long `receive` waits for a message; None: until there is one.
    """

    def __init__(self, end: socket.socket, seconds: float | None = None) -> None:
        self._socket = end
        self._received = b""
        self._sent: tuple[Any, bytes] = (None, b"null\n")
        self._last: tuple[bytes, Any] = (b"null", None)
        if seconds is not None:
            # The kernel keeps the time: one call for each message instead of two.
            microseconds = max(1, round(seconds * 1e6))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(microseconds, 10**6)))

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
        """
        if message is not self._sent[0]:
            self._sent = message, json.dumps(message).encode() + b"\n"
        self._socket.sendall(self._sent[1])

    def receive(self) -> Any:
        """Return the next message; None where none has come in time.

        Raises:
            EOFError: the other end is closed.
        """
        while b"\n" not in self._received:
            try:
                part = self._socket.recv(_PIECE_BYTES)
            except BlockingIOError:
                return None
            except ConnectionError:
                part = b""
            if not part:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        if line != self._last[0]:
            self._last = line, json.loads(line)
        return self._last[1]

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

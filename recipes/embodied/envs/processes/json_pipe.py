"""Messages between an env worker and a simulator process: lines of JSON over a private pair of pipes.

A step of fast simulators takes less time than JSON does. Most messages are equal to the one before, so each end keeps
the last one of either direction, as text and as an object: do not change an object that was sent or received.
"""

from __future__ import annotations

import json
import select
from io import FileIO
from typing import Any, Final

# Messages are short; those that are not come in several pieces.
_PIECE_BYTES: Final = 1 << 12


class JsonPipe:
    """One end of the connection.

    Args:
        reading: descriptor of the pipe that messages come from.
        writing: descriptor of the other one. Pipes cost a step less than sockets do.
        seconds: how long `receive` waits for a message; None: until there is one.
    """

    def __init__(self, reading: int, writing: int, seconds: float | None = None) -> None:
        self._reading, self._writing = FileIO(reading), FileIO(writing, "w")
        self._received = b""
        self._sent: tuple[Any, bytes] = (None, b"null\n")
        self._last: tuple[bytes, Any] = (b"null", None)
        self._poll = select.poll()
        self._poll.register(reading, select.POLLIN)
        self._milliseconds = None if seconds is None else max(1, round(seconds * 1000))

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
        """
        if message is not self._sent[0]:
            self._sent = message, json.dumps(message).encode() + b"\n"
        left = self._sent[1]
        while left:
            left = left[self._writing.write(left) :]

    def receive(self) -> Any:
        """Return the next message; None if none arrives in time.

        Raises:
            EOFError: the other end is closed.
        """
        while b"\n" not in self._received:
            if self._milliseconds is not None and not self._poll.poll(self._milliseconds):
                return None
            part = self._reading.read(_PIECE_BYTES)
            if not part:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        if line != self._last[0]:
            self._last = line, json.loads(line)
        return self._last[1]

    def close(self) -> None:
        """Close this end."""
        self._reading.close()
        self._writing.close()

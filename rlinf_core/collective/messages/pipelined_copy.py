"""Pipelined copies: on one host, the receiver of a large tensor copies its beginning while the sender copies the rest.

Two copies, one after the other, are half as fast as one; two at a time, on two cores, nearly as fast. That serves
`recv_tensor` alone: the owner of a view needs all of it. A frame goes ahead of the bytes, and a few words follow
each piece of them, so that waiting, deadlines and deaths are those of any message.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator

from rlinf_core.collective.messages.frame import Flag, Frame, FrameKind
from rlinf_core.collective.messages.message import Message
from rlinf_core.collective.messages.payload import PartKind, copy_bytes
from rlinf_core.collective.work import Poller, WaitTable, Work
from rlinf_core.waiting import OperationKind

_FILLED = struct.Struct("<Q")
_GIVEN_UP = (1 << 64) - 1


def growing_source(message: Message, piece: int) -> memoryview | None:
    """Return the bytes of a message that is worth pipelining; None for any other."""
    if not message.flags & Flag.TENSOR or message.tag:
        return None
    (part,) = message.parts
    if part.kind != PartKind.HOST or part.nbytes < 2 * piece:
        return None
    return part.view()


def fill_by_pieces(target: memoryview, source: memoryview, piece: int) -> Iterator[int]:
    """Copy piece by piece; yield how many bytes are there after each."""
    size = source.nbytes
    for start in range(0, size, piece):
        end = min(size, start + piece)
        copy_bytes(target[start:end], source[start:end])
        yield end


def grown_frame(route: int, sequence: int, filled: int | None) -> Frame:
    """Return the frame with the number of bytes available so far; None for the end."""
    head = _FILLED.pack(_GIVEN_UP if filled is None else filled)
    return Frame(FrameKind.GROWN, route=route, sequence=sequence, head=head)


def read_grown(frame: Frame) -> int | None:
    (filled,) = _FILLED.unpack(frame.head)
    return None if filled == _GIVEN_UP else filled


class Growth:
    """The progress of a body that its sender still writes. One thread reports it, and at most one waits.

    Args:
        size: the size of the whole body, in bytes.
        driver: how a waiting thread receives.
        seconds: the longest wait where no receive sets a timeout.
    """

    def __init__(self, size: int, peer: str, driver: Poller, waits: WaitTable, seconds: float) -> None:
        self._size = size
        self._peer = peer
        self._driver = driver
        self._waits = waits
        self._lock = threading.Lock()
        self._filled = 0
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._waiting: Work[object] | None = None
        self._seconds, self._since = seconds, time.monotonic()

    @property
    def complete(self) -> bool:
        return self._filled >= self._size

    @property
    def error(self) -> Exception | None:
        """Why the rest will never be there, or None."""
        return self._error

    def expect(self, seconds: float, since: float) -> None:
        """Set the time limit of the receive that takes it: `seconds` from `since` on."""
        self._seconds, self._since = seconds, since

    def grown(self, filled: int) -> None:
        self._notify(filled, None)

    def fail(self, error: Exception) -> None:
        self._notify(self._filled, error)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call `callback` once all is there or never will be, in the thread that hears of it: it must not block."""
        with self._lock:
            if not self.complete and self._error is None:
                self._callbacks.append(callback)
                return
        callback()

    def wait_beyond(self, filled: int) -> int:
        """Return how many bytes are there, once there are more than `filled`.

        Raises:
            CommunicationTimeoutError: no report arrived in time.
            Exception: why none will come.
        """
        while True:
            with self._lock:
                if self._filled > filled:
                    return self._filled
                if self._error is not None:
                    raise self._error
                work: Work[object] = Work(OperationKind.RECV_TENSOR, self._peer, self._seconds, self._waits)
                work.since = self._since
                work.poller = self._driver
                self._waiting = work
            work.wait()

    def _notify(self, filled: int, error: Exception | None) -> None:
        with self._lock:
            self._filled, self._error = filled, error
            waiting, self._waiting = self._waiting, None
            callbacks: list[Callable[[], object]] = []
            if self.complete or error is not None:
                callbacks, self._callbacks = self._callbacks, []
        if waiting is not None:
            waiting.finish(None)
        for callback in callbacks:
            callback()

"""From the bytes of a connection to frames. It never blocks: it reads what is there and remembers where it was."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Callable

from rlinf_core.collective.frame import HEADER, Flag, Frame, unpack

_BUFFER = 64 << 10
_FDS_PER_MESSAGE = 2
_ANCILLARY = socket.CMSG_SPACE(_FDS_PER_MESSAGE * array.array("i").itemsize) * 4
# What one call reads of a body at most, so that one large message does not keep a thread from all others.
_BODY_TURN = 16 << 20


class FrameReader:
    """Reads frames from a non-blocking stream socket.

    `place(frame)` answers where the body of a frame shall be read to, or None: not now. Then reading stands still
    `pump` is called again.

    Attributes:
        stalled: the frame whose body waits for a place, or None.
        drained: whether the last read took all that there was.
    """

    def __init__(self, sock: socket.socket, place: Callable[[Frame], memoryview | None]) -> None:
        self._sock = sock
        self._takes_fds = sock.family == socket.AF_UNIX
        self._place = place
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self.stalled: Frame | None = None
        self._frame: Frame | None = None
        self._body = memoryview(b"")
        self._filled = 0
        self._fds: deque[int] = deque()
        self.drained = False

    def pump(self, deliver: Callable[[Frame, memoryview | None], None]) -> bool:
        """Read once and delivers every frame that is complete by then; tell whether anything was there.

        Raises:
            EOFError: the other side closed the connection.
            OSError: the connection broke.
            FrameError: what came is no frame.
        """
        if self.stalled is not None:
            return self._resume(deliver)
        if self._frame is not None:
            return self._pump_body(deliver)
        try:
            count = self._receive()
        except BlockingIOError:
            return False
        if not count:
            raise EOFError
        self.drained = count < len(self._buffer) - self._end
        self._end += count
        self._parse(deliver)
        return True

    @property
    def midway(self) -> bool:
        """Whether a part of a large message has come, and the rest has not."""
        return self._frame is not None

    def take_fd(self) -> int:
        """Return the next file descriptor that came with the frames.

        Raises:
            EOFError: none came, though a frame announced it.
        """
        if not self._fds:
            raise EOFError("a file descriptor that a frame announces did not arrive")
        return self._fds.popleft()

    def close(self) -> None:
        """Close descriptors that nobody took."""
        while self._fds:
            os.close(self._fds.popleft())
        self._body = memoryview(b"")
        self._frame = self.stalled = None

    def _receive(self) -> int:
        if not self._takes_fds:
            return self._sock.recv_into(self._view[self._end :])
        count, ancillary, _, _ = self._sock.recvmsg_into([self._view[self._end :]], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        return count

    def _parse(self, deliver: Callable[[Frame, memoryview | None], None]) -> None:
        while self._frame is None and self.stalled is None:
            available = self._end - self._start
            if available < HEADER.size:
                break
            frame, size = unpack(self._view, self._start, available)
            if frame is None:
                self._make_room(size)
                return
            self._start += size
            if frame.flags & Flag.SHARED or not frame.body_size:
                deliver(frame, None)
            else:
                self._begin_body(frame, deliver)
        self._make_room(HEADER.size)

    def _begin_body(self, frame: Frame, deliver: Callable[[Frame, memoryview | None], None]) -> None:
        body = self._place(frame)
        if body is None:
            self.stalled = frame
            return
        count = min(frame.body_size, self._end - self._start)
        body[:count] = self._view[self._start : self._start + count]
        self._start += count
        if count == frame.body_size:
            deliver(frame, body)
        else:
            self._frame, self._body, self._filled = frame, body, count

    def _resume(self, deliver: Callable[[Frame, memoryview | None], None]) -> bool:
        frame, self.stalled = self.stalled, None
        if frame is not None:
            self._begin_body(frame, deliver)
        if self.stalled is not None:
            return False
        self._parse(deliver)
        return True

    def _pump_body(self, deliver: Callable[[Frame, memoryview | None], None]) -> bool:
        frame, body, filled = self._frame, self._body, self._filled
        if frame is None:
            return False
        turn = min(frame.body_size, filled + _BODY_TURN)
        before = filled
        while filled < turn:
            try:
                # A unix socket may carry a body too, never together with descriptors.
                count = self._sock.recv_into(body[filled : frame.body_size])
            except BlockingIOError:
                break
            if not count:
                raise EOFError
            filled += count
        self._filled = filled
        self.drained = filled < turn
        if filled == frame.body_size:
            self._frame, self._body = None, memoryview(b"")
            deliver(frame, body)
        return filled > before

    def _make_room(self, need: int) -> None:
        """Room for a prefix of `need` bytes from the current start."""
        start, rest = self._start, self._end - self._start
        if not rest:
            self._start = self._end = 0
            if need <= len(self._buffer):
                return
        elif start + need <= len(self._buffer) and len(self._buffer) - self._end >= _BUFFER // 4:
            return
        kept = bytes(self._view[start : start + rest])
        if need > len(self._buffer):
            self._view.release()
            self._buffer = bytearray(need + _BUFFER)
            self._view = memoryview(self._buffer)
        self._view[:rest] = kept
        self._start, self._end = 0, rest

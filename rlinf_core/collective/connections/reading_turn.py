"""The turn to read a connection: its thread has it, or a caller that waits for a message of it.

A thread that reads for a waiting caller costs two wake-ups for each message. So while messages follow each other
closely, the waiting caller reads for itself, and the thread stands by. The thread goes on once another caller waits as
well, a frame may have to wait for something, the connection ends, or no message follows closely.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from rlinf_core.collective.messages.frame import FrameReader
from rlinf_core.collective.work import Work
from rlinf_core.errors import RuntimeFailure
from rlinf_core.waiting import spin

# The seconds between messages that follow each other closely, and for which the thread stands by after the last read.
_CLOSELY: Final = 1e-3
# The most seconds for which a caller that reads waits for a message, and so notices late that it was cancelled.
_LONGEST: Final = 10e-3


class ReadingTurn:
    """The turn to read one connection; its thread has it at first.

    Args:
        spin_seconds: how long a caller polls for the next message before it sleeps.

    Attributes:
        read_some: reads what has arrived, without waiting; returns False if the connection's thread must go on.
        led: whether a caller is in `read_some`.
    """

    def __init__(self, reader: FrameReader, spin_seconds: float) -> None:
        self.read_some: Callable[[], bool] = lambda: False
        self.led = False
        self._reader = reader
        self._spin_seconds = spin_seconds
        self._turn = threading.Lock()
        self._turn.acquire()
        # How often a caller took the turn.
        self._taken = 0
        # The operations of the callers that sleep while another thread reads, and since when.
        self._sleeping: list[tuple[Work[object], float]] = []
        # Whether the thread must go on; until it does, no caller takes the turn.
        self._needed = False
        self._failure: Exception | None = None
        self._wake = threading.Event()

    # The connection's thread

    def stand_by(self) -> None:
        """Let callers read, if messages follow each other closely; return once the thread must go on.

        Raises:
            Exception: the error at which a caller's reading ended.
        """
        if not self._sleeping or not self._all_served():
            return
        self._turn.release()
        read = True
        while read and not self._needed and self._all_served():
            taken = self._taken
            self._wake.wait(_CLOSELY)
            self._wake.clear()
            read = taken != self._taken or self._turn.locked()
        self._turn.acquire()
        self._needed = False
        if self._failure is not None:
            raise self._failure

    # Callers

    def wait(self, work: Work[object], deadline: float, sleep: Callable[[], bool]) -> bool:
        """Read until `work` is settled or the deadline passes, or `sleep` while another thread reads.

        Return whether it is settled, as `sleep` does.
        """
        if not self._take():
            entry = work, time.monotonic()
            self._sleeping.append(entry)
            try:
                # Again, since the thread that had the turn may not have seen the entry.
                if not self._take():
                    return sleep()
            finally:
                self._sleeping.remove(entry)
        try:
            self._read_until(work, deadline)
        finally:
            self._turn.release()
            if self._failure is not None or not self._all_served():
                self._needed = True
            if self._needed:
                self._wake.set()
        return sleep()

    def _take(self) -> bool:
        if not self._turn.acquire(blocking=False):
            return False
        if self._needed or self._failure is not None:
            self._turn.release()
            return False
        self._taken += 1
        return True

    def _all_served(self) -> bool:
        """Return whether the operations of all callers that sleep are settled, and were soon."""
        now = time.monotonic()
        return all(work.settled and now - since < _CLOSELY for work, since in self._sleeping.copy())

    def _read_until(self, work: Work[object], deadline: float) -> None:
        while not (work.settled or self._needed) and (remaining := deadline - time.monotonic()) > 0:
            spun = spin(partial(self._reader.await_bytes, 0.0), self._spin_seconds)
            if spun or self._reader.await_bytes(min(remaining, _LONGEST)):
                self._read_once()
            elif remaining > _LONGEST:
                self._needed = True

    def _read_once(self) -> None:
        # Kept if this thread is interrupted, for example by a signal: then part of a message may be lost.
        self._failure = RuntimeFailure("the thread that read it was interrupted")
        self.led = True
        try:
            self._needed = not self.read_some()
            self._failure = None
        except Exception as error:  # noqa: BLE001 - the connection's thread raises it
            self._failure, self._needed = error, True
        finally:
            self.led = False

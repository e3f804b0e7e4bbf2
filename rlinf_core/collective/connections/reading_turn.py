"""The turn to read a connection: its thread has it, or a caller that waits for a message of it.

A thread that reads for a waiting caller costs two wake-ups for each message. So while messages follow each other
closely, the waiting caller reads for itself, and the thread stands by. The thread goes on once another caller waits as
well, a frame may have to wait for something, the connection ends, or nobody has read for a millisecond.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from rlinf_core.collective.work import Work
from rlinf_core.errors import RuntimeFailure
from rlinf_core.waiting import spin

# The seconds between messages that follow each other closely, and for which the thread stands by after the last read.
_CLOSELY = 1e-3


class ReadingTurn:
    """The turn to read one connection; its thread has it at first.

    Args:
        spin_seconds: how long a caller polls for the next message before it sleeps.

    Attributes:
        read_some: reads what has arrived, without waiting; returns False if the connection's thread must go on.
        led: whether a caller is in `read_some`.
    """

    def __init__(self, sock: socket.socket, spin_seconds: float) -> None:
        self.read_some: Callable[[], bool] = lambda: False
        self.led = False
        self._sock = sock
        self._spin_seconds = spin_seconds
        self._turn = threading.Lock()
        self._turn.acquire()
        self._reads_for: Work[object] | None = None
        # How often a caller took the turn.
        self._taken = 0
        # The operations of the callers that sleep while another thread reads, and since when.
        self._sleeping: list[tuple[Work[object], float]] = []
        # Whether the thread must go on; until it does, no caller takes the turn.
        self._needed = False
        self._failure: Exception | None = None
        self._resting = False
        self._wake = threading.Event()
        self._poller = select.poll()
        # Ends the poll of the caller that reads; made for the first one.
        self._kick: int | None = None
        self._kick_lock = threading.Lock()

    # The connection's thread

    def stand_by(self) -> None:
        """Let callers read, if messages follow each other closely; return once the thread must go on.

        Raises:
            Exception: the error at which a caller's reading ended.
        """
        if not self._sleeping or not self._all_served():
            return
        self._turn.release()
        while not self._needed and self._all_served():
            taken = self._taken
            self._wake.wait(_CLOSELY)
            self._wake.clear()
            if taken == self._taken and not self._needed:
                if not self._turn.locked():
                    break
                self._rest()
        self._turn.acquire()
        self._needed = False
        if self._failure is not None:
            raise self._failure

    def _rest(self) -> None:
        """Sleep until the caller that reads leaves."""
        self._resting = True
        # Checked again, since a caller that has left before does not wake this thread.
        if self._turn.locked():
            self._wake.wait()
        self._resting = False
        self._wake.clear()

    def close(self) -> None:
        """Free the descriptor; called by the connection's thread, which keeps the turn."""
        with self._kick_lock:
            if self._kick is not None:
                os.close(self._kick)
                self._kick = None

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
            if self._needed or self._resting:
                self._wake.set()
        return sleep()

    def settled(self, work: Work[object]) -> None:
        """End the wait of the caller that reads for `work`, now that it is settled."""
        # In `read_some` it looks for itself.
        if work is self._reads_for and not self.led:
            with self._kick_lock:
                if self._kick is not None:
                    os.eventfd_write(self._kick, 1)

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
        if self._kick is None:
            self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poller.register(self._sock, select.POLLIN)
            self._poller.register(self._kick, select.POLLIN)
        self._reads_for = work
        try:
            while not work.settled and (remaining := deadline - time.monotonic()) > 0:
                spin(partial(self._poller.poll, 0), self._spin_seconds)
                # A very long timeout overflows the platform's clock.
                for fd, _ in self._poller.poll(min(remaining, 1e6) * 1000):
                    if fd == self._kick:
                        os.eventfd_read(self._kick)
                    elif not self._read_once():
                        return
        finally:
            self._reads_for = None

    def _read_once(self) -> bool:
        # Kept if this thread is interrupted, for example by a signal: then part of a message may be lost.
        self._failure = RuntimeFailure("the thread that read it was interrupted")
        self.led = True
        try:
            goes_on = self.read_some()
        except Exception as error:  # noqa: BLE001 - the connection's thread raises it
            self._failure = error
            return False
        finally:
            self.led = False
        self._failure = None
        if not goes_on:
            self._needed = True
        return goes_on

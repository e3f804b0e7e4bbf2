"""The message stream between one local and one remote address; each of its two directions has its own order.

Incoming messages and posted receives are matched in the order in which each was issued. Outgoing messages leave in the
order of issue. The calling thread sends them if it may block, else a thread of the stream, which lives while there
are messages to send.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Any

from rlinf_core.collective.connection import Connection
from rlinf_core.collective.endpoint_info import Resolver
from rlinf_core.collective.transfer.received_messages import PostedReceive, ReceivedMessage, fits
from rlinf_core.collective.work import Work
from rlinf_core.errors import MismatchError

_DRAIN_SLICE = 0.005
# The most unraised mismatches kept for each stream. Each is logged as well.
_MISMATCHES_KEPT = 64
RELAUNCHED = "it was relaunched"


class StaleMessageError(Exception):
    """An error for a message from a peer's predecessor, which may no longer be received."""


class PeerStream:
    """The stream of messages between two addresses, in both directions.

    Its inbox matches the messages of the peer with posted receives; its outbox sends messages in the order of issue.

    Attributes:
        connection: the connection that it sends through; None before the first.
        ended: the connection whose loss was last reported to the callbacks.
        routed: the connection whose peer knows `route`.
        sequence: the number of messages sent.
        unacknowledged: the operations whose messages no receive has taken yet, by sequence, each with the connection
            of its message: None within this process.
        incarnation: the incarnation of the peer's endpoint; None if unknown.
        former: the incarnations of the peer's predecessors, whose messages may still arrive.
        binding: the lock held while `connection`, `incarnation` and `former` change and the callbacks are called.
        resolver: finds the peer's endpoint; None if the peer connected to this process.
        busy: whether the stream's own thread runs.
    """

    def __init__(self, me: str, peer: str) -> None:
        self.me = me
        self.peer = peer
        self.connection: Connection | None = None
        self.ended: Connection | None = None
        self.routed: Connection | None = None
        self.route = 0
        self.sequence = 0
        self.unacknowledged: dict[int, tuple[Work[Any], Connection | None]] = {}
        self.incarnation: str | None = None
        self.former: set[str] = set()
        self.binding = threading.RLock()
        self.resolver: Resolver | None = None
        self._inbox_lock = threading.Lock()
        self._arrived: deque[ReceivedMessage] = deque()
        self._posted: deque[PostedReceive] = deque()
        # The receives whose bodies are being read straight into their buffers.
        self._claimed: list[PostedReceive] = []
        self._order = threading.Lock()
        self._jobs_lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], object], Work[object]]] = deque()
        self.busy = False
        self._mismatches: deque[MismatchError] = deque(maxlen=_MISMATCHES_KEPT)
        # Mismatches of messages up to this sequence number are ignored.
        self._disregarded = 0

    def is_awaited_through(self, connection: Connection, waiting: Container[Work[object]]) -> bool:
        """Return whether a receive, or one of the `waiting` sends, needs messages that come through a connection."""
        if self.incarnation != connection.peer.incarnation:
            return False
        return bool(self.posted()) or any(work in waiting for work in self.unacknowledged_works())

    def open_works(self) -> list[Work[object]]:
        """Return the open operations, which fail if the peer dies."""
        waiting: list[Work[object]] = list(self.posted())
        waiting.extend(posted for posted in list(self._claimed) if not posted.given_up)
        waiting.extend(self.unacknowledged_works())
        waiting.extend(self.queued())
        return waiting

    # The inbox

    def deliver(self, received: ReceivedMessage) -> PostedReceive | None:
        """Return the receive that waits for this message; if there is none, keep the message and return None.

        Raises:
            StaleMessageError: the message is from a predecessor of the peer.
        """
        with self._inbox_lock:
            # Checked under the lock: if a successor connects later, it clears the inbox.
            if received.connection is not None and received.connection.peer.incarnation in self.former:
                raise StaleMessageError
            self._drop_settled()
            if self._posted:
                return self._posted.popleft()
            self._arrived.append(received)
            return None

    def post(self, posted: PostedReceive) -> ReceivedMessage | None:
        """Return the message that has arrived for this receive; if there is none, keep the receive and return None."""
        with self._inbox_lock:
            if self._arrived:
                return self._arrived.popleft()
            # A caller that polls with short deadlines leaves many expired receives: keep only the last.
            self._drop_settled()
            self._posted.append(posted)
            return None

    def claim(self, size: int, dtype_and_shape: str, incarnation: str) -> PostedReceive | None:
        """Take the next receive if the body can be read straight into its buffer; `let_go` or `put_back` must follow.

        Args:
            incarnation: the endpoint that sends the body.
        """
        with self._inbox_lock:
            if self._arrived or incarnation in self.former:
                return None
            self._drop_settled()
            while self._posted:
                target = self._posted[0].buffer
                if target is None or not fits(target.dtype, target.nbytes, dtype_and_shape, size):
                    return None
                memory = target.view()
                if memory is None:
                    return None
                posted = self._posted.popleft()
                if posted.claim(memory):
                    self._claimed.append(posted)
                    return posted
            return None

    def let_go(self, posted: PostedReceive) -> memoryview | None:
        """Forget a claimed receive whose body is complete; return the body if the receive was given up, else None."""
        with self._inbox_lock:
            self._claimed.remove(posted)
            return posted.let_go()

    def put_back(self, posted: PostedReceive) -> ReceivedMessage | None:
        """Release a claimed receive whose body broke off: unless it was given up, it waits again, ahead of all others.

        Return the message that it takes instead, if one has arrived.
        """
        with self._inbox_lock:
            self._claimed.remove(posted)
            posted.let_go()
            if posted.given_up:
                return None
            if self._arrived:
                return self._arrived.popleft()
            self._posted.appendleft(posted)
            return None

    def clear_inbox(self) -> list[ReceivedMessage]:
        """Remove and return the unread messages, which a predecessor of the peer sent."""
        with self._inbox_lock:
            stale = list(self._arrived)
            self._arrived.clear()
            return stale

    def posted(self) -> list[PostedReceive]:
        """Return the receives that wait for a message."""
        with self._inbox_lock:
            return [posted for posted in self._posted if not posted.settled]

    def unread(self) -> int:
        """Return the number of messages that wait for a receive."""
        return len(self._arrived)

    def _drop_settled(self) -> None:
        while self._posted and self._posted[0].settled:
            self._posted.popleft()

    # The outbox

    def run(self, job: Callable[[], object], work: Work[object]) -> None:
        """Run `job` in its turn and return when it is done; raises the error of `job`."""
        if not self.busy and self._order.acquire(blocking=False):
            try:
                if not self._jobs:
                    job()
                    return
            finally:
                self._order.release()
        self.queue(job, work)
        work.wait()

    def run_at_once(self, job: Callable[[], bool]) -> bool:
        """Run `job` if it is its turn now; return whether it ran and returned True, that is, did not have to wait."""
        if self.busy or not self._order.acquire(blocking=False):
            return False
        try:
            return not self._jobs and job()
        finally:
            self._order.release()

    def start(self, at_once: Callable[[], bool], later: Callable[[], object], work: Work[object]) -> None:
        """Run `at_once` with `run_at_once`, or queue `later` if it was not done; settle `work` with the outcome."""
        try:
            done = self.run_at_once(at_once)
        except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
            work.fail(error)
            return
        if done:
            work.finish(None)
        else:
            self.queue(later, work)

    def queue(self, job: Callable[[], object], work: Work[object]) -> None:
        """Run `job` in its turn in the stream's own thread, and settle `work` with its outcome."""
        with self._jobs_lock:
            self._jobs.append((job, work))
            if self.busy:
                return
            self.busy = True
        threading.Thread(target=self._work_off, name=f"rlinf-send-{self.peer}", daemon=True).start()

    def queued(self) -> list[Work[object]]:
        with self._jobs_lock:
            return [work for _, work in self._jobs]

    def drain(self, seconds: float) -> bool:
        """Wait until the queued jobs are done, at most `seconds`; return whether they are."""
        deadline = time.monotonic() + seconds
        while self.busy and time.monotonic() < deadline:
            time.sleep(_DRAIN_SLICE)
        return not self.busy

    def unacknowledged_works(self) -> list[Work[Any]]:
        return [work for work, _ in self.unacknowledged.copy().values()]

    def take_unacknowledged(self, is_over: Callable[[Connection], bool]) -> list[Work[object]]:
        """Remove and return the operations whose messages went through a connection for which `is_over` is true."""
        works: list[Work[object]] = []
        for sequence, (work, connection) in self.unacknowledged.copy().items():
            over = connection is not None and is_over(connection)
            if over and self.unacknowledged.pop(sequence, None) is not None:
                works.append(work)
        return works

    def acknowledged(self, sequence: int, error: MismatchError | None) -> None:
        """Record the peer's reply to a message: that a receive took it, or why it did not fit.

        A mismatch fails the operation that sent the message. If that operation has returned, the mismatch is kept for
        `take_mismatches`: a later, valid operation must not fail in its place.
        """
        work, _ = self.unacknowledged.get(sequence, (None, None))
        if error is None:
            if work is not None:
                work.finish(None)
        elif work is None or work.serial is None or not work.fail(error):
            if sequence > self._disregarded:
                self._mismatches.append(error)
            if work is not None:
                work.fail(error)
        # Last: once nothing is unacknowledged, every mismatch has been recorded.
        self.unacknowledged.pop(sequence, None)

    def take_mismatches(self) -> list[MismatchError]:
        """Return and forget the mismatches that the peer reported and that no operation raised, oldest first."""
        # One by one: the reading thread may add another meanwhile.
        return [self._mismatches.popleft() for _ in range(len(self._mismatches))]

    def disregard_mismatches(self) -> None:
        """Forget the mismatches of all messages sent so far, including those that the peer reports later."""
        self._disregarded = self.sequence
        self._mismatches.clear()

    def _work_off(self) -> None:
        while True:
            with self._order:
                with self._jobs_lock:
                    if not self._jobs:
                        self.busy = False
                        return
                    job, work = self._jobs[0]
                error: BaseException | None = work.exception() if work.settled else None
                if error is None:
                    try:
                        job()
                    except Exception as raised:  # noqa: BLE001 - it is the outcome of the operation
                        error = raised
                with self._jobs_lock:
                    self._jobs.popleft()
            if error is not None:
                work.fail(error)
            else:
                work.finish(None)

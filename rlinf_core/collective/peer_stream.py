"""The two directions between one local address and one remote address, each ordered by itself.

Incoming messages and posted receives are matched in the order in which each was issued. Outgoing messages leave in the
order of issue, sent by the calling thread where it may block, else by a thread of the stream that lives while there
is something to send.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from rlinf_core.collective.frame import Flag, Frame
from rlinf_core.collective.posted_receive import PostedReceive
from rlinf_core.collective.received_message import ReceivedMessage
from rlinf_core.collective.work import Work
from rlinf_core.errors import MismatchError

if TYPE_CHECKING:
    from rlinf_core.collective.connection import Connection
    from rlinf_core.collective.resolver import Resolver

_DRAIN_SLICE = 0.005
# Unraised mismatches kept for each peer. Each is logged as well.
_MISMATCHES_KEPT = 64
AnyReceive = PostedReceive[object]


class MessageSource(ABC):
    """The origin of a received message, which is told what became of it."""

    @abstractmethod
    def acknowledge(self, frame: Frame, mismatch: MismatchError | None) -> None:
        """Take note of the receive that it met, and whether it fitted. Must not block."""

    def queued(self, received: ReceivedMessage) -> None:  # noqa: B027 - most need not know
        """Take note that it waits for a receive."""

    def taken(self, received: ReceivedMessage) -> None:  # noqa: B027 - most need not know
        """Take note that it does not wait for a receive any more."""


class ReceiveQueue:
    """Messages from one peer, and the receives that wait for them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._arrived: deque[tuple[ReceivedMessage, MessageSource]] = deque()
        self._pending: deque[AnyReceive] = deque()

    def deliver(self, received: ReceivedMessage, origin: MessageSource) -> bool:
        """Return a message is here; tells whether somebody waited for it."""
        with self._lock:
            posted = self._next_posted()
            if posted is None:
                self._arrived.append((received, origin))
                origin.queued(received)
                return False
        self._match(posted, received, origin)
        return True

    def post(self, posted: AnyReceive) -> bool:
        """Return a receive was issued; tells whether it met a message."""
        with self._lock:
            if not self._arrived:
                self._pending.append(posted)
                return False
            received, origin = self._arrived.popleft()
        origin.taken(received)
        self._match(posted, received, origin)
        return True

    def claim(self, size: int, dtype_and_shape: str) -> AnyReceive | None:
        """Take the next receive out of the queue when it wants just these bytes in memory that lies in one piece."""
        with self._lock:
            while self._pending and self._pending[0].settled:
                self._pending.popleft()
            if not self._pending or self._arrived:
                return None
            target = self._pending[0].buffer
            if target is None or not fits(target.dtype, target.nbytes, dtype_and_shape, size):
                return None
            return self._pending.popleft() if target.view() is not None else None

    def withdraw(self, posted: AnyReceive) -> None:
        """Forget a receive that nobody waits for any more."""
        with self._lock:
            if posted in self._pending:
                self._pending.remove(posted)

    def reset(self) -> int:
        """Return the peer was launched anew: drops what its predecessor sent and nobody took, and tells how many."""
        with self._lock:
            stale = list(self._arrived)
            self._arrived.clear()
        for received, origin in stale:
            origin.taken(received)
            received.release()
        return len(stale)

    def pending(self) -> list[AnyReceive]:
        with self._lock:
            return [posted for posted in self._pending if not posted.settled]

    def arrived(self) -> int:
        return len(self._arrived)

    def _next_posted(self) -> AnyReceive | None:
        while self._pending:
            posted = self._pending.popleft()
            if not posted.settled:
                return posted
        return None

    def _match(self, posted: AnyReceive, received: ReceivedMessage, origin: MessageSource) -> None:
        mismatch = find_mismatch(posted, received, self._name)
        if mismatch is None:
            if not posted.arrive(received):
                received.release()
        else:
            received.release()
            posted.fail(mismatch)
        frame = received.frame
        if mismatch is not None:
            origin.acknowledge(frame, mismatch)
        elif frame.flags & Flag.ACKNOWLEDGE:
            if received.growth is None:
                origin.acknowledge(frame, None)
            else:
                # Not before: its sender may then change the memory that it still copies from.
                received.growth.when_ended(lambda: origin.acknowledge(frame, None))


def fits(dtype: str, nbytes: int, dtype_and_shape: str, size: int) -> bool:
    # The last bracket opens the shape; a dtype may hold others, as in `<M8[s]`.
    return nbytes == size and dtype_and_shape.rpartition("[")[0] == dtype


def find_mismatch(posted: AnyReceive, received: ReceivedMessage, where: str) -> MismatchError | None:
    """Return why a message is not what a receive asked for, or None when it is."""
    frame, target = received.frame, posted.buffer
    is_tensor = bool(frame.flags & Flag.TENSOR)
    sent = bytes(frame.head).decode() if is_tensor else "an object with `send`"
    if target is None:
        if not is_tensor:
            return None
        return MismatchError(
            f"{sent} with `send_tensor`", "an object: it called `recv`", where=where, help="pair it with `recv_tensor`"
        )
    if not is_tensor:
        return MismatchError(sent, f"{target}: it called `recv_tensor`", where=where, help="pair `send` with `recv`")
    size = frame.sizes[0]
    if any(frame.kinds):
        # A handle has a size of its own: what it stands for has that of its shape.
        size = target.nbytes if _elements(sent) == math.prod(target.shape) else -1
    if fits(target.dtype, target.nbytes, sent, size):
        return None
    return MismatchError(sent, str(target), where=where, help="size and dtype of both buffers must be the same")


def _elements(dtype_and_shape: str) -> int:
    """Return how many elements `float32[4, 2]` has."""
    shape = dtype_and_shape.rpartition("[")[2].rstrip("]")
    return math.prod(map(int, shape.split(","))) if shape else 1


class SendQueue:
    """Messages to one peer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._order = threading.Lock()
        self._jobs_lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], None], Work[object]]] = deque()
        self._busy = False
        self._mismatches: deque[MismatchError] = deque(maxlen=_MISMATCHES_KEPT)
        self.unacknowledged: dict[int, Work[None]] = {}
        self.sequence = 0
        self.route = 0
        self.connection: Connection | None = None
        # The connection that knows `route`.
        self.routed: Connection | None = None

    def run(self, job: Callable[[], None], work: Work[object]) -> None:
        """Run `job` in its turn and return when it is done; raises what it raised."""
        if not self._busy and self._order.acquire(blocking=False):
            try:
                if not self._jobs:
                    job()
                    return
            finally:
                self._order.release()
        self.queue(job, work)
        work.wait()

    def run_at_once(self, job: Callable[[], bool]) -> bool:
        """Run `job` if it is its turn now and it need not wait; tell whether it was done."""
        if self._busy or not self._order.acquire(blocking=False):
            return False
        try:
            return not self._jobs and job()
        finally:
            self._order.release()

    def queue(self, job: Callable[[], None], work: Work[object]) -> None:
        """Run `job` in its turn in the stream's own thread; `work` carries what it raises, and finishes with it."""
        with self._jobs_lock:
            self._jobs.append((job, work))
            if self._busy:
                return
            self._busy = True
        threading.Thread(target=self._work_off, name=f"rlinf-send-{self._name}", daemon=True).start()

    def queued(self) -> list[Work[object]]:
        """Return what has not left yet."""
        with self._jobs_lock:
            return [work for _, work in self._jobs]

    def drain(self, seconds: float) -> bool:
        """Wait for the jobs that are under way, and tell whether they are done."""
        deadline = time.monotonic() + seconds
        while self._busy and time.monotonic() < deadline:
            time.sleep(_DRAIN_SLICE)
        return not self._busy

    def acknowledged(self, sequence: int, error: MismatchError | None) -> None:
        """Record the peer's answer to a message: that a receive took it, or why it fitted none.

        A mismatch fails the operation that sent the message. Where that has returned it is kept for `take_mismatches`:
        an operation that comes after it is sound and must not fail in its place.
        """
        work = self.unacknowledged.get(sequence)
        if error is None:
            if work is not None:
                work.finish(None)
        elif work is None or work.serial is None or not work.fail(error):
            self._mismatches.append(error)
            if work is not None:
                work.fail(error)
        # Last: once nothing is unacknowledged, every mismatch has been recorded.
        self.unacknowledged.pop(sequence, None)

    def take_mismatches(self) -> list[MismatchError]:
        """Return the mismatches that the peer reported and that no operation raised, oldest first; forget them."""
        taken = list(self._mismatches)
        self._mismatches.clear()
        return taken

    def _work_off(self) -> None:
        while True:
            with self._order:
                with self._jobs_lock:
                    if not self._jobs:
                        self._busy = False
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


class PeerStream:
    """Both directions between `me` and `peer`.

    Attributes:
        me: the local address.
        peer: the remote one.
        incoming: what comes from it.
        outgoing: what goes to it.
        incarnation: the endpoint that the peer was last known by, or None.
        resolver: finds the peer, or None where it was the peer that came to us.
    """

    def __init__(self, me: str, peer: str) -> None:
        self.me = me
        self.peer = peer
        self.incoming = ReceiveQueue(f"{peer} -> {me}")
        self.outgoing = SendQueue(peer)
        self.incarnation: str | None = None
        self.resolver: Resolver | None = None

    def open_works(self) -> list[Work[object]]:
        """Operations that the peer's death ends."""
        waiting: list[Work[object]] = list(self.incoming.pending())
        waiting.extend(cast("Work[object]", work) for work in list(self.outgoing.unacknowledged.values()))
        waiting.extend(self.outgoing.queued())
        return waiting

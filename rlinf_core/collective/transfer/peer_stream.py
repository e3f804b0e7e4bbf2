"""The two directions between one local address and one remote address, each ordered by itself.

Incoming messages and posted receives are matched in the order in which each was issued. Outgoing messages leave in the
order of issue, sent by the calling thread where it may block, else by a thread of the stream that lives while there
is something to send.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import cast

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.connection_pool import ConnectionPool, UnreachableError
from rlinf_core.collective.endpoint_info import EndpointInfo, Resolver
from rlinf_core.collective.transfer.received_message import Backlog, BufferClaim, PostedReceive, ReceivedMessage, fits
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError, MismatchError, PeerNotFoundError, WorkerDiedError

_DRAIN_SLICE = 0.005
# Unraised mismatches kept for each peer. Each is logged as well.
_MISMATCHES_KEPT = 64


class StaleMessageError(Exception):
    """A message of a predecessor of its peer, which nobody may receive any more."""


class PeerStream:
    """The stream of messages between two addresses, in both directions.

    Its inbox matches the messages of the peer with the receives that are posted for them; its outbox sends messages in
    the order of issue.

    Attributes:
        connection: what it sends through, once there is one.
        routed: the connection that knows `route`.
        carrier: the connection that the peer named this stream on last, and sends through.
        sequence: counts the messages sent.
        unacknowledged: the operations whose messages no receive has taken yet, by sequence.
        incarnation: the endpoint of the peer.
        former: the endpoints of the peer's predecessors, whose messages may still be on their way.
        binding: held while `incarnation` and `former` change.
        resolver: finds the peer; None where it was the peer that came to us.
    """

    def __init__(self, me: str, peer: str) -> None:
        self.me = me
        self.peer = peer
        self.connection: Connection | None = None
        self.routed: Connection | None = None
        self.carrier: Connection | None = None
        self.route = 0
        self.sequence = 0
        self.unacknowledged: dict[int, Work[None]] = {}
        self.incarnation: str | None = None
        self.former: set[str] = set()
        self.binding = threading.Lock()
        self.resolver: Resolver | None = None
        self._inbox_lock = threading.Lock()
        self._arrived: deque[ReceivedMessage] = deque()
        self._posted: deque[PostedReceive] = deque()
        self._claims: list[BufferClaim] = []
        self._order = threading.Lock()
        self._jobs_lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], object], Work[object]]] = deque()
        self._busy = False
        self._mismatches: deque[MismatchError] = deque(maxlen=_MISMATCHES_KEPT)
        # The mismatches of messages up to this one are nobody's any more.
        self._disregarded = 0

    def is_awaited_through(self, connection: Connection, waiting: Container[Work[object]]) -> bool:
        """Return whether a receive, or one of the `waiting` sends, needs what comes through a connection."""
        if self.incarnation != connection.peer.incarnation:
            return False
        sent = cast("list[Work[object]]", list(self.unacknowledged.values()))
        return bool(self.posted()) or any(work in waiting for work in sent)

    def open_works(self) -> list[Work[object]]:
        """Return the operations that the peer's death ends."""
        waiting: list[Work[object]] = list(self.posted())
        waiting.extend(claim.posted for claim in list(self._claims) if not claim.given_up)
        waiting.extend(cast("Work[object]", work) for work in list(self.unacknowledged.values()))
        waiting.extend(self.queued())
        return waiting

    # The inbox

    def deliver(self, received: ReceivedMessage) -> PostedReceive | None:
        """Add a message; return the receive that takes it instead, if one waits.

        Raises:
            StaleMessageError: it is of a predecessor of the peer.
        """
        with self._inbox_lock:
            # Here, and not before: a successor that is met later clears the inbox.
            if received.connection is not None and received.connection.peer.incarnation in self.former:
                raise StaleMessageError
            self._drop_settled()
            if self._posted:
                return self._posted.popleft()
            self._arrived.append(received)
            return None

    def post(self, posted: PostedReceive) -> ReceivedMessage | None:
        """Add a receive; return the message that it takes instead, if one is there."""
        with self._inbox_lock:
            if self._arrived:
                return self._arrived.popleft()
            self._posted.append(posted)
            return None

    def claim(self, size: int, dtype_and_shape: str, incarnation: str) -> BufferClaim | None:
        """Take the next receive, if the body can be read straight into its buffer; `let_go` must follow.

        Args:
            incarnation: the endpoint that sends the body.
        """
        with self._inbox_lock:
            self._drop_settled()
            if not self._posted or self._arrived or incarnation in self.former:
                return None
            target = self._posted[0].buffer
            if target is None or not fits(target.dtype, target.nbytes, dtype_and_shape, size):
                return None
            memory = target.view()
            if memory is None:
                return None
            posted = self._posted.popleft()
            posted.claim = BufferClaim(posted, memory)
            self._claims.append(posted.claim)
            return posted.claim

    def let_go(self, claim: BufferClaim) -> None:
        """Forget a claim: nothing more is read into it."""
        with self._inbox_lock:
            self._claims.remove(claim)
            claim.posted.claim = None

    def withdraw(self, posted: PostedReceive) -> bool:
        """Give up a receive that nobody waits for any more, so that the next one takes the message that may still come.

        Return False where it has a message already: then its result is there in a moment.
        """
        with self._inbox_lock:
            if posted in self._posted:
                self._posted.remove(posted)
                return True
            claim = posted.claim
        return claim is not None and claim.give_up()

    def clear_inbox(self) -> list[ReceivedMessage]:
        """Remove the unread messages, which are of a predecessor of the peer, and return them."""
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
        """Run `job` in its turn and return when it is done; raise what it raised."""
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
        """Run `job` if it is its turn now and it need not wait; return whether it was done."""
        if self._busy or not self._order.acquire(blocking=False):
            return False
        try:
            return not self._jobs and job()
        finally:
            self._order.release()

    def queue(self, job: Callable[[], object], work: Work[object]) -> None:
        """Run `job` in its turn in the stream's own thread; `work` carries what it raises, and finishes with it."""
        with self._jobs_lock:
            self._jobs.append((job, work))
            if self._busy:
                return
            self._busy = True
        threading.Thread(target=self._work_off, name=f"rlinf-send-{self.peer}", daemon=True).start()

    def queued(self) -> list[Work[object]]:
        with self._jobs_lock:
            return [work for _, work in self._jobs]

    def drain(self, seconds: float) -> bool:
        """Wait until the jobs under way are done, at most that many seconds."""
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
            if sequence > self._disregarded:
                self._mismatches.append(error)
            if work is not None:
                work.fail(error)
        # Last: once nothing is unacknowledged, every mismatch has been recorded.
        self.unacknowledged.pop(sequence, None)

    def take_mismatches(self) -> list[MismatchError]:
        """Return the mismatches that the peer reported and that no operation raised, oldest first; forget them."""
        mismatches = list(self._mismatches)
        self._mismatches.clear()
        return mismatches

    def disregard_mismatches(self) -> None:
        """Forget the mismatches of what was sent until now, also those that the peer reports later."""
        self._disregarded = self.sequence
        self._mismatches.clear()

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


_log = logging.getLogger(__name__)
# (peer, what happened to the connection) -> the error that its operations raise.
Explain = Callable[[str, str], Exception]


def died(peer: str, reason: str) -> Exception:
    """Return the error for a peer that was lost for an unknown reason."""
    return WorkerDiedError(peer, cause=reason)


def fail_all(works: Iterable[Work[object]], error: Exception) -> None:
    for work in works:
        work.fail(error)


class PeerStreams:
    """The streams of one endpoint, each made on first use; `explain` may block for a moment."""

    def __init__(
        self,
        connections: ConnectionPool,
        info: EndpointInfo,
        connect_timeout: float,
        explain: Explain,
        backlog: Backlog,
    ) -> None:
        self._connections = connections
        self._info = info
        self._connect_timeout = connect_timeout
        self.explain = explain
        self._backlog = backlog
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, str], PeerStream] = {}
        # By the endpoint of the peer.
        self._with: dict[str, list[PeerStream]] = {}
        self._lost_callbacks: list[Callable[[str, str], None]] = []

    def of(self, me: str, peer: str) -> PeerStream:
        with self._lock:
            stream = self._streams.get((me, peer))
            if stream is None:
                stream = self._streams[me, peer] = PeerStream(me, peer)
            return stream

    def all(self) -> list[PeerStream]:
        with self._lock:
            return list(self._streams.values())

    def with_peer_of(self, connection: Connection) -> list[PeerStream]:
        """Return the streams with addresses of the endpoint at the other end of a connection."""
        with self._lock:
            return list(self._with.get(connection.peer.incarnation, ()))

    def are_awaited_through(self, connection: Connection, waiting: Container[Work[object]]) -> bool:
        """Return whether any stream is, see `PeerStream.is_awaited_through`."""
        return any(stream.is_awaited_through(connection, waiting) for stream in self.with_peer_of(connection))

    def on_lost(self, callback: Callable[[str, str], None]) -> None:
        self._lost_callbacks.append(callback)

    def connect(self, stream: PeerStream, work: Work[object]) -> Connection | None:
        """Return the stream's connection; None when the peer lives in this process."""
        connection = stream.connection
        if connection is not None and not connection.closed:
            return connection
        if stream.incarnation == self._info.incarnation:
            return None
        if stream.resolver is None:
            raise PeerNotFoundError(stream.peer, f"`{stream.peer}` is not connected, and its address is unknown")
        deadline = min(work.deadline, time.monotonic() + self._connect_timeout)
        info = stream.resolver.lookup(WorkerAddress.from_name(stream.peer), deadline - time.monotonic())
        if info.incarnation == self._info.incarnation:
            self._index(stream, info.incarnation)
            return None
        try:
            connection = self._connections.connect(info, deadline)
        except UnreachableError as error:
            if error.gone:
                raise self.explain(stream.peer, error.why or error.message) from error
            why = f"{error.message}: {error.why}" if error.why else error.message
            if deadline == work.deadline:
                # It was given less time than a connection may take.
                raise CommunicationTimeoutError(work.title, work.seconds, picture=why) from error
            raise PeerNotFoundError(
                stream.peer,
                f"`{stream.peer}` could not be reached in {self._connect_timeout:g} s",
                why=why,
                help="check that the hosts reach each other, and RLINF_NET_IF where they have several networks; allow"
                " more seconds by RLINF_CONNECT_TIMEOUT where they are very busy",
            ) from error
        self.bind(stream, connection)
        # The thread that reads may have bound the one that the peer dialed: all messages leave through one.
        bound = stream.connection
        return connection if bound is None or bound.closed else bound

    def bind(self, stream: PeerStream, connection: Connection) -> None:
        incarnation = connection.peer.incarnation
        # Who connects and who reads meet a successor at once: the second must not drop what came after the first.
        with stream.binding:
            if incarnation in stream.former:
                return
            current = stream.connection
            if stream.incarnation not in (None, incarnation):
                if connection.hung_up() and current is not None and not current.hung_up():
                    # The first words of a dead process may be read after those of its successor.
                    stream.former.add(incarnation)
                    return
                stream.former.add(stream.incarnation)
                stale = stream.clear_inbox()
                for received in stale:
                    self._backlog.taken(received)
                    received.release()
                if stale:
                    _log.warning(
                        "`%s` was relaunched: %d messages of its predecessor are dropped", stream.peer, len(stale)
                    )
            if stream.incarnation != incarnation:
                self._index(stream, incarnation)
            # What is sent through one that the peer has shut, and whose end is not read yet, would be lost.
            if (
                current is None
                or current.closed
                or current.peer.incarnation != incarnation
                or (current is not connection and current.hung_up())
            ):
                stream.connection = connection

    def _index(self, stream: PeerStream, incarnation: str) -> None:
        with self._lock:
            if stream.incarnation is not None:
                rest = [other for other in self._with.pop(stream.incarnation, ()) if other is not stream]
                if rest:
                    self._with[stream.incarnation] = rest
            self._with.setdefault(incarnation, []).append(stream)
            stream.incarnation = incarnation
        # A receive of this stream may wait for what its connection brings.
        self._backlog.stir(incarnation)

    def lost(self, connection: Connection, reason: str) -> None:
        """Fail the operations that continue through a connection that is over."""
        for stream in self.with_peer_of(connection):
            if stream.connection is connection:
                for callback in self._lost_callbacks:
                    callback(stream.peer, reason)
                works = stream.open_works()
                stream.unacknowledged.clear()
                if works:
                    self.explain_later(stream.peer, reason, lambda error, works=works: fail_all(works, error))

    def explain_later(self, peer: str, reason: str, then: Callable[[Exception], object]) -> None:
        """Call `then` with the error for a lost peer, in its own thread: the explanation may take a moment.

        Everything that ends because a peer was lost ends here: the thread that notices the loss reads for everybody.
        """
        threading.Thread(target=lambda: then(self.explain(peer, reason)), name="rlinf-lost-peer", daemon=True).start()

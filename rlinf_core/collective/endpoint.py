"""The endpoint of a process, through which its workers, channels and driver communicate with other processes.

Threads: one accepts connections, and one per connection reads. Sending threads write to the sockets themselves.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import cast

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.arena import Arena
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.connection_pool import ConnectionPool
from rlinf_core.collective.endpoint_info import Resolver, Settings, advertised_address, make_endpoint_info
from rlinf_core.collective.frame import Frame, FrameKind
from rlinf_core.collective.handshake import ClusterSecret, Listener, UnixDirectory, listen_tcp, listen_unix
from rlinf_core.collective.message import Encoded, FallbackDumps, Message, encode
from rlinf_core.collective.transfer.forwarder import Forwarder
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.peer_streams import Explain, PeerStreams, died
from rlinf_core.collective.transfer.received_messages import Backlog, PostedReceive
from rlinf_core.collective.transfer.receiver import Receiver
from rlinf_core.collective.transfer.sender import Sender
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.errors import CancelledOperationError, MismatchError, RuntimeFailure
from rlinf_core.process.activity import InflightOps
from rlinf_core.waiting import OperationKind, plain_seconds

_log = logging.getLogger(__name__)
_SOCKET = "s"
# The time limit for reading threads to end, once their connections are shut.
_END_SECONDS = 1.0


class Endpoint:
    """The sender and receiver of messages for the addresses of one process.

    It is made when the process first communicates. Its owner publishes `info` for other processes, and gives streams
    a `Resolver` that finds theirs.
    """

    def __init__(
        self,
        secret: ClusterSecret,
        *,
        ip: str | None = None,
        directory: str | None = None,
        settings: Settings | None = None,
        operations: InflightOps | None = None,
        fallback: FallbackDumps | None = None,
        explain: Explain = died,
    ) -> None:
        """
        Args:
            secret: the shared secret of the cluster.
            ip: the address at which other hosts reach this one; by default that of `RLINF_NET_IF`, or of the default
                route.
            directory: the parent of the private directory for unix sockets; by default the temporary directory.
            settings: the settings; by default from the environment.
            operations: the table in which operations are published.
            fallback: pickles objects that plain pickle cannot, or can only by a name in `__main__`.
            explain: makes the error for a lost peer, given its address and why the connection ended; it may block
                for a moment.
        """
        self.settings = Settings.from_environment() if settings is None else settings
        self.waits = WaitTable(operations)
        self.waits.patience = self.settings.timeout
        self._fallback = fallback
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Identities of the shared memory of processes that are gone.
        self._orphans: list[int] = []
        self._readers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._closed = False
        self._on_close: list[Callable[[Exception], object]] = []
        self._release_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arena = Arena(self.settings.arena_bytes, self._release_event)
        self._directory = UnixDirectory(directory)
        path = str(self._directory.path / _SOCKET)
        address = advertised_address() if ip is None else ip
        tcp = listen_tcp(address, self.settings.socket_buffer, self.settings.ports)
        host, port = tcp.getsockname()[:2]
        self.info = make_endpoint_info(path, host if ip is None else ip, port)
        self._connections = ConnectionPool(self.info, secret, self.settings, self.waits.operations.moved, self._opened)
        self._backlog = Backlog(self.settings)
        self._streams = PeerStreams(self._connections, self.info, self.settings.connect_timeout, explain, self._backlog)
        # The acknowledgement may come after the messages that fill the backlog, so reading must resume.
        self.waits.acknowledged = self._streams.look_for_acknowledgement
        self._receiver = Receiver(
            self.settings, self._arena, self.waits, self._streams, self._backlog, self._connection_lost
        )
        sender = Sender(
            self.settings,
            self._arena,
            self.waits,
            self._streams,
            self._receiver.deliver_here,
            self._check_open,
        )
        self._forwarder = Forwarder(sender)
        # The parts document these.
        self.send, self.send_async, self.broadcast = sender.send, sender.send_async, sender.broadcast
        self.post, self.share = sender.post, sender.share
        self.forward, self.release_lent = self._forwarder.forward, self._forwarder.release_lent
        self.serve = self._receiver.serve
        self.on_peer_lost = self._streams.on_lost
        self.streams = self._streams.all
        self.explain_later = self._streams.explain_later
        self.shared_memory, self.answers_for_memory = self._arena.use, self._forwarder.outstanding
        self._listener = Listener(
            [listen_unix(path), tcp],
            secret,
            self._connections.admit,
            timeout=self.settings.handshake_timeout,
            most=self.settings.pending_handshakes,
        )
        _endpoints.add(self)

    # Addresses

    def stream(self, me: WorkerAddress, peer: WorkerAddress, resolver: Resolver | None = None) -> PeerStream:
        """Return the stream between a local address and another one; `resolver` finds the other one when needed."""
        stream = self._streams.of(me.get_name(), peer.get_name())
        if resolver is not None:
            stream.resolver = resolver
        return stream

    # Messages

    def message(self, obj: object, *, tag: int = 0) -> Message:
        """Return a message that carries `obj`.

        Raises:
            PayloadError: `obj` does not pickle.
        """
        return Message.of(self.encode(obj), self.settings.inline_limit, tag=tag)

    def encode(self, obj: object) -> Encoded:
        """Return the pickle stream of `obj` and its out-of-band parts, see `messages.message.encode`."""
        return encode(obj, self._fallback)

    def work(
        self, kind: OperationKind, target: str, timeout: float | None = None, *, detached: bool = False
    ) -> Work[object]:
        return Work(kind, target, self.seconds(timeout), self.waits, detached=detached)

    def seconds(self, timeout: float | None) -> float:
        """Return the time limit of an operation, in seconds.

        Raises:
            ValueError: `timeout` is not a valid time.
        """
        return self.settings.timeout if timeout is None else plain_seconds(timeout)

    def receive(self, stream: PeerStream, posted: PostedReceive) -> None:
        """Issue a receive; connect to the peer if needed, for an asynchronous receive in the background."""
        self._check_open()
        if self._receiver.post(stream, posted):
            return
        connection = stream.connection
        if connection is not None and connection.usable:
            return

        def connect() -> None:
            try:
                self._streams.connect(stream, cast("Work[object]", posted))
            except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
                if not posted.settled:
                    posted.fail(error)

        if posted.serial is None:
            connect()
        else:
            threading.Thread(target=connect, name="rlinf-connect", daemon=True).start()

    # Failures

    def fail(self, error: Exception, peer: WorkerAddress | None = None) -> int:
        """Fail every pending operation, or every one with `peer`, with `error`; return their number."""
        name = None if peer is None else peer.get_name()
        works = {id(work): work for work in self.waits.waiting()}
        for stream in self._streams.all():
            if name is None or stream.peer == name:
                works.update((id(work), work) for work in stream.open_works())
        return sum(work.fail(error) for work in works.values() if name is None or work.target == name)

    def on_close(self, callback: Callable[[Exception], object]) -> None:
        """Call `callback` when this endpoint closes, with the error for operations that no thread waits for."""
        self._on_close.append(callback)

    def take_mismatches(self) -> list[MismatchError]:
        """Return and forget the mismatches that peers reported and that no operation raised."""
        return [error for stream in self._streams.all() for error in stream.take_mismatches()]

    def disregard_mismatches(self) -> None:
        """Forget the mismatches of all messages sent so far, including those that peers report later."""
        for stream in self._streams.all():
            stream.disregard_mismatches()

    def collect(self) -> None:
        """Release the memory of other processes whose owner, or last holder, has died.

        A process that forwards messages, as a channel does, must call this regularly.
        """
        self._forwarder.collect()
        orphans, self._orphans = self._orphans, []
        for identity in orphans:
            for connection in self._connections.all():
                if identity in connection.passed:
                    connection.passed.discard(identity)
                    connection.post(Frame(FrameKind.FORGET, sequence=identity).pack())

    def recipients_in_transit(self) -> tuple[str, ...]:
        """Return the incarnations of the endpoints to which bytes are in transit, see `Connection.in_transit`."""
        return tuple(one.peer.incarnation for one in self._connections.all() if one.in_transit)

    # The end

    def close(self, *, linger: float = 1.0) -> None:
        """Announce the close, fail pending operations and free every descriptor; received views stay valid.

        Args:
            linger: seconds that queued messages may still take to leave, in all.
        """
        if self._pid != os.getpid():
            return  # in a forked child: another thread of the parent may have held the lock
        with self._lock:
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + linger
        for stream in self._streams.all():
            stream.drain(until - time.monotonic())
        self._listener.close()
        for connection in self._connections.all():
            connection.post(Frame(FrameKind.GOODBYE).pack())
        closed = CancelledOperationError("the endpoint was closed")
        self.fail(closed)
        for callback in self._on_close:
            callback(closed)
        self._connections.end_dialing()
        for connection in self._connections.all():
            self._connections.forget(connection)
            connection.shut()
        self._backlog.stir()
        until = time.monotonic() + _END_SECONDS
        for thread in list(self._readers):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._directory.close()
        if not any(thread.is_alive() for thread in list(self._readers)):
            # A running thread might otherwise wait on a new file that got the same descriptor number.
            os.close(self._release_event)
        _endpoints.discard(self)

    def _check_open(self) -> None:
        if self._closed or self._pid != os.getpid():
            why = "it was closed" if self._closed else "connections do not survive a fork: this is a child process"
            raise RuntimeFailure("this process's endpoint cannot be used", why=why)

    # Connections

    def _opened(self, connection: Connection) -> None:
        thread = threading.Thread(target=self._receiver.read, args=(connection,), name="rlinf-read", daemon=True)
        with self._lock:
            if self._closed:
                # It was dialed or accepted while the endpoint closed.
                connection.close()
                return
            thread.start()
            self._readers.add(thread)

    def _connection_lost(self, connection: Connection, reason: str) -> None:
        connection.shut()
        if not self._connections.forget(connection):
            return
        if connection.peer_closing:
            reason = "it ended its communication"
        self._streams.lost(connection, reason)
        for segment in list(connection.segments.values()):
            segment.orphaned = True
            # `collect` notifies other processes later: a message that refers to the segment may be in transit to them.
            self._orphans.append(segment.identity)
        self._arena.owner_lost(connection.peer.incarnation, connection.peer_is_dead)
        self._forwarder.lost(connection)

    def abandon(self) -> None:
        """Close the inherited sockets in a forked child, so that it does not keep the parent's connections open."""
        if self._closed:
            return
        self._closed = True
        self._listener.abandon()
        for connection in self._connections.inherited():
            connection.abandon()


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _after_fork() -> None:
    for endpoint in list(_endpoints):
        endpoint.abandon()


os.register_at_fork(after_in_child=_after_fork)

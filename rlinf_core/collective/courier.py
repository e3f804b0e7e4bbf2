"""The outgoing half of an endpoint: from a message to a frame on the right connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rlinf_core.collective.arena import LOCAL, Arena, Block, spill
from rlinf_core.collective.connection import Connection, ConnectionLostError
from rlinf_core.collective.frame import Flag, Frame, Kind, pack_message
from rlinf_core.collective.link import Link
from rlinf_core.collective.parcel import Parcel, private_memory
from rlinf_core.collective.payload import PartKind
from rlinf_core.collective.settings import Settings
from rlinf_core.collective.transports.base import Announced, Bytes, Cargo, HostTransport, Message, inline
from rlinf_core.collective.transports.growing import fill_by_pieces, growing_source, grown_frame
from rlinf_core.collective.transports.shared_memory import SharedMemoryTransport, shared_cargo
from rlinf_core.collective.transports.stream import StreamTransport
from rlinf_core.collective.work import Board, Work

# Below this, one buffer is cheaper than two.
_JOIN = 16 << 10
Loading = Callable[[Connection], Cargo]


class Courier:
    """Sends messages: by the calling thread where it may block, else by the link's own."""

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        board: Board,
        connect: Callable[[Link, Work[object]], Connection | None],
        hand_over: Callable[[Link, Parcel], None],
        explain: Callable[[Link, str], Exception],
    ) -> None:
        """
        Args:
            settings: sizes and times.
            arena: shared memory for large bodies.
            board: where blocked operations are published.
            connect: the connection of a link, made when needed; None when the peer lives in this process.
            hand_over: delivers within this process.
            explain: the error for a lost peer.
        """
        self._settings = settings
        self._arena = arena
        self._board = board
        self.connect = connect
        self.hand_over = hand_over
        self._explain = explain
        self._stream = StreamTransport()

    def send(self, link: Link, message: Message, work: Work[object], *, acknowledgement: Work[None] | None) -> None:
        """Send and return when the message's memory may be changed.

        Raises:
            Exception: what `work` fails with: a deadline, a dead peer, an injected failure.
        """
        if link.outgoing.run_at_once(lambda: self._try(link, message, acknowledgement)):
            return
        with self._board.during(work):
            link.outgoing.run(lambda: self.transmit(link, message, work, acknowledgement), work)

    def send_async(self, link: Link, message: Message, work: Work[object], acknowledgement: Work[None] | None) -> None:
        """Send in the background; `work` finishes when the message's memory may be changed."""
        if message.body_size <= self._settings.direct_limit:
            try:
                done = link.outgoing.run_at_once(lambda: self._try(link, message, acknowledgement))
            except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
                work.fail(error)
                return
            if done:
                work.finish(None)
                return
        link.outgoing.queue(lambda: self.transmit(link, message, work, acknowledgement), work)

    def broadcast(self, links: Sequence[Link], message: Message, works: Sequence[Work[object]]) -> None:
        """Send one message to several peers: those on this host share one copy of the body.

        Each link's outcome is that of its work; returns when the message's memory may be changed.
        """
        sharers: list[tuple[Link, Work[object], Connection]] = []
        for link, work in zip(links, works, strict=True):
            connection = self._connection_or_fail(link, work) if message.body_size > self.limit else None
            # Two members in one process share its mapping, so the second gets a copy of its own.
            taken = any(connection is other for _, _, other in sharers)
            if connection is not None and connection.shares_memory and not taken:
                sharers.append((link, work, connection))
            elif not work.settled:
                link.outgoing.queue(lambda link=link, work=work: self.transmit(link, message, work, None), work)
        if sharers:
            self._share(message, sharers)
        for work in works:
            work.wait_until(work.deadline)

    def post(self, link: Link, tag: int, key: bytes, head: bytes | bytearray, weight: float) -> bool:
        """Send a few bytes past whatever waits for its turn on the link; False when the link was not used before."""
        connection = link.outgoing.connection
        if connection is None or connection.closed or link.outgoing.routed is not connection:
            return False
        connection.post(pack_message(tag, link.outgoing.route, key, head, weight))
        return True

    def share(self, link: Link, message: Message, size: int, work: Work[object]) -> memoryview | None:
        """Send a message whose body is fresh memory that both sides keep; None where they share none: it has none."""
        connection = self.connect(link, work)
        block = spill(size, 1) if connection is not None and connection.shares_memory else None
        if connection is None or block is None:
            self.send(link, message, work, acknowledgement=None)
            return None
        message.parts = [Announced(size, PartKind.HOST)]
        cargo = shared_cargo(block, 0, _keep)
        link.outgoing.run(lambda: self.write(link, connection, message, cargo, work, None), work)
        return block.memory()

    @property
    def limit(self) -> int:
        return self._settings.inline_limit

    # One message at its turn

    def _try(self, link: Link, message: Message, acknowledgement: Work[None] | None) -> bool:
        """Send if that needs no waiting for anybody, and tell whether it did."""
        connection = self.ready_connection(link)
        if connection is None:
            return False
        size = message.body_size
        if size <= self.limit:
            return self.write_now(link, connection, message, inline(message), acknowledgement)
        if not connection.shares_memory:
            return False
        source = growing_source(message, self._settings.growing_piece)
        block = self._arena.try_allocate(size, _owners(connection, source))
        if block is None:
            return False
        cargo = shared_cargo(block, 0, lambda: self._arena.cancel(block))
        done = False
        try:
            if source is None:
                message.gather(block.memory())
            else:
                cargo.flags |= Flag.GROWING
            done = self.write_now(link, connection, message, cargo, acknowledgement)
        finally:
            if not done:
                cargo.undo()
        if done and source is not None:
            self._grow(link, connection, block, source)
        return done

    def transmit(self, link: Link, message: Message, work: Work[object], acknowledgement: Work[None] | None) -> None:
        connection = self.connect(link, work)
        if connection is None:
            self._deliver_here(link, message, acknowledgement)
            return
        source = growing_source(message, self._settings.growing_piece) if connection.shares_memory else None
        if source is not None:
            block = self._transport(_owners(connection, source)).room(message.body_size, work)
            cargo = shared_cargo(block, 0, lambda: self._arena.cancel(block))
            cargo.flags |= Flag.GROWING
            self._write_or_undo(link, connection, message, cargo, work, acknowledgement)
            self._grow(link, connection, block, source)
        else:
            cargo = self._load(message, connection, work)
            self._write_or_undo(link, connection, message, cargo, work, acknowledgement)

    def _load(self, message: Message, connection: Connection, work: Work[object]) -> Cargo:
        if message.body_size <= self.limit:
            return inline(message)
        transport: HostTransport = self._stream
        if connection.shares_memory:
            # Copying gigabytes takes seconds in which nothing else is seen to move.
            self._board.operations.moved()
            transport = self._transport(_owners(connection, None))
        return transport.load(message, work)

    def _transport(self, owners: Sequence[str]) -> SharedMemoryTransport:
        return SharedMemoryTransport(self._arena, self._settings.spill_after, owners)

    def _grow(self, link: Link, connection: Connection, block: Block, source: memoryview) -> None:
        """Fill a body whose frame has left, and tells of each piece. The block is held here too until then."""
        route, sequence = link.outgoing.route, link.outgoing.sequence
        whole = False
        try:
            for filled in fill_by_pieces(block.memory(), source, self._settings.growing_piece):
                self._board.operations.moved()
                connection.post(grown_frame(route, sequence, filled).pack())
            whole = True
        finally:
            self._arena.cancel_lease(block, 1)
            if not whole:
                connection.post(grown_frame(route, sequence, None).pack())

    def ready_connection(self, link: Link) -> Connection | None:
        connection = link.outgoing.connection
        return None if connection is None or connection.closed else connection

    def write_now(
        self,
        link: Link,
        connection: Connection,
        message: Message,
        cargo: Cargo,
        acknowledgement: Work[None] | None,
    ) -> bool:
        data, fds = self._frame(link, connection, message, cargo, acknowledgement)
        if cargo.body:
            data = b"".join((data, *cargo.body))
        try:
            written = connection.try_write(data, fds)
        except ConnectionLostError as error:
            link.outgoing.unacknowledged.pop(link.outgoing.sequence + 1, None)
            raise self._explain(link, str(error)) from error
        if written:
            self._written(link, connection, cargo)
        return written

    def write(
        self,
        link: Link,
        connection: Connection,
        message: Message,
        cargo: Cargo,
        work: Work[object],
        acknowledgement: Work[None] | None,
    ) -> None:
        data, fds = self._frame(link, connection, message, cargo, acknowledgement)
        buffers: list[Bytes] = [data, *cargo.body]
        if cargo.body_size <= _JOIN:
            buffers = [b"".join(buffers)]
        try:
            connection.write(buffers, fds, work)
        except ConnectionLostError as error:
            raise self._explain(link, str(error)) from error
        self._written(link, connection, cargo)

    def _frame(
        self,
        link: Link,
        connection: Connection,
        message: Message,
        cargo: Cargo,
        acknowledgement: Work[None] | None,
    ) -> tuple[bytes, Sequence[int]]:
        """Return the bytes of the frame, and of the one that names its route where that is new."""
        outgoing = link.outgoing
        opening = b""
        if outgoing.routed is not connection:
            outgoing.route = connection.next_route()
            names = json.dumps([link.me, link.peer]).encode()
            opening = Frame(Kind.ROUTE, route=outgoing.route, head=names).pack()
        fds: Sequence[int] = ()
        if cargo.fds and (cargo.flags & Flag.ONE_SHOT or _segment(cargo) not in connection.passed):
            fds = cargo.fds
        frame = message.frame(Kind.MESSAGE, outgoing.route, outgoing.sequence + 1, cargo)
        if fds:
            frame.flags |= Flag.DESCRIPTOR_FOLLOWS
        if acknowledgement is not None:
            frame.flags |= Flag.ACKNOWLEDGE
            outgoing.unacknowledged[outgoing.sequence + 1] = acknowledgement
        return opening + frame.pack(), fds

    def _write_or_undo(
        self,
        link: Link,
        connection: Connection,
        message: Message,
        cargo: Cargo,
        work: Work[object],
        acknowledgement: Work[None] | None,
    ) -> None:
        try:
            self.write(link, connection, message, cargo, work, acknowledgement)
        except BaseException:
            cargo.undo()
            raise

    def _written(self, link: Link, connection: Connection, cargo: Cargo) -> None:
        link.outgoing.sequence += 1
        link.outgoing.routed = connection
        if cargo.place is not None and not cargo.flags & Flag.ONE_SHOT:
            connection.passed.add(_segment(cargo))

    # Several receivers

    def _connection_or_fail(self, link: Link, work: Work[object]) -> Connection | None:
        try:
            return self.connect(link, work)
        except Exception as error:  # noqa: BLE001 - it is the outcome for this peer, not for the others
            work.fail(error)
            return None

    def _share(self, message: Message, sharers: Sequence[tuple[Link, Work[object], Connection]]) -> None:
        owners = [connection.peer.incarnation for _, _, connection in sharers]
        works = [work for _, work, _ in sharers]
        try:
            block = self._transport(owners).fill(message, works[0])
        except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
            for work in works:
                work.fail(error)
            return
        for place, (link, work, connection) in enumerate(sharers):
            cargo = shared_cargo(block, place, lambda place=place: self._arena.cancel_lease(block, place))
            if len(sharers) > 1:
                cargo.flags |= Flag.PRIVATE_COPY

            self._write_share(link, message, work, connection, cargo)

    def _write_share(
        self, link: Link, message: Message, work: Work[object], connection: Connection, cargo: Cargo
    ) -> None:
        """One peer's frame: at once where it need not wait, as a few words seldom do."""

        def write() -> None:
            self._write_or_undo(link, connection, message, cargo, work, None)

        try:
            done = link.outgoing.run_at_once(lambda: self.write_now(link, connection, message, cargo, None))
        except Exception as error:  # noqa: BLE001 - it is the outcome for this peer, not for the others
            cargo.undo()
            work.fail(error)
            return
        if done:
            work.finish(None)
        else:
            link.outgoing.queue(write, work)

    # Within this process

    def _deliver_here(self, link: Link, message: Message, acknowledgement: Work[None] | None) -> None:
        """A private copy, as any receiver gets one."""
        size = message.body_size
        link.outgoing.sequence += 1
        frame = message.frame(Kind.MESSAGE, 0, link.outgoing.sequence, Cargo(body_size=size))
        if acknowledgement is not None:
            frame.flags |= Flag.ACKNOWLEDGE
            link.outgoing.unacknowledged[link.outgoing.sequence] = acknowledgement
        block = self._arena.try_allocate(size) if size > self.limit else None
        if block is None:
            body = private_memory(size)
            message.gather(body)
            self.hand_over(link, Parcel(frame, body))
        else:
            message.gather(block.memory())
            self.hand_over(link, Parcel(frame, lease=block.lease()))


def _keep() -> None:
    """Shared memory that could not be sent goes with its last reference."""


def _owners(connection: Connection, growing: memoryview | None) -> tuple[str, ...]:
    """Return who holds a body: its receiver, and its sender too while it still writes it."""
    peer = connection.peer.incarnation
    return (peer,) if growing is None else (peer, LOCAL)


def _segment(cargo: Cargo) -> int:
    return 0 if cargo.place is None else cargo.place.segment

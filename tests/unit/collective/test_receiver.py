"""What becomes of messages whose receive is given up while they arrive, or whose connection is replaced.

The peer is a socket in the hands of the test, so that a message may stop anywhere.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.arena import FIRST_LEASE, LeaseState, spill
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.connection_pool import ConnectionPool
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.frame import Flag, Frame, FrameKind
from rlinf_core.collective.message import encode
from rlinf_core.collective.transfer import received_messages, receiver
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.peer_streams import PeerStreams, died
from rlinf_core.collective.transfer.received_messages import Backlog, PostedReceive, ReceivedMessage
from rlinf_core.collective.transfer.receiver import Receiver
from rlinf_core.collective.transfer.sender import shared_body
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.errors import CancelledOperationError, CommunicationTimeoutError, WorkerDiedError
from rlinf_core.waiting import OperationKind
from tests.unit.collective.conftest import HERE, THERE, Pair
from tests.waiting import until

SIZE = 200_000
SEVENS, NINES = (np.full(SIZE, number, np.uint8) for number in (7, 9))


class Wired:
    """A group whose other members are one or more sockets."""

    def __init__(self, others: Sequence[WorkerAddress] = ()) -> None:
        self.settings = Settings(timeout=20.0, inbox_messages=2)
        waits = WaitTable()
        self.backlog = Backlog(self.settings)
        unused: Any = None
        self.pool = ConnectionPool(unused, unused, self.settings, lambda: None, self._read)
        self.streams = PeerStreams(self.pool, unused, 1.0, died, self.backlog)
        arena: Any = SimpleNamespace(try_allocate=lambda size: None)
        self.lost: list[Connection] = []
        self.receiver = Receiver(self.settings, arena, waits, self.streams, self.backlog, self._lose)
        endpoint: Any = SimpleNamespace(
            settings=self.settings,
            waits=waits,
            seconds=lambda timeout: self.settings.timeout if timeout is None else timeout,
            stream=lambda me, peer, resolver: self.streams.of(me.get_name(), peer.get_name()),
            receive=self.receiver.post,
        )
        self.group = CollectiveGroup(cast("Endpoint", endpoint), HERE, (THERE, *others), unused)
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []

    def _read(self, connection: Connection) -> None:
        self.threads.append(threading.Thread(target=self.receiver.read, args=(connection,), daemon=True))
        self.threads[-1].start()

    def _lose(self, connection: Connection, reason: str) -> None:
        self.lost.append(connection)
        connection.shut()
        self.pool.forget(connection)
        self.streams.lost(connection, reason)

    @property
    def stream(self) -> PeerStream:
        return self.streams.of("here:0", "there:0")

    def connect(self, source: str = "there:0", incarnation: str = "one") -> tuple[Connection, socket.socket]:
        """Return both ends of a new connection, which is read and has named its stream."""
        near, far = socket.socketpair()
        self.sockets.append(far)
        far.sendall(route_frame(source))
        self.pool._establish("c", near, cast("Any", SimpleNamespace(incarnation=incarnation)))
        connection = self.pool.get(incarnation)
        assert connection is not None
        return connection, far

    def close(self) -> None:
        for far in self.sockets:
            far.close()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def wired() -> Iterator[Wired]:
    made = Wired()
    yield made
    made.close()


def tensor_frame() -> bytes:
    head = f"uint8[{SIZE}]".encode()
    return Frame(FrameKind.MESSAGE, Flag.TENSOR, route=1, head=head, sizes=(SIZE,), body_size=SIZE).pack()


def object_frame(value: object, route: int = 1) -> bytes:
    return Frame(FrameKind.MESSAGE, route=route, head=encode(value).head).pack()


def route_frame(source: str, route: int = 1) -> bytes:
    return Frame(FrameKind.ROUTE, route=route, head=json.dumps([source, "here:0"]).encode()).pack()


def at_its_deadline(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Have the next wait for a receive end by its deadline, at a moment that comes after `before`."""
    real = PostedReceive.wait

    def wait(posted: PostedReceive, timeout: float | None = None) -> object:
        monkeypatch.setattr(PostedReceive, "wait", real)
        before()
        raise CommunicationTimeoutError(posted.title, posted.seconds)

    monkeypatch.setattr(PostedReceive, "wait", wait)


def half_of_a_message(wired: Wired, buffer: np.ndarray[Any, Any]) -> socket.socket:
    """Have the first half of a message arrive in a buffer; return the socket for the second one."""
    _, far = wired.connect()
    far.sendall(tensor_frame() + SEVENS.tobytes()[: SIZE // 2])
    until(lambda: buffer[SIZE // 2 - 1] == 7)
    return far


# A receive that is given up while its message arrives


@pytest.mark.parametrize("ends", ["by its deadline", "failed", "failed with the peer"])
def test_a_half_message_of_a_given_up_receive_is_the_next_ones(
    wired: Wired, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    buffer, other = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    sockets: list[socket.socket] = []
    if ends == "by its deadline":
        at_its_deadline(monkeypatch, lambda: sockets.append(half_of_a_message(wired, buffer)))
        with pytest.raises(CommunicationTimeoutError):
            wired.group.recv_tensor(buffer, THERE)
    else:
        work = wired.group.recv_tensor(buffer, THERE, async_op=True)
        sockets.append(half_of_a_message(wired, buffer))
        (works,) = [[work] if ends == "failed" else wired.stream.open_works()]
        assert [one.fail(CancelledOperationError("given up")) for one in works] == [True]
        with pytest.raises(CancelledOperationError):
            work.wait()
    assert wired.stream.open_works() == []
    buffer.fill(1)
    sockets[0].sendall(SEVENS.tobytes()[SIZE // 2 :] + tensor_frame() + NINES.tobytes())
    assert np.array_equal(wired.group.recv_tensor(other, THERE), SEVENS)
    assert np.array_equal(wired.group.recv_tensor(other, THERE), NINES)
    assert bool((buffer == 1).all()), "who was told that it failed has its buffer for itself"


def test_buffer_is_left_alone_where_no_memory_is(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: int) -> memoryview:
        raise MemoryError

    buffer = np.zeros(SIZE, np.uint8)
    work = wired.group.recv_tensor(buffer, THERE, async_op=True)
    far = half_of_a_message(wired, buffer)
    monkeypatch.setattr(received_messages, "private_memory", none)
    assert work.fail(CancelledOperationError("given up"))
    buffer.fill(1)
    far.sendall(SEVENS.tobytes()[SIZE // 2 :])
    until(lambda: wired.lost)
    assert bool((buffer == 1).all())


def test_complete_body_is_its_receives_although_it_is_late(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = np.zeros(SIZE, np.uint8)

    def arrive() -> None:
        (posted,) = wired.stream.posted()
        half_of_a_message(wired, buffer).sendall(SEVENS.tobytes()[SIZE // 2 :])
        until(lambda: posted.settled)

    at_its_deadline(monkeypatch, arrive)
    assert np.array_equal(wired.group.recv_tensor(buffer, THERE), SEVENS)


def test_message_of_the_last_moment_is_received(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    _, far = wired.connect()

    def arrive() -> None:
        (posted,) = wired.stream.posted()
        far.sendall(object_frame("at the last moment"))
        until(lambda: posted.settled)

    at_its_deadline(monkeypatch, arrive)
    assert wired.group.recv(THERE) == "at the last moment"


def test_buffer_is_not_claimed_for_a_receive_that_is_failing(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, other = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    work = wired.group.recv_tensor(buffer, THERE, async_op=True)
    _, far = wired.connect()
    settle, claim, claimed = Work[Any].fail, PeerStream.claim, threading.Event()

    def fail(failing: Work[Any], error: BaseException) -> bool:
        if failing is work:
            # It is decided that it fails, and not known yet.
            far.sendall(tensor_frame() + SEVENS.tobytes()[: SIZE // 2])
            assert claimed.wait(20)
        return settle(failing, error)

    def claim_then_tell(*args: Any) -> object:
        try:
            return claim(*args)
        finally:
            claimed.set()

    monkeypatch.setattr(Work, "fail", fail)
    monkeypatch.setattr(PeerStream, "claim", claim_then_tell)
    assert work.fail(CancelledOperationError("given up"))
    buffer.fill(1)
    far.sendall(SEVENS.tobytes()[SIZE // 2 :])
    assert np.array_equal(wired.group.recv_tensor(other, THERE), SEVENS)
    assert bool((buffer == 1).all())


def test_complete_body_is_not_swallowed_when_its_receive_fails(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = np.zeros(SIZE, np.uint8)
    work = wired.group.recv_tensor(buffer, THERE, async_op=True)
    real, failed = PeerStream.let_go, list[bool]()

    def let_go(stream: PeerStream, posted: PostedReceive) -> memoryview | None:
        body = real(stream, posted)
        failed.append(work.fail(CancelledOperationError("given up")))
        return body

    monkeypatch.setattr(PeerStream, "let_go", let_go)
    _, far = wired.connect()
    far.sendall(tensor_frame() + SEVENS.tobytes())
    assert np.array_equal(work.wait(), SEVENS)
    assert failed == [False]


def test_receive_whose_message_broke_off_gets_the_next_one(wired: Wired) -> None:
    buffer = np.zeros(SIZE, np.uint8)
    work = wired.group.recv_tensor(buffer, THERE, async_op=True)
    first = half_of_a_message(wired, buffer)
    _, second = wired.connect()
    second.sendall(tensor_frame() + NINES.tobytes())
    first.shutdown(socket.SHUT_RDWR)
    assert np.array_equal(work.wait(), NINES)


def test_receive_whose_message_broke_off_fails_with_its_peer(wired: Wired) -> None:
    buffer = np.zeros(SIZE, np.uint8)
    work = wired.group.recv_tensor(buffer, THERE, async_op=True)
    half_of_a_message(wired, buffer).shutdown(socket.SHUT_RDWR)
    with pytest.raises(WorkerDiedError):
        work.wait()


@pytest.mark.parametrize("end", ["filled", "given up", "broken off"])
def test_body_is_received_while_it_is_filled(wired: Wired, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    half = SIZE // 2
    monkeypatch.setattr(receiver, "PIECE", half)
    buffer, other = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    work = wired.group.recv_tensor(buffer, THERE, async_op=True)
    _, far = wired.connect()
    block = spill(SIZE, 1)
    assert block is not None
    body, memory = shared_body(block.lease()), block.memory()
    flags = body.flags | Flag.TENSOR | Flag.GROWING | Flag.DESCRIPTOR_FOLLOWS
    head = f"uint8[{SIZE}]".encode()
    frame = Frame(FrameKind.MESSAGE, flags, route=1, head=head, sizes=(SIZE,), place=body.place)
    memory[:half] = SEVENS.tobytes()[:half]
    socket.send_fds(far, [frame.pack() + b"."], body.fds)
    until(lambda: buffer[half - 1] == 7)
    if end == "broken off":
        far.shutdown(socket.SHUT_RDWR)
        with pytest.raises(WorkerDiedError):
            work.wait()
    else:
        if end == "given up":
            assert work.fail(CancelledOperationError("given up"))
            buffer.fill(1)
        memory[half:SIZE] = SEVENS.tobytes()[half:]
        far.sendall(b"." + object_frame("next"))
        taken = wired.group.recv_tensor(other, THERE) if end == "given up" else work.wait()
        assert np.array_equal(taken, SEVENS)
        assert wired.group.recv(THERE) == "next"
        assert end == "filled" or bool((buffer == 1).all())
    until(lambda: block.segment.memory[FIRST_LEASE] == LeaseState.RELEASED)


@pytest.mark.parametrize(
    ("head", "sizes", "size"),
    [
        (b"\xff", (4,), 4),
        (b"uint8[4]", (), 4),
        (b"uint8[4]", (2, 2), 66),
        (b"uint8[4]", (4,), 2),
        (b"uint8[4]", (4,), 0),
    ],
)
def test_receive_is_not_taken_for_a_broken_frame(wired: Wired, head: bytes, sizes: tuple[int, ...], size: int) -> None:
    work = wired.group.recv(THERE, async_op=True)
    _, far = wired.connect()
    frame = Frame(FrameKind.MESSAGE, Flag.TENSOR, route=1, head=head, sizes=sizes, body_size=size)
    far.sendall(frame.pack() + bytes(size))
    with pytest.raises(WorkerDiedError):
        work.wait()


def test_receive_ends_where_its_message_cannot_be_matched(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(receiver, "find_mismatch", no_memory)
    work = wired.group.recv(THERE, async_op=True)
    _, far = wired.connect()
    far.sendall(object_frame("too much"))
    with pytest.raises(MemoryError):
        work.wait()


def test_receives_that_ended_do_not_pile_up(wired: Wired) -> None:
    for _ in range(3):
        assert wired.group.recv(THERE, async_op=True).fail(CancelledOperationError("given up"))
    assert len(wired.stream._posted) == 1


def test_message_of_a_receive_that_fails_is_the_next_ones(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (wired.group.recv(THERE, async_op=True) for _ in range(2))
    real = PeerStream.deliver

    def deliver(stream: PeerStream, received: ReceivedMessage) -> PostedReceive | None:
        posted = real(stream, received)
        first.fail(CancelledOperationError("given up"))
        return posted

    monkeypatch.setattr(PeerStream, "deliver", deliver)
    _, far = wired.connect()
    far.sendall(object_frame("kept"))
    assert second.wait() == "kept"


# A connection that takes the place of another


def test_new_connection_does_not_overtake_what_is_unread(wired: Wired) -> None:
    _, first = wired.connect()
    first.sendall(b"".join(object_frame(number) for number in range(20)))
    until(lambda: wired.stream.unread() == 3)
    first.shutdown(socket.SHUT_RDWR)
    connection, second = wired.connect()
    second.sendall(object_frame("after"))
    # Without one receive: else what is unread could come first by chance.
    until(lambda: wired.stream.unread() == 21)
    assert [wired.group.recv(THERE) for _ in range(21)] == [*range(20), "after"]
    until(lambda: wired.stream.connection is connection)


def test_first_words_of_another_stream_are_not_overtaken(wired: Wired) -> None:
    _, first = wired.connect()
    other = wired.streams.of("here:0", "there:1")
    first.sendall(b"".join(object_frame(number) for number in range(4)))
    until(lambda: wired.stream.unread() == 3)
    # These lie unread behind what fills the backlog, and nobody here knows their stream yet.
    first.sendall(route_frame("there:1", 2) + object_frame("first", 2))
    first.shutdown(socket.SHUT_RDWR)
    connection, second = wired.connect("there:1")
    second.sendall(object_frame("second") + route_frame("there:0", 2) + object_frame(4, 2) + object_frame("third"))
    until(lambda: (wired.stream.unread(), other.unread()) == (5, 3))
    assert [wired.group.recv(THERE) for _ in range(5)] == list(range(5))
    receives = [PostedReceive(OperationKind.RECV, "there:1", 20.0) for _ in range(3)]
    assert all(wired.receiver.post(other, posted) for posted in receives)
    assert [posted.wait() for posted in receives] == ["first", "second", "third"]
    assert not connection.replaced


def test_only_what_was_sent_fails_with_a_replaced_connection(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, said = threading.Event(), list[str]()
    wired.streams.on_lost(lambda name, reason: said.append(name))
    former, first = wired.connect()
    received = wired.group.recv(THERE, async_op=True)
    until(lambda: wired.stream.connection is former)
    sent = [Work[None](OperationKind.SEND_TENSOR, "there:0", 20.0) for _ in range(2)]
    real = Receiver.arrived

    def arrived(receiver: Receiver, connection: Connection, *args: Any) -> None:
        assert connection is not former or gate.wait(20)
        real(receiver, connection, *args)

    monkeypatch.setattr(Receiver, "arrived", arrived)
    first.sendall(Frame(FrameKind.FORGET).pack())
    first.shutdown(socket.SHUT_RDWR)
    present, second = wired.connect()
    second.sendall(object_frame("through the new one"))
    for sequence, (work, connection) in enumerate(zip(sent, (former, present), strict=True)):
        wired.streams.sent(wired.stream, sequence, work, connection)
    gate.set()
    assert received.wait() == "through the new one"
    with pytest.raises(WorkerDiedError):
        sent[0].wait()
    assert not sent[1].settled
    assert (wired.stream.connection, said) == (present, [])
    second.close()
    with pytest.raises(WorkerDiedError):
        sent[1].wait()
    assert said == ["there:0"]


@pytest.mark.parametrize("replaced", [False, True])
def test_replaced_connection_is_not_sent_through(replaced: bool) -> None:
    unused: Any = None
    streams = PeerStreams(unused, unused, 1.0, died, Backlog(Settings()))
    peer = SimpleNamespace(incarnation="one")
    former, present = (cast("Any", SimpleNamespace(peer=peer, usable=usable)) for usable in (not replaced, True))
    stream = streams.of("here:0", "there:0")
    streams.bind(stream, former)
    streams.bind(stream, present)
    assert stream.connection is (present if replaced else former)


def test_replaced_connection_is_read_to_its_end_at_once(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received_messages, "_SLICE", 60.0)
    pair = make_pair(tcp=False, inbox_messages=2)
    for number in range(6):
        pair.there.send(number, HERE)
    until(lambda: pair.near.streams() and pair.near.streams()[0].unread() == 3)
    (stream,) = pair.near.streams()
    former = stream.connection
    assert former is not None
    beside = WorkerAddress("there", 1)
    other = CollectiveGroup(pair.far, beside, (HERE,), pair.resolver)
    other.send("first", HERE)
    for connection in pair.far._connections.all():
        connection.shut("a message to it was given up halfway")
    # It brings nothing for this stream: only by its handshake is it known that the former is over.
    until(lambda: not pair.far._connections.all())
    other.send("second", HERE)
    until(lambda: former.closed)
    assert [pair.here.recv(THERE) for _ in range(6)] == list(range(6))
    # Nobody can dial `beside`: a receive before its messages are here would ask for its address.
    until(lambda: [stream.unread() for stream in pair.near.streams() if stream.peer == beside.get_name()] == [2])
    here = CollectiveGroup(pair.near, HERE, (beside,), pair.resolver)
    assert [here.recv(beside) for _ in range(2)] == ["first", "second"]


# Many that are held back


def test_bodies_that_are_read_at_once_share_the_limit(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    wired.backlog = Backlog(Settings(inbox_bytes=SIZE + SIZE // 2))
    wired.receiver._backlog = wired.streams._backlog = wired.backlog
    sizes: list[int] = []
    real = receiver.private_memory

    def memory(size: int) -> memoryview:
        sizes.append(size)
        return real(size)

    monkeypatch.setattr(receiver, "private_memory", memory)
    _, first = wired.connect()
    first.sendall(tensor_frame())
    until(lambda: sizes == [SIZE])
    _, second = wired.connect("there:1", "two")
    second.sendall(tensor_frame() + NINES.tobytes())
    until(lambda: wired.backlog.holds_back)
    first.sendall(SEVENS.tobytes())
    until(lambda: wired.stream.unread() == 1)
    assert (sizes, wired.backlog.holds_back) == ([SIZE], True)
    buffer = np.zeros(SIZE, np.uint8)
    assert np.array_equal(wired.group.recv_tensor(buffer, THERE), SEVENS)
    until(lambda: len(sizes) == 2)
    first.sendall(tensor_frame())
    until(lambda: wired.backlog.holds_back)
    other = wired.streams.of("here:0", "there:1")
    until(lambda: other.unread() == 1)
    # A connection that ends in the middle of a body gives back what it had reserved.
    second.sendall(tensor_frame())
    second.close()
    posted = PostedReceive(OperationKind.RECV, "there:1", 20.0)
    assert wired.receiver.post(other, posted)
    until(lambda: len(sizes) >= 3)
    first.close()
    until(lambda: wired.backlog._bytes == 0)


def test_taken_message_wakes_only_whose_limit_it_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_messages, "_SLICE", 20.0)
    waiting = Backlog(Settings(inbox_messages=4, inbox_bytes=1000))
    looks: list[int] = []
    ended: list[int] = []
    held: list[list[ReceivedMessage]] = []

    def pause(number: int, connection: Any) -> None:
        waiting.wait_for_room(connection, lambda: looks.append(number))
        ended.append(number)

    threads: list[threading.Thread] = []
    for number in range(10):
        connection: Any = SimpleNamespace(backlog=0, closed=False, peer=SimpleNamespace(incarnation=str(number)))
        held.append([])
        for _ in range(5):
            received = ReceivedMessage(Frame(FrameKind.MESSAGE, head=b"x"))
            received.connection = connection
            waiting.add(received, connection)
            held[-1].append(received)
        threads.append(threading.Thread(target=pause, args=(number, connection), daemon=True))
        threads[-1].start()
    until(lambda: len(looks) == 10)
    for number, messages in enumerate(held):
        for _ in range(4):
            waiting.taken(messages.pop())
        threads[number].join(20)
        assert ended == list(range(number + 1))
    assert sorted(looks) == list(range(10)), "nobody looked again in vain"


def test_taken_bytes_wake_whom_they_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_messages, "_SLICE", 20.0)
    waiting = Backlog(Settings(inbox_messages=100, inbox_bytes=1000))
    connection: Any = SimpleNamespace(backlog=0, closed=False, peer=SimpleNamespace(incarnation="one"))
    messages = [ReceivedMessage(Frame(FrameKind.MESSAGE, head=bytes(100))) for _ in range(11)]
    for received in messages:
        received.connection = connection
        waiting.add(received, connection)
    looks: list[str] = []
    waits: dict[str, Callable[[Callable[[], bool]], None]] = {
        "small": lambda awaited: waiting.reserve(connection, 200, awaited),
        "room": lambda awaited: waiting.wait_for_room(connection, awaited),
        "large": lambda awaited: waiting.reserve(connection, 2000, awaited),
    }
    threads = {
        name: threading.Thread(target=wait, args=(lambda name=name: looks.append(name),), daemon=True)
        for name, wait in waits.items()
    }
    for thread in threads.values():
        thread.start()
    until(lambda: len(looks) == 3)
    for name, left in (("small", 8), ("room", 4), ("large", 0)):
        while len(messages) > left:
            assert threads[name].is_alive()
            waiting.taken(messages.pop())
        threads[name].join(20)
        assert not threads[name].is_alive()
        if name == "small":
            waiting.free(200)
    assert len(looks) == 3, "nobody looked again in vain"

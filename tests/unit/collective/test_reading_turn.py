"""Callers that read a connection for themselves, while its thread stands by.

The peer is a socket in the hands of the test. Messages here follow each other closely, however long they take.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective import connection
from rlinf_core.collective.frame import Frame, FrameKind
from rlinf_core.collective.message import encode
from rlinf_core.errors import CancelledOperationError, CommunicationTimeoutError, WorkerDiedError
from tests.unit.collective.conftest import THERE
from tests.unit.collective.test_receiver import SEVENS, SIZE, Wired, object_frame, route_frame, tensor_frame
from tests.waiting import until

OTHER = WorkerAddress("other", 0)


class Led:
    """A connection whose thread stands by, and that brings messages of two peers.

    Attributes:
        far: its other end.
    """

    def __init__(self) -> None:
        self.wired = Wired(others=[OTHER])
        self.connection, self.far = self.wired.connect()
        self.far.sendall(route_frame("other:0", 2))
        posted = self.wired.stream.posted
        while self.is_read():
            self.during(self.far_sends(object_frame("first"), posted), self.wired.group.recv, THERE)

    def close(self) -> None:
        # As if nobody had read for a while.
        self.connection.turn._needed = True
        self.connection.turn._wake.set()
        self.wired.close()

    def is_read(self) -> bool:
        return self.connection.turn._turn.locked()

    def has_sleeper(self) -> bool:
        return bool(self.connection.turn._sleeping)

    def far_sends(self, data: bytes, when: Callable[[], object] | None = None) -> Callable[[], None]:
        """Return a function that sends `data` once a caller reads."""

        def send() -> None:
            until(when or self.is_read)
            self.far.sendall(data)

        return send

    def cancel(self) -> None:
        for work in self.wired.stream.open_works():
            work.fail(CancelledOperationError("given up"))

    def during(self, meanwhile: Callable[[], object], call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        thread = threading.Thread(target=meanwhile, daemon=True)
        thread.start()
        try:
            return call(*arguments, **options)
        finally:
            thread.join(20)

    def recv(self, data: bytes) -> Any:
        """Return what a caller receives that reads `data` itself."""
        return self.during(self.far_sends(data), self.wired.group.recv, THERE)


@pytest.fixture
def led(monkeypatch: pytest.MonkeyPatch) -> Iterator[Led]:
    monkeypatch.setattr(connection, "_CLOSELY", 1000.0)
    monkeypatch.setattr(connection, "_LONGEST", 1000.0)
    made = Led()
    yield made
    made.close()


@pytest.fixture
def _seldom(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have callers notice soon that no message follows closely."""
    monkeypatch.setattr(connection, "_LONGEST", 0.01)


def test_waiting_caller_reads_for_itself_and_for_others(led: Led) -> None:
    readers: list[int] = []
    work = led.wired.group.recv(OTHER, async_op=True)
    work.add_done_callback(lambda: readers.append(threading.get_ident()))
    assert led.recv(object_frame("theirs", 2) + object_frame("mine")) == "mine"
    assert readers == [threading.get_ident()]
    assert work.wait() == "theirs"


def test_caller_that_reads_ends_by_its_time_limit(led: Led) -> None:
    with pytest.raises(CommunicationTimeoutError):
        led.wired.group.recv(THERE, timeout=0.05)
    assert led.recv(object_frame("later")) == "later"


@pytest.mark.usefixtures("_seldom")
def test_caller_that_reads_can_be_cancelled(led: Led) -> None:
    def cancel() -> None:
        until(led.is_read)
        led.cancel()

    with pytest.raises(CancelledOperationError):
        led.during(cancel, led.wired.group.recv, THERE)
    assert led.recv(object_frame("later")) == "later"


def test_end_of_the_connection_is_noticed_while_a_caller_reads(led: Led) -> None:
    def end() -> None:
        until(led.is_read)
        led.far.shutdown(socket.SHUT_RDWR)

    with pytest.raises(WorkerDiedError, match="it closed the connection"):
        led.during(end, led.wired.group.recv, THERE)
    assert led.wired.lost == [led.connection]


@pytest.mark.usefixtures("_seldom")
def test_thread_goes_on_when_no_message_follows_closely(led: Led) -> None:
    thread = led.wired.threads[0].ident
    readers: list[int | None] = []
    led.wired.group.recv(OTHER, async_op=True).add_done_callback(lambda: readers.append(threading.get_ident()))

    def send() -> None:
        until(lambda: any(work._callbacks for work in led.wired.stream.posted()), "the sleep of the caller")
        led.far.sendall(object_frame("theirs", 2) + object_frame("mine"))

    assert led.during(send, led.wired.group.recv, THERE) == "mine"
    assert readers == [thread]


def test_thread_goes_on_when_a_caller_leaves_others_waiting(led: Led) -> None:
    values: list[object] = []
    other = threading.Thread(target=lambda: values.append(led.wired.group.recv(OTHER)), daemon=True)

    def send() -> None:
        until(led.is_read)
        other.start()
        until(led.has_sleeper)
        led.far.sendall(object_frame("mine"))

    assert led.during(send, led.wired.group.recv, THERE) == "mine"
    led.far.sendall(object_frame("theirs", 2))
    other.join(20)
    assert values == ["theirs"]


def test_caller_never_waits_for_the_rest_of_a_large_body(led: Led) -> None:
    buffer = np.zeros(SIZE, np.uint8)
    half = SEVENS.tobytes()[: SIZE // 2]

    def send() -> None:
        led.far_sends(tensor_frame() + half)()
        until(lambda: buffer[0] == 7, "the thread's reading, straight into the buffer,")
        led.cancel()

    with pytest.raises(CancelledOperationError):
        led.during(send, led.wired.group.recv_tensor, buffer, THERE)
    led.far.sendall(half)
    assert bool((led.wired.group.recv_tensor(buffer, THERE) == 7).all())


@pytest.mark.usefixtures("_seldom")
def test_caller_never_waits_for_the_rest_of_a_small_body(led: Led) -> None:
    encoded = encode(SEVENS[:100])
    frame = Frame(FrameKind.MESSAGE, route=1, head=encoded.head, sizes=(100,), body_size=100).pack()

    def send() -> None:
        led.far_sends(frame + b"\7" * 50)()
        until(lambda: not led.connection.reader.empty)
        led.cancel()

    with pytest.raises(CancelledOperationError):
        led.during(send, led.wired.group.recv, THERE)
    assert np.array_equal(led.recv(b"\7" * 50), SEVENS[:100])


def test_caller_never_waits_for_room_in_the_backlog(led: Led) -> None:
    more_than_fit = [object_frame(number, 2) for number in range(5)]
    assert led.recv(object_frame("mine") + b"".join(more_than_fit)) == "mine"
    assert [led.wired.group.recv(OTHER) for _ in more_than_fit] == [0, 1, 2, 3, 4]


def test_message_in_two_halves_reaches_a_caller_that_reads(led: Led) -> None:
    frame = object_frame("whole")

    def send() -> None:
        until(led.is_read)
        for byte in frame:
            led.far.sendall(bytes([byte]))

    assert led.during(send, led.wired.group.recv, THERE) == "whole"


def test_connection_ends_when_its_reading_caller_is_interrupted(led: Led) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    led.wired.group.recv(OTHER, async_op=True).add_done_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        led.recv(object_frame("theirs", 2))
    with pytest.raises(WorkerDiedError, match="the thread that read it was interrupted"):
        led.wired.group.recv(THERE)

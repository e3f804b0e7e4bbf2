"""Messages and receives of one pair meet in the order of issue."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlinf_core.collective.connection import ConnectionLostError
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.frame import Frame, FrameKind
from rlinf_core.collective.message import Message
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.peer_streams import PeerStreams, died
from rlinf_core.collective.transfer.received_messages import Backlog, ReceivedMessage
from rlinf_core.collective.transfer.sender import Sender
from rlinf_core.collective.work import Work
from rlinf_core.errors import MismatchError, WorkerDiedError
from rlinf_core.waiting import OperationKind


def send_work() -> Work[Any]:
    return Work(OperationKind.SEND, "peer:0", 5.0)


def test_jobs_leave_in_the_order_of_issue() -> None:
    stream = PeerStream("me:0", "peer:0")
    left: list[int] = []
    gate = threading.Event()
    first = send_work()
    stream.queue(lambda: (gate.wait(5), left.append(0))[1], first)
    works = []
    for number in range(1, 5):
        works.append(send_work())
        stream.queue(lambda number=number: left.append(number), works[-1])
    assert not stream.run_at_once(lambda: True), "others are before it"
    thread = threading.Thread(target=lambda: stream.run(lambda: left.append(5), send_work()))
    thread.start()
    time.sleep(0.01)
    gate.set()
    thread.join(5)
    assert left == [0, 1, 2, 3, 4, 5]
    assert all(work.done() for work in works)
    assert stream.drain(5)


def test_a_job_that_fails_fails_its_work_only() -> None:
    stream = PeerStream("me:0", "peer:0")

    def fail() -> None:
        raise ValueError("broken")

    bad, good = send_work(), send_work()
    stream.queue(fail, bad)
    stream.queue(lambda: None, good)
    good.wait()
    with pytest.raises(ValueError, match="broken"):
        bad.wait()


def test_loss_is_explained_by_the_streams_own_thread() -> None:
    explaining: list[threading.Thread] = []

    class Broken:
        shares_memory = False
        usable = True

        def next_route(self) -> int:
            return 1

        def write(self, *_: object) -> bool:
            raise ConnectionLostError("it broke")

        try_write = write

    def explain(peer: str, reason: str) -> Exception:
        explaining.append(threading.current_thread())
        return WorkerDiedError(peer, cause=reason)

    stream, work, unused = PeerStream("me:0", "peer:0"), send_work(), cast("Any", None)
    stream.connection = cast("Any", Broken())
    streams = cast("Any", SimpleNamespace(connect=lambda stream, work: stream.connection, explain=explain))
    Sender(Settings(), unused, unused, streams, unused, lambda: None).send_async(stream, Message(b"small"), work)
    with pytest.raises(WorkerDiedError, match="it broke"):
        work.wait(20)
    assert len(explaining) == 1
    assert explaining[0] is not threading.current_thread()


def test_a_mismatch_is_taken_once() -> None:
    stream, error = PeerStream("me:0", "peer:0"), MismatchError("a", "b")
    stream.acknowledged(1, error)
    assert stream.take_mismatches() == [error]
    assert stream.take_mismatches() == []


def test_late_mismatch_of_an_earlier_call_is_disregarded() -> None:
    stream = PeerStream("me:0", "peer:0")
    stream.sequence = 2
    stream.acknowledged(1, MismatchError("first", "b"))
    stream.disregard_mismatches()
    stream.acknowledged(2, MismatchError("second", "b"))
    stream.sequence = 3
    stream.acknowledged(3, MismatchError("third", "b"))
    assert [error.sent for error in stream.take_mismatches()] == ["third"]


def test_a_mismatch_that_nobody_takes_does_not_pile_up() -> None:
    stream = PeerStream("me:0", "peer:0")
    for number in range(1, 1001):
        stream.acknowledged(number, MismatchError(str(number), "b"))
    kept = stream.take_mismatches()
    assert len(kept) < 100
    assert kept[-1].sent == "1000"


def test_mismatch_is_recorded_before_its_acknowledgement() -> None:
    stream, error = PeerStream("me:0", "peer:0"), MismatchError("float32[1]", "float32[2]")
    # Of a send that has returned: nobody holds it.
    work: Work[None] = Work(OperationKind.SEND, "peer:0", 5.0)
    stream.unacknowledged[7] = work, None
    result: list[tuple[list[MismatchError], list[int]]] = []
    work.add_done_callback(lambda: result.append((stream.take_mismatches(), list(stream.unacknowledged))))
    stream.acknowledged(7, error)
    assert result == [([error], [7])]
    assert stream.unacknowledged == {}


class Connected:
    """A connection with a life of a peer."""

    def __init__(self, incarnation: str = "second") -> None:
        self.peer = self
        self.incarnation = incarnation
        self.usable = True
        self.asked, self.answers = threading.Event(), threading.Event()

    def hung_up(self) -> bool:
        self.asked.set()
        self.answers.wait(5)
        return False


class NoPool:
    """A pool without connections."""

    def get(self, incarnation: str) -> None:
        """Return none."""


def test_successor_keeps_its_messages_when_two_threads_meet_it() -> None:
    streams = PeerStreams(
        cast("Any", None), cast("Any", None), 1.0, lambda peer, reason: WorkerDiedError(peer), Backlog(Settings())
    )
    stream = streams.of("me", "peer")
    stream.incarnation = "first"
    slow, quick = Connected(), Connected()
    quick.answers.set()

    def meet() -> None:
        streams.bind(stream, cast("Any", quick))
        stream.deliver(ReceivedMessage(Frame(FrameKind.MESSAGE, sequence=1)))

    binding = threading.Thread(target=streams.bind, args=(stream, slow))
    reading = threading.Thread(target=meet)
    binding.start()
    assert slow.asked.wait(5)
    reading.start()
    reading.join(0.3)
    slow.answers.set()
    binding.join()
    reading.join()
    assert stream.unread() == 1


def test_messages_leave_through_one_connection_of_two() -> None:
    ours, theirs = Connected(), Connected()
    pool, info, resolver, work = (cast("Any", SimpleNamespace()) for _ in range(4))
    streams = PeerStreams(pool, info, 1.0, lambda peer, reason: WorkerDiedError(peer), Backlog(Settings()))
    stream = streams.of("me:0", "peer:0")
    info.incarnation, work.deadline = "mine", float("inf")
    resolver.lookup = lambda *_: Connected()
    stream.resolver = resolver

    def connect(*_: object) -> Any:
        # The connection that the peer dialed brings its first words while this one is made.
        streams.bind(stream, cast("Any", theirs))
        return ours

    pool.connect = connect
    assert streams.connect(stream, work) is theirs
    assert stream.connection is theirs


# Acknowledgements


def living(incarnation: str) -> Connected:
    """Return a connection whose peer has not hung up."""
    connection = Connected(incarnation)
    connection.answers.set()
    return connection


def test_what_a_predecessor_was_sent_fails_with_its_successor() -> None:
    streams = PeerStreams(cast("Any", None), cast("Any", None), 1.0, died, Backlog(Settings()))
    stream, lost, sent = streams.of("me:0", "peer:0"), list[str](), send_work()
    streams.on_lost(lambda name, reason: lost.append(name))
    former, successor = living("first"), living("second")
    streams.bind(stream, cast("Any", former))
    streams.sent(stream, 1, sent, cast("Any", former))
    streams.bind(stream, cast("Any", successor))
    with pytest.raises(WorkerDiedError, match="relaunched"):
        sent.wait()
    late = send_work()
    streams.sent(stream, 2, late, cast("Any", former))
    with pytest.raises(WorkerDiedError, match="relaunched"):
        late.wait()
    assert (lost, stream.unacknowledged) == (["peer:0"], {})


def test_loss_is_told_before_a_successor_is_met() -> None:
    streams = PeerStreams(cast("Any", NoPool()), cast("Any", None), 1.0, died, Backlog(Settings()))
    stream, events = streams.of("me:0", "peer:0"), list[str]()
    former, successor = living("first"), living("second")
    streams.bind(stream, cast("Any", former))
    met = threading.Thread(target=lambda: (streams.bind(stream, cast("Any", successor)), events.append("met")))

    def tell(name: str, reason: str) -> None:
        met.start()
        met.join(0.2)
        events.append("lost")

    streams.on_lost(tell)
    streams.lost(cast("Any", former), "it ended")
    met.join(5)
    assert events == ["lost", "met"]


def test_only_a_wait_for_an_acknowledgement_has_readers_look() -> None:
    looks: list[str] = []
    backlog: Any = SimpleNamespace(holds_back=True, stir=looks.append)
    streams = PeerStreams(cast("Any", None), cast("Any", None), 1.0, died, backlog)
    connection = cast("Any", living("one"))
    streams.bind(streams.of("me:0", "peer:0"), connection)
    streams.bind(streams.of("me:0", "peer:1"), cast("Any", living("two")))
    looks.clear()
    work = send_work()
    streams.look_for_acknowledgement(work)
    assert looks == [], "its frame is not written yet"
    streams.sent(streams.of("me:0", "peer:0"), 1, work, connection)
    assert looks == ["one"]
    streams.look_for_acknowledgement(send_work())
    assert looks == ["one"], "it waits for no acknowledgement"
    streams.look_for_acknowledgement(work)
    assert looks == ["one", "one"]

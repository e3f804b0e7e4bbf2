"""What the users of send, recv, send_tensor, recv_tensor and broadcast may rely on, whatever is inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import StaticResolver
from rlinf_core.collective.frame import PIECE, copy_bytes
from rlinf_core.collective.handshake import ClusterSecret
from rlinf_core.collective.transfer import receiver, sender
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.errors import (
    AuthenticationError,
    CancelledOperationError,
    CommunicationTimeoutError,
    MismatchError,
    PayloadError,
    PeerNotFoundError,
    RuntimeFailure,
    WorkerDiedError,
)
from rlinf_core.waiting import OperationKind
from tests.unit.collective.conftest import HERE, THERE, Pair
from tests.waiting import in_thread, until

MakePair = Callable[..., Pair]
# Inside a frame, at its limit, in shared memory, in several reads of a socket.
SIZES = (0, 100, 32 << 10, (32 << 10) + 1, 300_000, 3 << 20)


def repeat(times: int, operation: Callable[[], object]) -> None:
    for _ in range(times):
        operation()


# Order


def test_messages_of_every_size_arrive_in_order(pair: Pair) -> None:
    dice = random.Random(1)
    sizes = [dice.choice(SIZES) for _ in range(40)]
    works = [pair.here.send((number, bytes(size)), THERE, async_op=number % 3 > 0) for number, size in enumerate(sizes)]
    came = [pair.there.recv(HERE) for _ in sizes]
    assert [(number, len(data)) for number, data in came] == list(enumerate(sizes))
    for work in works:
        if work is not None:
            work.wait()


@given(steps=st.lists(st.sampled_from(["send", "post", "give up"]), max_size=40))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_nth_message_meets_the_nth_receive(make_pair: MakePair, steps: list[str]) -> None:
    pair = make_pair(tcp=False)
    sent, met = 0, 0
    posted: list[Any] = []
    for step in steps:
        if step == "send":
            pair.here.send(sent, THERE)
            sent += 1
        elif step == "post":
            posted.append(pair.there.recv(HERE, async_op=True))
        elif sent <= len(posted):
            # Nothing is there for it: it takes none of those that come later.
            with pytest.raises(CommunicationTimeoutError):
                pair.there.recv(HERE, timeout=0.0)
    while sent < len(posted):
        pair.here.send(sent, THERE)
        sent += 1
    for work in posted:
        assert work.wait() == met
        met += 1
    for number in range(met, sent):
        assert pair.there.recv(HERE) == number
    pair.close()


def test_failed_receive_takes_no_message(pair: Pair) -> None:
    failed, good = (pair.there.recv(HERE, async_op=True) for _ in range(2))
    failed.fail(ValueError("given up"))
    pair.here.send("first", THERE)
    assert good.wait() == "first"
    with pytest.raises(ValueError, match="given up"):
        failed.wait()


def test_both_directions_are_independent(pair: Pair) -> None:
    for number in range(50):
        pair.here.send(number, THERE)
        pair.there.send(-number, HERE)
    assert [pair.there.recv(HERE) for _ in range(50)] == list(range(50))
    assert [pair.here.recv(THERE) for _ in range(50)] == [-number for number in range(50)]


def test_threads_of_both_sides_share_a_connection(pair: Pair) -> None:
    got: list[int] = []

    def echo() -> None:
        for _ in range(100):
            pair.there.send(pair.there.recv(HERE), HERE)

    def ask(first: int) -> None:
        for number in range(first, first + 25):
            pair.here.send(number, THERE)
            got.append(pair.here.recv(THERE))

    threads = [in_thread(echo)[0], *(in_thread(ask, 25 * number)[0] for number in range(4))]
    for thread in threads:
        thread.join(20)
    assert sorted(got) == list(range(100))


# What travels


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_is_the_receivers_own(pair: Pair, size: int) -> None:
    sent = torch.arange(size, dtype=torch.uint8)
    pair.here.send({"nested": [sent]}, THERE)
    sent.fill_(9)
    received = pair.there.recv(HERE)["nested"][0]
    assert torch.equal(received, torch.arange(size, dtype=torch.uint8))
    received.fill_(3)
    assert not sent.numel() or int(sent[0]) == 9


@pytest.mark.parametrize("size", [*SIZES, 2 * PIECE, 2 * PIECE + 1])
def test_a_tensor_fills_the_buffer_of_its_receiver(pair: Pair, size: int) -> None:
    sent = np.resize(np.arange(251, dtype=np.uint8), size)
    for posted_first in (True, False):
        buffer = np.zeros(size, np.uint8)
        thread, outcome = in_thread(pair.there.recv_tensor, buffer, HERE) if posted_first else (None, [])
        pair.here.send_tensor(sent, THERE)
        if thread is None:
            outcome.append(pair.there.recv_tensor(buffer, HERE))
        else:
            thread.join(20)
        assert outcome == [buffer] or outcome[0] is buffer
        assert np.array_equal(buffer, sent)


def test_mismatch_is_raised_on_both_sides_once(pair: Pair) -> None:
    pair.here.send_tensor(np.zeros(5, np.uint8), THERE)
    with pytest.raises(MismatchError, match=r"uint8\[5\]"):
        pair.there.recv_tensor(np.zeros(3, np.uint8), HERE)
    with pytest.raises(MismatchError, match=r"uint8\[5\].*uint8\[3\]"):
        pair.here.settle(10)
    assert pair.here.settle(10)
    sent = pair.here.send_tensor(np.zeros(5, np.uint8), THERE, async_op=True)
    pair.here.send("next", THERE)
    with pytest.raises(MismatchError):
        pair.there.recv(HERE)
    with pytest.raises(MismatchError):
        sent.wait()
    assert pair.there.recv(HERE) == "next"
    assert pair.near.take_mismatches() == []


def test_untaken_mismatches_are_bounded_and_can_be_disregarded(pair: Pair) -> None:
    for _ in range(100):
        pair.here.send_tensor(np.zeros(5, np.uint8), THERE)
    for _ in range(100):
        with pytest.raises(MismatchError):
            pair.there.recv(HERE)
    pair.there.send("after them", HERE)
    assert pair.here.recv(THERE) == "after them"
    kept = pair.near.take_mismatches()
    assert 0 < len(kept) < 100
    pair.here.send_tensor(np.zeros(5, np.uint8), THERE)
    pair.near.disregard_mismatches()
    with pytest.raises(MismatchError):
        pair.there.recv(HERE)
    pair.there.send("after it", HERE)
    assert pair.here.recv(THERE) == "after it"
    assert pair.near.take_mismatches() == []


def test_what_cannot_be_sent_costs_its_sender_alone(pair: Pair) -> None:
    for obj in (threading.Lock(), {"deep": [threading.Lock()]}):
        with pytest.raises(PayloadError, match="cannot be pickled"):
            pair.here.send(obj, THERE)
    with pytest.raises(PayloadError, match="use `send`"):
        pair.here.send_tensor(np.array([object()]), THERE)
    pair.here.send("fine", THERE)
    assert pair.there.recv(HERE) == "fine"


def test_what_cannot_be_rebuilt_costs_one_receive(pair: Pair) -> None:
    pair.here.send(Unbuildable(), THERE)
    pair.here.send("next", THERE)
    with pytest.raises(PayloadError, match="not today"):
        pair.there.recv(HERE)
    assert pair.there.recv(HERE) == "next"


class Unbuildable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not today")


def test_a_broadcast_gives_each_member_its_own(make_pair: MakePair) -> None:
    pair = make_pair(tcp=False)
    third = WorkerAddress("third", 0)
    group = pair.join(third)
    members = (HERE, THERE, third)
    here = CollectiveGroup(pair.near, HERE, members, pair.resolver)
    there = CollectiveGroup(pair.endpoints[1], THERE, members, pair.resolver)
    for size in SIZES:
        work = here.broadcast(torch.full((size,), 5, dtype=torch.uint8), HERE, async_op=True)
        received = [there.broadcast(None, HERE), group.broadcast(None, HERE)]
        work.wait()
        received[0].fill_(1)
        assert bool((received[1] == 5).all())
    pair.endpoints[2].close(linger=0.0)
    with pytest.raises((WorkerDiedError, PeerNotFoundError)):
        repeat(20, lambda: here.broadcast("lost", HERE))
    assert there.recv(HERE) == "lost", "the others got it"


# Handles


def test_handles_are_waited_for_awaited_and_chained(pair: Pair) -> None:
    async def exchange() -> list[Any]:
        receives = [pair.there.recv(HERE, async_op=True) for _ in range(3)]
        for number in range(3):
            await pair.here.send(number, THERE, async_op=True)
        return await asyncio.gather(*(work.async_wait() for work in receives))

    assert asyncio.run(exchange()) == [0, 1, 2]
    doubled = pair.there.recv(HERE, async_op=True).then(lambda value: value * 2)
    assert not doubled.done()
    pair.here.send(21, THERE)
    assert doubled.wait() == 42


def test_a_result_is_decoded_once_and_by_who_asks(pair: Pair) -> None:
    work = pair.there.recv(HERE, async_op=True)
    pair.here.send({"a": 1}, THERE)
    until(work.done)
    assert work.wait() is work.wait()
    assert work.exception() is None


# Deadlines


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_receive_ends_at_its_deadline_and_says_which(pair: Pair, async_op: bool) -> None:
    def receive() -> Any:
        work = pair.there.recv(HERE, async_op=async_op, timeout=0.05)
        return work.wait() if async_op else work

    with pytest.raises(CommunicationTimeoutError, match=r"`recv from here:0` did not finish in 0\.05 s"):
        receive()


def test_a_wait_may_be_shorter_than_its_operation(pair: Pair) -> None:
    work = pair.there.recv(HERE, async_op=True)
    with pytest.raises(CommunicationTimeoutError, match="in 0 s"):
        work.wait(0)
    pair.here.send(1, THERE)
    assert work.wait() == 1


def test_send_to_a_peer_that_takes_nothing_ends_at_its_deadline(make_pair: MakePair) -> None:
    pair = make_pair(tcp=False, inbox_messages=4, arena_bytes=1 << 20)
    with pytest.raises(CommunicationTimeoutError, match="send to there:0"):
        repeat(2000, lambda: pair.here.send(bytes(30_000), THERE, timeout=0.1))


def test_second_writer_behind_a_stuck_one_ends_at_its_deadline(make_pair: MakePair) -> None:
    pair = make_pair(tcp=True, inbox_messages=4, arena_bytes=1 << 20, inbox_bytes=1 << 20)
    other = CollectiveGroup(pair.near, WorkerAddress("here", 1), (THERE,), pair.resolver)
    pair.here.send("known", THERE)
    other.send("known", THERE)

    def flood() -> None:
        while True:
            pair.here.send(bytes(16 << 20), THERE)

    thread, outcome = in_thread(flood)
    with pytest.raises(CommunicationTimeoutError, match="send to there:0"):
        repeat(100, lambda: other.send(bytes(16 << 20), THERE, timeout=0.3))
    until(lambda: pair.near.fail(ValueError("enough"), THERE) or outcome)
    thread.join(10)
    assert isinstance(outcome[0], Exception)


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan"), "3", torch.tensor(1.0)], ids=str)
def test_what_is_no_time_is_refused_before_anything_happens(pair: Pair, timeout: Any) -> None:
    for operation in (
        lambda: pair.here.send("lost", THERE, timeout=timeout),
        lambda: pair.there.recv(HERE, timeout=timeout),
        lambda: pair.here.broadcast("lost", HERE, timeout=timeout),
        lambda: pair.here.send_tensor(np.ones(1), THERE, async_op=True, timeout=timeout),
    ):
        with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
            operation()
    pair.here.send("kept", THERE)
    assert pair.there.recv(HERE) == "kept"


# Back-pressure


def test_who_floods_is_held_back_until_somebody_takes(make_pair: MakePair) -> None:
    pair = make_pair(tcp=False, inbox_messages=10)
    count = 400
    sent: list[int] = []

    def flood() -> None:
        for number in range(count):
            pair.here.send((number, bytes(20_000)), THERE)
            sent.append(number)

    thread, _ = in_thread(flood)
    until(lambda: pair.near.waits.waiting())
    held_at = len(sent)
    assert held_at < count
    assert [pair.there.recv(HERE)[0] for _ in range(count)] == list(range(count))
    thread.join(20)
    assert len(sent) == count


async def awaited(work: Any) -> object:
    return await work


@pytest.mark.parametrize("size", [10, 20_000])
@pytest.mark.parametrize(
    "receive",
    [
        lambda group, peer: group.recv(peer),
        lambda group, peer: group.recv(peer, async_op=True).wait(),
        lambda group, peer: asyncio.run(awaited(group.recv(peer, async_op=True))),
    ],
    ids=["blocking", "handle", "task"],
)
def test_another_stream_is_served_beside_a_full_one(
    make_pair: MakePair, receive: Callable[..., object], size: int
) -> None:
    pair = make_pair(tcp=False, inbox_messages=10)
    beside = WorkerAddress("here", 1)
    pair.resolver.endpoints[beside] = pair.near.info
    other = CollectiveGroup(pair.near, beside, (THERE,), pair.resolver)
    there = CollectiveGroup(pair.far, THERE, (HERE, beside), pair.resolver)
    works = [pair.here.send(bytes(size), THERE, async_op=True) for _ in range(100)]
    thread, outcome = in_thread(receive, there, beside)
    until(lambda: pair.far.waits.waiting())
    other.send("beside", THERE)
    thread.join(10)
    assert outcome == ["beside"]
    for work in works:
        assert there.recv(HERE) == bytes(size)
        work.wait()


@pytest.mark.parametrize("settle", [False, True], ids=["handle", "settle"])
def test_acknowledgement_arrives_beside_untaken_messages(make_pair: MakePair, settle: bool) -> None:
    pair = make_pair(tcp=False, inbox_messages=10)
    kept = [pair.there.send(bytes(20_000), HERE, async_op=True) for _ in range(100)]
    tensor = np.ones(4)
    sent = pair.here.send_tensor(tensor, THERE, async_op=True)
    assert sent is not None
    assert np.array_equal(pair.there.recv_tensor(np.zeros(4), HERE), tensor)
    assert pair.here.settle(10) if settle else sent.wait(10) is None
    for work in kept:
        assert pair.here.recv(THERE) == bytes(20_000)
        work.wait()


def test_another_stream_is_served_beside_a_large_one(make_pair: MakePair) -> None:
    pair = make_pair(tcp=True, arena_bytes=1 << 20, inbox_bytes=2 << 20)
    beside = WorkerAddress("here", 1)
    pair.resolver.endpoints[beside] = pair.resolver.endpoints[HERE]
    other = CollectiveGroup(pair.near, beside, (THERE,), pair.resolver)
    there = CollectiveGroup(pair.far, THERE, (HERE, beside), pair.resolver)
    large = np.ones(3 << 20, np.uint8)
    works = [pair.here.send(large, THERE, async_op=True) for _ in range(4)]
    until(lambda: pair.far.streams() and pair.far.streams()[0].unread())
    thread, outcome = in_thread(there.recv, beside)
    other.send(large[::-1], THERE)
    thread.join(10)
    assert [array.nbytes for array in outcome] == [large.nbytes]
    for work in works:
        assert there.recv(HERE).nbytes == large.nbytes
        work.wait()


@pytest.mark.parametrize("in_place", [False, True])
def test_two_that_send_before_they_receive_go_on(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    pair = make_pair(tcp=False, arena_bytes=2 << 20, spill_after=0.02)
    for module in (sender, receiver):
        monkeypatch.setattr(module, "PIECE", 1 << 17)

    def exchange(group: CollectiveGroup, peer: WorkerAddress) -> int:
        array = np.ones(1 << 20, np.uint8)
        send, recv = (group.send_tensor, partial(group.recv_tensor, array)) if in_place else (group.send, group.recv)
        for _ in range(6):
            send(array, peer)
        return sum(int(recv(peer).sum()) for _ in range(6))

    thread, outcome = in_thread(exchange, pair.there, HERE)
    assert exchange(pair.here, THERE) == 6 << 20
    thread.join(20)
    assert outcome == [6 << 20]


def test_send_that_is_interrupted_halfway_harms_no_later_one(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tcp=False)
    copies = iter([copy_bytes])

    def copy(target: memoryview, source: memoryview) -> None:
        next(copies, interrupt)(target, source)

    def interrupt(target: memoryview, source: memoryview) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sender, "copy_bytes", copy)
    work = pair.there.recv_tensor(np.zeros(2 * PIECE, np.uint8), HERE, async_op=True)
    with pytest.raises(KeyboardInterrupt):
        pair.here.send_tensor(np.ones(2 * PIECE, np.uint8), THERE)
    with pytest.raises(WorkerDiedError):
        work.wait()
    until(lambda: pair.near.shared_memory().used == 0)
    pair.here.send("next", THERE)
    assert pair.there.recv(HERE) == "next"


def test_memory_is_recycled_when_what_was_received_is_dropped(make_pair: MakePair) -> None:
    pair = make_pair(tcp=False)
    for _ in range(40):
        pair.here.send(np.ones(4 << 20, np.uint8), THERE)
        assert int(pair.there.recv(HERE)[-1]) == 1
    until(lambda: pair.near.shared_memory().used == 0)
    assert pair.near.shared_memory().committed <= 16 << 20


# Ends


def test_a_peer_that_was_never_there_is_named(make_pair: MakePair) -> None:
    pair = make_pair(tcp=False)
    nobody = WorkerAddress("nobody", 3)
    group = CollectiveGroup(pair.near, HERE, (nobody,), pair.resolver)
    for operation in (lambda: group.send(1, nobody), lambda: group.recv(nobody)):
        with pytest.raises(PeerNotFoundError, match="`nobody:3` has no known endpoint") as caught:
            operation()
        assert caught.value.address == "nobody:3"
    with pytest.raises(PeerNotFoundError, match="nobody:3"):
        group.recv(nobody, async_op=True).wait()


def test_a_peer_that_came_to_us_and_is_unknown_is_named(make_pair: MakePair) -> None:
    pair = make_pair(tcp=False)
    stream = pair.near.stream(HERE, WorkerAddress("stranger", 0))
    work = pair.near.work(OperationKind.SEND, "stranger:0")
    with pytest.raises(PeerNotFoundError, match="`stranger:0` is not connected, and its address is unknown") as caught:
        pair.near.send(stream, pair.near.message(1), work)
    assert caught.value.address == "stranger:0"


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_who_waits_for_a_peer_that_ends_hears_of_it(pair: Pair, async_op: bool) -> None:
    pair.there.send("once", HERE)
    assert pair.here.recv(THERE) == "once"

    def receive() -> Any:
        work = pair.here.recv(THERE, async_op=async_op)
        return work.wait() if async_op else work

    thread, outcome = in_thread(receive)
    until(lambda: pair.near.waits.waiting())
    lost: list[str] = []
    pair.near.on_peer_lost(lambda peer, reason: lost.append(peer))
    pair.far.close(linger=0.0)
    thread.join(10)
    assert isinstance(outcome[0], WorkerDiedError)
    assert outcome[0].address == "there:0"
    assert lost == ["there:0"]


def test_what_a_peer_sent_before_its_end_is_received(pair: Pair) -> None:
    for size in SIZES:
        pair.there.send(bytes(size), HERE)
    pair.far.close()
    assert [len(pair.here.recv(THERE)) for _ in SIZES] == list(SIZES)
    with pytest.raises((WorkerDiedError, PeerNotFoundError)):
        pair.here.recv(THERE, timeout=5)


def test_who_is_held_back_by_a_peer_that_ends_hears_of_it(make_pair: MakePair) -> None:
    pair = make_pair(tcp=True, inbox_messages=4, arena_bytes=1 << 20, inbox_bytes=1 << 20)

    def flood() -> None:
        while True:
            pair.here.send(bytes(30_000), THERE)

    thread, outcome = in_thread(flood)
    until(lambda: pair.near.waits.waiting())
    pair.far.close(linger=0.0)
    thread.join(10)
    assert isinstance(outcome[0], WorkerDiedError)


def test_a_successor_is_not_taken_for_its_predecessor(pair: Pair) -> None:
    pair.there.send("of the predecessor", HERE)
    pair.near.stream(HERE, THERE)
    until(lambda: any(stream.incarnation for stream in pair.near.streams()))
    until(lambda: pair.here.recv(THERE, timeout=5) if not pair.far.info else True)
    pair.far.close()
    successor = pair.join(THERE)

    def reached() -> bool:
        # Until the end of the predecessor is seen, a message is refused, or is lost with it.
        with contextlib.suppress(WorkerDiedError, CommunicationTimeoutError):
            pair.here.send("to the successor", THERE)
            return successor.recv(HERE, timeout=1) == "to the successor"
        return False

    until(reached)
    successor.send("of the successor", HERE)
    assert pair.here.recv(THERE) == "of the successor"


def test_predecessors_message_does_not_follow_its_successors(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.there.send("of the predecessor", HERE)
    assert pair.here.recv(THERE) == "of the predecessor"
    real = PeerStream.deliver
    held, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def deliver(stream: PeerStream, received: Any) -> Any:
        if held.is_set():
            return real(stream, received)
        held.set()
        go_on.wait(20)
        try:
            return real(stream, received)
        finally:
            done.set()

    monkeypatch.setattr(PeerStream, "deliver", deliver)
    pair.there.send("late", HERE)
    assert held.wait(20)
    pair.join(THERE).send("of the successor", HERE)
    until(lambda: pair.near.streams()[0].unread())
    go_on.set()
    assert done.wait(20)
    assert pair.here.recv(THERE) == "of the successor"
    with pytest.raises(CommunicationTimeoutError):
        pair.here.recv(THERE, timeout=0.0)


def test_operations_can_be_failed_from_outside(pair: Pair) -> None:
    pair.there.send("once", HERE)
    pair.here.recv(THERE)
    thread, outcome = in_thread(pair.here.recv, THERE)
    until(lambda: [work.title for work in pair.near.waits.waiting()] == ["recv from there:0"])
    background = pair.here.recv(THERE, async_op=True)
    error = CancelledOperationError("given up")
    assert pair.near.fail(error, WorkerAddress("other", 0)) == 0
    assert pair.near.fail(error, THERE) == 2
    thread.join(10)
    assert outcome == [error]
    with pytest.raises(CancelledOperationError):
        background.wait()
    pair.there.send("next", HERE)
    assert pair.here.recv(THERE) == "next"


def test_a_closed_endpoint_says_so(pair: Pair) -> None:
    waiting = pair.here.recv(THERE, async_op=True)
    closed: list[Exception] = []
    pair.near.on_close(closed.append)
    pair.near.close()
    with pytest.raises(RuntimeFailure, match="closed"):
        pair.here.send(1, THERE)
    with pytest.raises(CancelledOperationError, match="the endpoint was closed"):
        waiting.wait()
    assert len(closed) == 1
    pair.near.close()


def test_nothing_of_an_endpoint_is_left_after_it(make_pair: MakePair) -> None:
    others = set(threading.enumerate())
    pair = make_pair(tcp=True)
    for size in SIZES:
        pair.here.send(bytes(size), THERE, async_op=True)
        assert len(pair.there.recv(HERE)) == size
    pair.close()

    def left() -> list[str]:
        return [one.name for one in threading.enumerate() if one not in others and one.name.startswith("rlinf")]

    until(lambda: not left(), "the end of the threads")


def start_of_readers(monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]) -> None:
    """Have `start` called whenever the thread of a new connection is to be started."""
    real = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "rlinf-read":
            start()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", started)


@pytest.mark.parametrize("acceptor", [False, True], ids=["dialer", "acceptor"])
def test_connection_that_no_thread_reads_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, acceptor: bool
) -> None:
    failed = threading.Event()

    def start() -> None:
        if not failed.is_set() and acceptor == (threading.current_thread().name == "rlinf-handshake"):
            failed.set()
            raise RuntimeError("can't start new thread")

    start_of_readers(monkeypatch, start)

    def deliver() -> object:
        with contextlib.suppress(RuntimeError, RuntimeFailure):
            pair.here.send("x", THERE)
            return pair.there.recv(HERE, timeout=0.5)

    until(deliver, "a connection that is read")
    assert failed.is_set()
    pair.there.send("back", HERE)
    assert pair.here.recv(THERE, timeout=10) == "back"


def test_forked_child_closes_whoever_held_the_lock(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(tcp=False)
    opening, go_on = threading.Event(), threading.Event()

    def start() -> None:
        opening.set()
        go_on.wait(20)

    start_of_readers(monkeypatch, start)
    thread, outcome = in_thread(pair.here.send, "x", THERE)
    assert opening.wait(20)
    child = os.fork()
    if not child:
        # The test runner's handler would go on with the other tests here.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        with contextlib.suppress(Exception):
            pair.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    thread.join(20)
    assert outcome == [None]
    assert pair.there.recv(HERE) == "x"


def test_a_closed_endpoint_no_longer_dials(make_pair: MakePair) -> None:
    pair = make_pair(tcp=True, connect_timeout=60.0, handshake_timeout=0.1)
    others = set(threading.enumerate())
    silent = socket.create_server(("127.0.0.1", 0))
    info = replace(pair.far.info, incarnation="silent", unix_path=None, tcp_port=silent.getsockname()[1])
    pair.resolver.endpoints[THERE] = info
    pair.here.recv(THERE, async_op=True, timeout=60)
    dialing = [thread for thread in threading.enumerate() if thread not in others and thread.name == "rlinf-connect"]
    assert len(dialing) == 1
    pair.near.close(linger=0.0)
    dialing[0].join(20)
    assert not dialing[0].is_alive()
    silent.close()


# Strangers


def test_who_does_not_know_the_secret_is_refused(make_pair: MakePair) -> None:
    pair = make_pair(tcp=True)
    stranger = Endpoint(ClusterSecret.generate(), ip="127.0.0.1", settings=pair.settings)
    group = CollectiveGroup(stranger, HERE, (THERE,), StaticResolver({THERE: pair.resolver.endpoints[THERE]}))
    with pytest.raises(AuthenticationError):
        group.send("let me in", THERE)
    stranger.close()
    pair.here.send("a member", THERE)
    assert pair.there.recv(HERE) == "a member"


def test_bytes_that_are_no_frame_end_their_connection_alone(make_pair: MakePair) -> None:
    pair = make_pair(tcp=True)
    pair.here.send("fine", THERE)
    assert pair.there.recv(HERE) == "fine"
    with socket.create_connection((pair.far.info.tcp_host, pair.far.info.tcp_port)) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        noise.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert noise.recv(1000) == b"", "hung up on"
    pair.here.send("still fine", THERE)
    assert pair.there.recv(HERE) == "still fine"


# Services


def test_a_service_gets_messages_in_order_with_their_words(pair: Pair) -> None:
    came: list[Any] = []
    pair.far.serve(7, lambda *delivery: came.append(delivery))
    stream = pair.near.stream(HERE, THERE, pair.resolver)
    for number, size in enumerate(SIZES):
        message = pair.near.message(bytes(size), tag=7)
        message.key, message.weight = b"%d" % number, number / 2
        pair.near.send_async(stream, message, pair.near.work(OperationKind.PUT, "c"))
    until(lambda: len(came) == len(SIZES))
    assert [(received.frame.key, received.frame.weight, stream.peer) for stream, received in came] == [
        (b"%d" % number, number / 2, "here:0") for number in range(len(SIZES))
    ]
    assert [len(received.load()) for _, received in came] == list(SIZES)


def test_a_service_that_fails_harms_no_other(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*delivery: object) -> None:
        raise ValueError("broken service")

    pair.far.serve(7, fail)
    stream = pair.near.stream(HERE, THERE, pair.resolver)
    pair.near.send(stream, pair.near.message("x", tag=7), pair.near.work(OperationKind.PUT, "c"))
    pair.near.send(stream, pair.near.message("x", tag=8), pair.near.work(OperationKind.PUT, "c"))
    pair.here.send("after", THERE)
    assert pair.there.recv(HERE) == "after"
    assert "broken service" in caplog.text
    assert "a message for service 8, which is not here" in caplog.text


def test_a_service_is_served_beside_what_nobody_takes(make_pair: MakePair) -> None:
    pair = make_pair(tcp=True, arena_bytes=1 << 20, inbox_bytes=1 << 20)
    third = WorkerAddress("third", 0)
    pair.join(third)
    came = threading.Event()
    pair.near.serve(7, lambda stream, received: (received.release(), came.set()))
    untaken = [pair.there.send(np.ones(600_000, np.uint8), HERE, async_op=True) for _ in range(2)]
    until(lambda: [stream.unread() for stream in pair.near.streams()] == [2])
    stream = pair.far.stream(third, HERE, pair.resolver)
    message = pair.far.message(np.ones(900_000, np.uint8), tag=7)
    pair.far.send_async(stream, message, pair.far.work(OperationKind.PUT, "c"))
    assert came.wait(10)
    for work in untaken:
        assert pair.here.recv(THERE).nbytes == 600_000
        work.wait()


def test_a_post_goes_ahead_and_never_blocks(pair: Pair) -> None:
    came: list[Any] = []
    pair.far.serve(7, lambda *delivery: came.append(delivery))
    stream = pair.near.stream(HERE, THERE, pair.resolver)
    assert not pair.near.post(stream, 7, b"nothing was sent yet")
    pair.here.send("first", THERE)
    assert pair.near.post(stream, 7, b"key", b"head", 1.5)
    until(lambda: came)
    frame = came[0][1].frame
    assert (frame.key, bytes(frame.head), frame.weight) == (b"key", b"head", 1.5)


def test_what_is_for_a_predecessor_does_not_reach_its_successor(pair: Pair) -> None:
    came: list[bytes] = []
    pair.far.serve(7, lambda stream, received: came.append(received.frame.key))
    stream = pair.near.stream(HERE, THERE, pair.resolver)
    pair.here.send("first", THERE)
    assert pair.near.post(stream, 7, b"late", to="former")
    message, work = pair.near.message("late", tag=7), pair.near.work(OperationKind.SEND, "there:0")
    message.to = "former"
    pair.near.send_async(stream, message, work)
    with pytest.raises(WorkerDiedError, match="it was relaunched"):
        work.wait()
    assert pair.near.post(stream, 7, b"present", to=stream.incarnation)
    until(lambda: came)
    assert came == [b"present"]

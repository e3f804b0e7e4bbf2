"""What goes wrong between two processes: nothing is silent, nothing takes longer than its deadline."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import (
    DeadlockError,
    WorkerDiedError,
)
from tests.integration.collective.conftest import THERE, echo, over_tcp
from tests.waiting import in_thread, until


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_killed_peer_wakes_who_waits_for_it(make_cast: Any, async_op: bool, tcp: bool) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    if tcp:
        over_tcp(cast.here)
    group = cast.here.group()
    there.begin(echo, 1)
    group.send(1, THERE)
    assert group.recv(THERE) == 1

    def receive() -> Any:
        work = group.recv(THERE, async_op=async_op)
        return work.wait() if async_op else work

    thread, outcome = in_thread(receive)
    until(lambda: cast.here.endpoint.waits.waiting())
    there.kill()
    thread.join(10)
    assert isinstance(outcome[0], WorkerDiedError)
    assert outcome[0].address == "there:0"


def test_peer_killed_within_a_message_leaves_no_half_message(make_cast: Any) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    over_tcp(cast.here)
    group = cast.here.group()
    there.begin(echo, 1)
    group.send(1, THERE)
    assert group.recv(THERE) == 1

    def send_much(side: Any) -> None:
        import torch

        tensor = torch.ones(100_000_000)
        while True:
            side.group().send_tensor(tensor, WorkerAddress("here", 0))

    there.result()
    there.begin(send_much)
    buffer = torch.zeros(100_000_000)
    group.recv_tensor(buffer, THERE)
    work = group.recv_tensor(buffer.zero_(), THERE, async_op=True)
    until(lambda: bool(buffer[0] == 1) or work.settled)
    there.kill()

    def receive_all() -> None:
        while True:
            group.recv_tensor(buffer, THERE)

    with pytest.raises(WorkerDiedError):  # noqa: PT012 - the one that was cut, or the one after it
        work.wait()
        receive_all()


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_killed_peer_wakes_who_sends_to_it(make_cast: Any, tcp: bool) -> None:
    cast = make_cast(arena_bytes=1 << 20, inbox_messages=10)
    there = cast.add("there:0")
    if tcp:
        over_tcp(cast.here)
    group = cast.here.group()

    def flood() -> None:
        while True:
            group.send(b"x" * 10_000, THERE)

    thread, outcome = in_thread(flood)
    until(lambda: cast.here.endpoint.waits.waiting(), seconds=20)
    there.kill()
    thread.join(10)
    assert isinstance(outcome[0], WorkerDiedError)


def test_what_a_peer_sent_before_its_death_is_received(make_cast: Any) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    group = cast.here.group()

    def send(side: Any) -> None:
        import torch

        side.group().send("small", WorkerAddress("here", 0))
        side.group().send(torch.ones(1_000_000), WorkerAddress("here", 0))

    there.call(send)
    until(lambda: cast.here.endpoint.stream(cast.here.me, THERE).unread() == 2)
    there.kill()
    assert group.recv(THERE) == "small"
    assert group.recv(THERE).sum() == 1_000_000
    with pytest.raises(WorkerDiedError):
        group.recv(THERE, timeout=5)


def test_views_that_are_kept_never_block_the_sender(make_cast: Any) -> None:
    cast = make_cast(arena_bytes=8 << 20)
    there = cast.add("there:0")

    def send(side: Any, count: int) -> None:
        import torch

        for number in range(count):
            side.group().send(torch.full((250_000,), float(number)), WorkerAddress("here", 0))

    there.begin(send, 60)
    group = cast.here.group()
    kept = [group.recv(THERE) for _ in range(60)]
    there.result()
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(kept))


def test_a_message_larger_than_the_arena_arrives(make_cast: Any) -> None:
    cast = make_cast(arena_bytes=1 << 20)
    there = cast.add("there:0")
    group = cast.here.group()
    there.begin(echo, 1)
    group.send(torch.ones(3_000_000), THERE)
    assert group.recv(THERE).sum() == 3_000_000
    there.result()


def test_memory_of_a_killed_receiver_is_free_again(make_cast: Any) -> None:
    cast = make_cast(arena_bytes=16 << 20)
    there = cast.add("there:0")

    def keep(side: Any) -> None:
        side.kept["view"] = side.group().recv(WorkerAddress("here", 0))

    cast.here.group().send(torch.ones(1_000_000), THERE)
    there.call(keep)
    assert cast.here.endpoint.shared_memory().used > 0
    there.kill()
    until(lambda: cast.here.endpoint.shared_memory().used == 0)


def test_a_forked_child_neither_uses_nor_holds_the_connections(make_cast: Any) -> None:
    cast = make_cast()
    there = cast.add("there:0")

    def fork_and_report(side: Any) -> tuple[int, int]:
        """Return the child tries, then lives on; its exit code tells what it saw."""
        import os
        import signal

        from rlinf_core.errors import RuntimeFailure

        group = side.group()
        here = WorkerAddress("here", 0)
        group.send("before", here)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                group.send("from the child", here)
                os.write(write, b"sent")
            except RuntimeFailure:
                os.write(write, b"fork")
            signal.pause()
        answer = os.read(read, 4)
        side.kept["view"] = None
        group.send(answer.decode(), here)
        return child, len(answer)

    there.begin(fork_and_report)
    group = cast.here.group()
    assert group.recv(THERE) == "before"
    assert group.recv(THERE) == "fork"
    child, _ = there.result()
    thread, outcome = in_thread(group.recv, THERE)
    until(lambda: cast.here.endpoint.waits.waiting())
    try:
        # The child has inherited the sockets: the peer's death must be seen all the same.
        there.kill()
        thread.join(20)
        assert isinstance(outcome[0], WorkerDiedError)
    finally:
        os.kill(child, signal.SIGKILL)


def count_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.nightly
def test_nothing_is_left_after_close(make_cast: Any) -> None:
    shm, before = set(os.listdir("/dev/shm")), None
    # Other tests of this process may have an endpoint of their own open.
    others = set(threading.enumerate())
    for _ in range(3):
        cast = make_cast(arena_bytes=8 << 20)
        there = cast.add("there:0")
        group = cast.here.group()
        there.begin(echo, 20)
        for size in range(20):
            group.send(torch.ones(size * 30_000), THERE)
            group.recv(THERE)
        there.result()
        directory = Path(cast.here.endpoint.info.unix_path).parent
        assert directory.exists()
        cast.stop()
        assert not directory.exists()
        del group, there
        cast.here = None
        cast.peers.clear()
        left = [thread.name for thread in threading.enumerate() if thread not in others]
        assert [name for name in left if name.startswith("rlinf")] == []
        after = count_descriptors()
        assert before in (None, after)
        before = after
    assert set(os.listdir("/dev/shm")) == shm


@pytest.mark.nightly
def test_descriptors_do_not_grow_with_messages(make_cast: Any) -> None:
    cast = make_cast(arena_bytes=2 << 20, spill_after=0.0)
    there = cast.add("there:0")
    group = cast.here.group()
    there.begin(echo, 40)
    counts = []
    for _ in range(40):
        # Larger than the arena: memory of its own each time.
        group.send(torch.ones(700_000), THERE)
        group.recv(THERE)
        counts.append(count_descriptors())
    there.result()
    assert counts[-1] == counts[5]


def test_what_is_queued_can_be_failed_too(make_cast: Any) -> None:
    cast = make_cast(inbox_messages=10, arena_bytes=1 << 20)
    there = cast.add("there:0")
    group = cast.here.group()
    there.begin(echo, 1)
    group.send(1, THERE)
    group.recv(THERE)
    os.kill(there.process.pid, signal.SIGSTOP)
    try:
        works = [group.send(b"x" * 30_000, THERE, async_op=True) for _ in range(200)]
        assert not works[-1].done()
        error = DeadlockError(("here:0",), "a picture")
        cast.here.endpoint.fail(error, THERE)
        with pytest.raises(DeadlockError):
            works[-1].wait(5)
    finally:
        os.kill(there.process.pid, signal.SIGCONT)

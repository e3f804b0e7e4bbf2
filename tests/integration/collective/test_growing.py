"""Tensors that are received while they are still being sent."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import CommunicationTimeoutError, MismatchError, PayloadError, RemoteError, WorkerDiedError

THERE = WorkerAddress("there", 0)
PIECE = 64 << 10
# Many pieces, and a part of one.
COUNT = 40 * PIECE + 17


@pytest.fixture
def stage(make_cast: Callable[..., Any]) -> tuple[Any, Any]:
    """This process and a peer that send tensors of 128 KB and more as they grow."""
    cast = make_cast(growing_piece=PIECE)
    return cast.here, cast.add("there:0")


def send_many(side: Any, count: int, times: int) -> None:
    import torch

    group = side.group()
    here = WorkerAddress("here", 0)
    tensor = torch.empty(count, dtype=torch.uint8)
    for number in range(times):
        tensor.fill_(number)
        tensor[-1] = 200
        group.send_tensor(tensor, here)


def send_many_async(side: Any, count: int, times: int) -> None:
    import torch

    group = side.group()
    here = WorkerAddress("here", 0)
    tensor = torch.empty(count, dtype=torch.uint8)
    for number in range(times):
        tensor.fill_(number)
        tensor[-1] = 200
        # Once it says that it was taken, the memory may be changed.
        group.send_tensor(tensor, here, async_op=True).wait()


def _is(number: int, buffer: torch.Tensor) -> bool:
    return bool((buffer[:-1] == number).all()) and int(buffer[-1]) == 200


@pytest.mark.parametrize("sender", [send_many, send_many_async])
@pytest.mark.parametrize("contiguous", [True, False])
def test_each_tensor_arrives_whole_and_in_its_turn(stage: Any, sender: Any, contiguous: bool) -> None:
    here, there = stage
    group = here.group()
    buffer = torch.empty(COUNT, dtype=torch.uint8) if contiguous else torch.empty(COUNT, 2, dtype=torch.uint8)[:, 0]
    there.begin(sender, COUNT, 30)
    for number in range(30):
        group.recv_tensor(buffer, THERE)
        assert _is(number, buffer), number
    there.result()


def test_receives_in_the_background_finish_when_all_is_there(stage: Any) -> None:
    here, there = stage
    group = here.group()
    buffers = [torch.empty(COUNT, dtype=torch.uint8) for _ in range(10)]
    works = [group.recv_tensor(buffer, THERE, async_op=True) for buffer in buffers]
    there.call(send_many, COUNT, 10)
    for number, (work, buffer) in enumerate(zip(works, buffers, strict=True)):
        assert work.wait(20) is buffer
        assert _is(number, buffer), number


def test_several_threads_send_and_receive_at_once(stage: Any) -> None:
    here, there = stage
    group = here.group()

    def take(side: Any, count: int, times: int) -> list[int]:
        import torch

        group = side.group()
        here = WorkerAddress("here", 0)
        buffer = torch.empty(count, dtype=torch.uint8)
        return sorted(int(group.recv_tensor(buffer, here).sum()) for _ in range(times))

    def put(number: int) -> None:
        for _ in range(5):
            group.send_tensor(torch.full((COUNT,), number, dtype=torch.uint8), THERE)

    there.begin(take, COUNT, 20)
    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert there.result() == sorted(number * COUNT for number in range(4) for _ in range(5))
    assert here.endpoint.shared_memory().used == 0


def test_a_mismatch_costs_one_tensor_and_no_memory(stage: Any) -> None:
    here, there = stage
    group = here.group()

    def take_two(side: Any, count: int) -> tuple[str, int]:
        import torch

        group = side.group()
        here = WorkerAddress("here", 0)
        try:
            group.recv_tensor(torch.empty(count - 1, dtype=torch.uint8), here)
            said = "nothing"
        except Exception as error:
            said = type(error).__name__
        return said, int(group.recv_tensor(torch.empty(count, dtype=torch.uint8), here)[0])

    there.begin(take_two, COUNT)
    refused = group.send_tensor(torch.full((COUNT,), 5, dtype=torch.uint8), THERE, async_op=True)
    with pytest.raises(MismatchError):
        refused.wait(20)
    group.send_tensor(torch.full((COUNT,), 6, dtype=torch.uint8), THERE)
    assert there.result() == ("MismatchError", 6)
    assert here.endpoint.shared_memory().used == 0


def send_and_stop_halfway(side: Any, count: int, how: str) -> None:
    """Send a tensor; something happens to the sender after the third piece."""
    import os
    import signal

    import torch

    from rlinf_core.collective.messages import pipelined_copy as growing

    copy, done = growing.copy_bytes, []

    def copy_some(target: Any, source: Any) -> None:
        if len(done) == 3:
            done.append(None)
            if how == "interrupted":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        copy(target, source)
        done.append(None)

    growing.copy_bytes = copy_some
    try:
        side.group().send_tensor(torch.ones(count, dtype=torch.uint8), WorkerAddress("here", 0))
    finally:
        growing.copy_bytes = copy


def _receive(group: Any, buffer: torch.Tensor, background: bool) -> None:
    got = group.recv_tensor(buffer, THERE, async_op=background)
    if background:
        got.wait(20)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("how", "error"), [("killed", WorkerDiedError), ("interrupted", PayloadError)])
def test_a_sender_that_ends_halfway_is_told(stage: Any, how: str, error: type[Exception], background: bool) -> None:
    here, there = stage
    group = here.group()
    there.call(send_many, COUNT, 1)
    buffer = torch.empty(COUNT, dtype=torch.uint8)
    group.recv_tensor(buffer, THERE)
    there.begin(send_and_stop_halfway, COUNT, how)
    with pytest.raises(error):
        _receive(group, buffer, background)
    if how == "interrupted":
        with pytest.raises(RemoteError, match="KeyboardInterrupt"):
            there.result()
        there.begin(send_many, COUNT, 1)
        assert _is(0, group.recv_tensor(buffer, THERE))
        there.result()


@pytest.mark.nightly
def test_hanging_sender_is_waited_for_until_the_deadline(stage: Any) -> None:
    here, there = stage
    group = here.group()
    there.call(send_many, COUNT, 1)
    buffer = torch.empty(COUNT, dtype=torch.uint8)
    group.recv_tensor(buffer, THERE)
    there.begin(send_and_stop_halfway, COUNT, "stopped")
    began = time.monotonic()
    try:
        with pytest.raises(CommunicationTimeoutError, match="recv_tensor from there:0"):
            group.recv_tensor(buffer, THERE, timeout=1.0)
        assert time.monotonic() - began > 0.9
    finally:
        there.process.send_signal(signal.SIGCONT)
    there.result()
    there.begin(send_many, COUNT, 1)
    assert _is(0, group.recv_tensor(buffer, THERE))
    there.result()

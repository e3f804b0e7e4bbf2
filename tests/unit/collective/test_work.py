"""Work handles: one outcome, many who wait, no polling."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.errors import CommunicationTimeoutError
from rlinf_core.waiting import OperationKind
from tests.waiting import until


def new_work(seconds: float = 5.0, board: WaitTable | None = None, *, detached: bool = False) -> Work[int]:
    return Work(OperationKind.RECV, "actor:0", seconds, board, detached=detached)


def test_the_first_outcome_stays() -> None:
    work = new_work()
    assert work.finish(1)
    assert not work.fail(ValueError())
    assert not work.finish(2)
    assert (work.wait(), work.result(), work.exception()) == (1, 1, None)


def test_what_arrives_is_decoded_once_by_who_asks() -> None:
    decoded: list[str] = []
    work: Work[int] = Work(OperationKind.RECV, "actor:0", 5.0, decode=lambda text: decoded.append(text) or len(decoded))
    work.arrive("bytes")
    assert work.settled
    assert not decoded, "who reads for everybody does not decode"
    assert work.done()
    assert [work.wait(), work.result(), work.exception()] == [1, 1, None]


def test_what_cannot_be_decoded_is_the_outcome() -> None:
    work: Work[int] = Work(OperationKind.RECV, "actor:0", 5.0, decode=int)
    work.arrive("no number")
    for _ in range(2):
        with pytest.raises(ValueError, match="no number"):
            work.wait()


def test_many_threads_wait_for_one_outcome() -> None:
    work = new_work()
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(work.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    work.finish(7)
    for thread in threads:
        thread.join(5)
    assert got == [7] * 5


def test_short_wait_names_the_operation_and_can_be_repeated() -> None:
    work = new_work()
    with pytest.raises(CommunicationTimeoutError, match="recv from actor:0"):
        work.wait(0.01)
    work.finish(3)
    assert work.wait(0) == 3


def test_wait_that_ended_leaves_nothing_behind() -> None:
    work = new_work(0.01)
    for _ in range(3):
        with pytest.raises(CommunicationTimeoutError):
            work.wait(0)
        with pytest.raises(CommunicationTimeoutError):
            asyncio.run(work.async_wait())
    assert not work._callbacks


@pytest.mark.parametrize(
    "timeout",
    [-1, float("inf"), float("nan"), 10**400, "3", 1j, [1], torch.tensor(1.0), torch.ones(2), np.ones(1), np.ones(2)],
    ids=str,
)
def test_no_wait_takes_what_is_no_time(timeout: Any) -> None:
    with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
        new_work().wait(timeout)


@pytest.mark.parametrize("timeout", [0, 0.0, np.float32(0), np.int64(0)], ids=repr)
def test_a_time_may_be_any_plain_number(timeout: Any) -> None:
    with pytest.raises(CommunicationTimeoutError, match="in 0 s"):
        new_work().wait(timeout)


def test_the_operations_own_deadline_ends_a_wait() -> None:
    with pytest.raises(CommunicationTimeoutError):
        new_work(0.01).wait()
    with pytest.raises(CommunicationTimeoutError):
        asyncio.run(new_work(0.01).async_wait())


def test_awaiting_wakes_across_threads_and_survives_cancelling() -> None:
    work = new_work()

    async def run() -> int:
        task = asyncio.create_task(work.async_wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not work.done()
        threading.Timer(0.01, work.finish, (5,)).start()
        return await work.async_wait()

    assert asyncio.run(run()) == 5


def test_callback_that_fails_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    work, called = new_work(), threading.Event()
    work.add_done_callback(lambda: int("no number"))
    work.add_done_callback(called.set)
    assert work.finish(1)
    assert called.is_set()
    assert "a callback of `recv from actor:0` failed" in caplog.text
    assert "invalid literal" in caplog.text


def test_then_does_not_block_who_finishes_it() -> None:
    first, other = new_work(), new_work()
    chained = first.then(lambda value: value + other.wait())
    first.finish(1)
    assert not chained.done()
    other.finish(2)
    assert chained.wait() == 3


async def waits(value: int) -> int:
    return value


@pytest.mark.parametrize("function", [waits, 5, None])
def test_what_then_could_not_run_is_refused(function: Any) -> None:
    work: Work[int] = Work(OperationKind.RECV, "a:0", 1.0)
    with pytest.raises(TypeError, match=r"`then` takes an ordinary function, not .*: await the handle instead"):
        work.then(function)


def test_then_passes_a_failure_on() -> None:
    work = new_work()
    chained = work.then(lambda value: value + 1)
    error = ValueError("x")
    work.fail(error)
    with pytest.raises(ValueError, match="x"):
        chained.wait()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("x")])
def test_then_hands_over_whatever_the_function_raises(error: BaseException) -> None:
    def fail(value: int) -> None:
        raise error

    work = new_work()
    chained = work.then(fail)
    work.finish(1)
    with pytest.raises(type(error)):
        chained.wait(60)


def test_deadline_of_an_operation_ends_with_it() -> None:
    work: Work[int] = Work(OperationKind.RECV, "actor:0", 0.05)
    late = threading.Event()

    def slow(value: int) -> int:
        late.wait(60)
        return value + 1

    chained = work.then(slow)
    work.finish(1)
    while time.monotonic() < work.deadline:
        late.wait(0.01)
    with pytest.raises(CommunicationTimeoutError, match=r"slow`` did not finish in 0 s"):
        chained.wait(0)
    threading.Timer(0.05, late.set).start()
    assert chained.wait() == 2
    # One that is over has no time left, and what follows it has.
    assert work.then(lambda value: value + 2).wait() == 3

    async def follow() -> int:
        return await work.then(lambda value: value + 3).async_wait()

    assert asyncio.run(follow()) == 4


def test_operation_after_a_late_one_names_the_late_one() -> None:
    work: Work[int] = Work(OperationKind.RECV, "actor:0", 0.01)
    chained = work.then(lambda value: value + 1)
    with pytest.raises(CommunicationTimeoutError, match=r"`recv from actor:0` did not finish in 0\.01 s"):
        chained.wait()
    with pytest.raises(CommunicationTimeoutError, match=r"`recv from actor:0` did not finish in 0\.01 s"):
        asyncio.run(chained.async_wait())
    work.finish(1)
    assert chained.wait() == 2


def test_who_waits_is_on_the_board_while_it_waits() -> None:
    board = WaitTable()
    work = new_work(board=board)
    thread = threading.Thread(target=work.wait)
    thread.start()
    until(lambda: board.waiting() == [work], "the thread's wait")
    assert [one.title for one in board.operations.publication().operations] == ["recv from actor:0"]
    work.finish(0)
    thread.join(5)
    assert board.waiting() == []
    assert board.operations.publication().operations == ()


def test_background_operation_is_listed_until_it_ends() -> None:
    board = WaitTable()
    work = new_work(board=board, detached=True)
    (published,) = board.operations.publication().operations
    assert published.detached
    work.finish(0)
    assert board.operations.publication().operations == ()


def one_pause(board: WaitTable, work: Work[int]) -> None:
    """Have the first wait that expires count as paused by a debugger; the operation finishes meanwhile."""

    def paused(target: str, seconds: float) -> float:
        work.finish(3)
        return 60.0

    board.paused = paused


def test_wait_goes_on_while_a_peer_is_debugged() -> None:
    board = WaitTable()
    work = new_work(0.01, board)
    one_pause(board, work)
    assert work.wait() == 3


def test_chained_wait_goes_on_while_a_peer_is_debugged() -> None:
    board = WaitTable()
    work = new_work(0.01, board)
    one_pause(board, work)
    assert work.then(lambda value: value + 1).wait() == 4


def test_wait_for_an_acknowledgement_is_announced() -> None:
    waits, asked = WaitTable(), list[str]()
    waits.acknowledged = lambda work: asked.append(work.target)
    for kind in (OperationKind.RECV, OperationKind.SEND_TENSOR):
        assert not Work(kind, "peer:0", 5.0, waits).wait_until(0.0)
    assert asked == ["peer:0"]

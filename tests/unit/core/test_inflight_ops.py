from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

from rlinf_core.process.activity import InflightOps, current_task_key
from rlinf_core.waiting import OperationKind
from tests.clock import Clock


def test_a_board_shows_what_has_begun_and_not_ended(clock: Clock) -> None:
    board = InflightOps()
    with board.during(OperationKind.METHOD, "train"):
        clock.now += 2
        put = board.begin(OperationKind.PUT, "data", "k", detached=True)
        clock.now += 1
        shown = board.publication().operations
        assert [(one.kind, one.detached, one.age) for one in shown] == [
            (OperationKind.METHOD, False, 3.0),
            (OperationKind.PUT, True, 1.0),
        ]
        board.end(put)
        board.end(put)
    assert board.publication().operations == ()


def test_a_board_knows_how_long_nothing_was_on_it(clock: Clock) -> None:
    board = InflightOps()
    clock.now += 3
    assert board.publication().quiet == 3
    with board.during(OperationKind.CALL, "actor.train", peers=("actor:0",)):
        clock.now += 2
        shown = board.publication()
        assert shown.quiet == 0
        assert shown.operations[0].peers == ("actor:0",)
    clock.now += 1
    assert board.publication().quiet == 1


def test_a_board_knows_how_the_last_call_ended() -> None:
    board = InflightOps()
    assert board.publication().last_call == ""
    board.returned("run", "ValueError: no camera")
    assert board.publication().last_call == "its `run` raised ValueError: no camera"
    board.returned("stop", None)
    assert board.publication().last_call == "its `stop` returned"


def test_an_operation_that_raises_has_ended() -> None:
    board = InflightOps()
    with pytest.raises(KeyError), board.during(OperationKind.RECV, "actor:0"):
        raise KeyError
    assert board.publication().operations == ()


def test_progress_changes_with_every_change() -> None:
    board = InflightOps()
    seen = {board.publication().progress}
    serial = board.begin(OperationKind.RECV, "actor:0")
    seen.add(board.publication().progress)
    board.end(serial)
    seen.add(board.publication().progress)
    assert len(seen) == 3
    assert board.publication().progress in seen


def test_who_has_moved_bytes_of_late_gets_on(clock: Clock) -> None:
    board = InflightOps()
    board.begin(OperationKind.RECV, "actor:0")
    board.moved()
    first = board.publication().progress
    clock.now += 3.0
    assert board.publication().progress != first
    clock.now += 3.0
    last = board.publication().progress
    clock.now += 1.0
    assert board.publication().progress == last


def test_a_publication_travels() -> None:
    board = InflightOps()
    board.begin(OperationKind.GET, "data", "k")
    publication = board.publication()
    assert pickle.loads(pickle.dumps(publication)) == publication


def test_threads_write_while_others_read() -> None:
    board = InflightOps()

    def work() -> None:
        for _ in range(2000):
            with board.during(OperationKind.RECV, "actor:0"):
                pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(board.publication().operations) <= 3
    for thread in threads:
        thread.join()
    assert board.publication().operations == ()


def test_a_method_runs_until_it_waits() -> None:
    board = InflightOps()
    assert not board.publication().running
    with board.during(OperationKind.METHOD, "train"):
        assert board.publication().running
        with board.during(OperationKind.RECV, "actor:0"):
            assert not board.publication().running
        assert board.publication().running
    assert not board.publication().running


def test_detached_operation_blocks_nothing_until_awaited() -> None:
    board = InflightOps()
    with board.during(OperationKind.METHOD, "train"):
        put = board.begin(OperationKind.PUT, "data", detached=True)
        assert board.publication().running
        board.attach(put)
        assert not board.publication().running
        board.detach(put)
        assert board.publication().running
        assert board.publication().operations[1].detached
        board.attach(put)
        board.end(put)
        board.attach(put)
        assert board.publication().running
        assert len(board.publication().operations) == 1
        assert board.publication().running


def test_a_driver_runs_unless_its_main_thread_waits() -> None:
    board = InflightOps(has_main=True)
    assert board.publication().running
    with board.during(OperationKind.CALL, "actor.train"):
        assert not board.publication().running


def test_one_waiting_task_does_not_stop_the_others() -> None:
    board = InflightOps()
    with (
        board.during(OperationKind.METHOD, "one", task_key="task 1"),
        board.during(OperationKind.METHOD, "two", task_key="task 2"),
        board.during(OperationKind.GET, "data", task_key="task 1"),
    ):
        assert board.publication().running
        with board.during(OperationKind.GET, "data", task_key="task 2"):
            assert not board.publication().running


def test_a_thread_of_the_user_runs_between_its_operations() -> None:
    board = InflightOps()
    computes, goes_on = threading.Event(), threading.Event()

    def work() -> None:
        with board.during(OperationKind.PUT, "data"):
            pass
        computes.set()
        goes_on.wait(30)

    thread = threading.Thread(target=work)
    with board.during(OperationKind.METHOD, "train"), board.during(OperationKind.RECV, "actor:0"):
        assert not board.publication().running
        thread.start()
        assert computes.wait(30)
        assert board.publication().running
        goes_on.set()
        thread.join()
        assert not board.publication().running


def test_called_thread_is_idle_between_methods() -> None:
    board = InflightOps()
    called, ends = threading.Event(), threading.Event()

    def serve() -> None:
        with board.during(OperationKind.METHOD, "train"), board.during(OperationKind.RECV, "actor:0"):
            pass
        called.set()
        ends.wait(30)

    thread = threading.Thread(target=serve)
    thread.start()
    assert called.wait(30)
    assert not board.publication().running
    ends.set()
    thread.join()


async def _in_an_operation(board: InflightOps, go_on: asyncio.Event) -> None:
    with board.during(OperationKind.RECV, "actor:0", task_key=current_task_key()):
        await go_on.wait()


@pytest.mark.parametrize(("other", "running"), [("waits", False), ("sleeps", True), ("computes", True)])
def test_tasks_of_one_thread_wait_together_only(other: str, running: bool) -> None:
    board = InflightOps(has_main=True)
    seen: list[bool] = []

    async def main() -> None:
        go_on, busy = asyncio.Event(), threading.Event()
        first = asyncio.create_task(_in_an_operation(board, go_on))
        if other == "waits":
            second: asyncio.Task[object] = asyncio.create_task(_in_an_operation(board, go_on))
        elif other == "sleeps":
            second = asyncio.create_task(_sleep_until(go_on))
        else:
            second = asyncio.create_task(_compute(busy))
        loop = asyncio.get_running_loop()

        def ask() -> None:
            seen.append(board.publication().running)
            busy.set()
            loop.call_soon_threadsafe(go_on.set)

        loop.call_later(0.05, lambda: threading.Thread(target=ask, daemon=True).start())
        await asyncio.gather(first, second)

    asyncio.run(main())
    assert seen == [running]


def test_a_task_that_waits_for_its_own_tasks_waits_with_them() -> None:
    board = InflightOps()
    seen: list[bool] = []

    async def method() -> None:
        go_on = asyncio.Event()
        with board.during(OperationKind.METHOD, "train", task_key=asyncio.current_task()):
            asyncio.get_running_loop().call_later(0.05, lambda: (seen.append(board.publication().running), go_on.set()))
            await asyncio.gather(_in_an_operation(board, go_on), _in_an_operation(board, go_on))
            seen.append(board.publication().running)

    asyncio.run(method())
    assert seen == [False, True]


async def _sleep_until(go_on: asyncio.Event) -> None:
    await go_on.wait()


async def _compute(busy: threading.Event) -> None:
    await asyncio.sleep(0.06)
    busy.wait(10)


def test_unseen_short_step_counts_as_progress_of_its_thread(clock: Clock) -> None:
    board = InflightOps()
    clock.now += 5
    before = board.publication()
    users = threading.Thread(target=lambda: (board.publish_past(OperationKind.PUT), done.set(), end.wait(10)))
    done, end = threading.Event(), threading.Event()
    users.start()
    assert done.wait(10)
    after = board.publication()
    end.set()
    users.join()
    assert after.progress > before.progress
    assert (before.quiet, after.quiet) == (5, 0)
    assert not before.running
    assert after.running, "a thread that the user started goes on"


def test_recent_operations_are_told_in_order(clock: Clock) -> None:
    ops = InflightOps()
    for seconds in (1.0, 2.0, 0.5):
        serial = ops.begin(OperationKind.RECV, f"env:{seconds:g}")
        clock.now += seconds
        ops.end(serial)
    ops.begin(OperationKind.RECV, "env:9")
    clock.now += 28.0
    assert ops.recent().splitlines() == [
        " 28.500 s ago, after 2.000 s: recv from env:2",
        " 28.000 s ago, after 0.500 s: recv from env:0.5",
    ]


def test_recent_operations_are_bounded() -> None:
    ops = InflightOps()
    for number in range(1000):
        ops.end(ops.begin(OperationKind.RECV, f"env:{number}"))
    lines = ops.recent().splitlines()
    assert len(lines) == 256
    assert lines[-1].endswith("recv from env:999")

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

from rlinf_core import waiting
from rlinf_core.errors import EnvironmentVariableError
from rlinf_core.waiting import Deadline, Operation, OperationBoard, OperationKind, spell_seconds, task_strand


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


def test_a_deadline_runs_out(clock: Clock) -> None:
    deadline = Deadline.after(2)
    clock.now += 1.5
    assert deadline.remaining() == 0.5
    assert not deadline.expired
    clock.now += 1
    assert deadline.remaining() == 0
    assert deadline.expired
    assert deadline.seconds == 2


def test_the_default_deadline_is_the_declared_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLINF_TIMEOUT", raising=False)
    assert Deadline.after().at == 1900
    monkeypatch.setenv("RLINF_TIMEOUT", "7")
    assert Deadline.after(None).seconds == 7
    monkeypatch.setenv("RLINF_TIMEOUT", "never")
    with pytest.raises(EnvironmentVariableError):
        Deadline.after()


def test_a_timeout_of_nothing_has_passed_at_once(clock: Clock) -> None:
    assert Deadline.after(0).expired


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan")])
def test_no_wait_is_unbounded(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Deadline.after(seconds)


def test_a_step_of_a_wait_ends_with_it(clock: Clock) -> None:
    deadline = Deadline.after(10)
    assert deadline.sooner(3).at == 103
    assert deadline.sooner(30) is deadline


@pytest.mark.parametrize(
    ("kind", "target", "key", "title", "words"),
    [
        (OperationKind.RECV, "actor:0", None, "recv from actor:0", "waits in recv from actor:0 for 12 s"),
        (OperationKind.SEND_TENSOR, "env:1", None, "send_tensor to env:1", "waits in send_tensor to env:1 for 12 s"),
        (OperationKind.GET, "a", "default", "get on channel `a`", "waits on channel `a` for 12 s"),
        (
            OperationKind.GET_BATCH,
            "a",
            "k",
            "get_batch on channel `a`, key `k`",
            "waits for a batch on channel `a`, key `k` for 12 s",
        ),
        (OperationKind.PUT, "a", None, "put on channel `a`", "waits for room on channel `a` for 12 s"),
        (OperationKind.CALL, "actor.train", None, "call `actor.train`", "waits for `actor.train` for 12 s"),
        (OperationKind.METHOD, "train", None, "method `train`", "runs `train` for 12 s"),
        (OperationKind.IDLE, "", None, "idle", "is idle: no method of it has been called for 12 s"),
    ],
)
def test_an_operation_says_what_it_is(
    kind: OperationKind, target: str, key: str | None, title: str, words: str
) -> None:
    operation = Operation(kind, target, key, since=0, serial=1)
    assert operation.title == title
    assert operation.waits(12.3) == words


def test_an_operation_says_what_it_finds() -> None:
    operation = Operation(OperationKind.GET, "action", None, since=0, serial=1)
    assert operation.waits(3, "empty") == "waits on channel `action`, empty, for 3.0 s"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (12.3, "12 s"), (599, "599 s"), (1800, "30 min"), (9000, "2.5 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert spell_seconds(seconds) == words


def test_a_board_shows_what_has_begun_and_not_ended(clock: Clock) -> None:
    board = OperationBoard()
    with board.during(OperationKind.METHOD, "train"):
        clock.now += 2
        put = board.begin(OperationKind.PUT, "data", "k", detached=True)
        clock.now += 1
        shown = board.publication().operations
        assert [(one.operation.kind, one.operation.detached, one.age) for one in shown] == [
            (OperationKind.METHOD, False, 3.0),
            (OperationKind.PUT, True, 1.0),
        ]
        board.end(put)
        board.end(put)
    assert board.publication().operations == ()


def test_a_board_knows_how_long_nothing_was_on_it(clock: Clock) -> None:
    board = OperationBoard()
    clock.now += 3
    assert board.publication().quiet == 3
    with board.during(OperationKind.CALL, "actor.train", peers=("actor:0",)):
        clock.now += 2
        shown = board.publication()
        assert shown.quiet == 0
        assert shown.operations[0].operation.peers == ("actor:0",)
    clock.now += 1
    assert board.publication().quiet == 1


def test_an_operation_that_raises_has_ended() -> None:
    board = OperationBoard()
    with pytest.raises(KeyError), board.during(OperationKind.RECV, "actor:0"):
        raise KeyError
    assert board.publication().operations == ()


def test_progress_changes_with_every_change() -> None:
    board = OperationBoard()
    seen = {board.publication().progress}
    serial = board.begin(OperationKind.RECV, "actor:0")
    seen.add(board.publication().progress)
    board.end(serial)
    seen.add(board.publication().progress)
    assert len(seen) == 3
    assert board.publication().progress in seen


def test_who_has_moved_bytes_of_late_gets_on(clock: Clock) -> None:
    board = OperationBoard()
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
    board = OperationBoard()
    board.begin(OperationKind.GET, "data", "k")
    publication = board.publication()
    assert pickle.loads(pickle.dumps(publication)) == publication


def test_threads_write_while_others_read() -> None:
    board = OperationBoard()

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
    board = OperationBoard()
    assert not board.publication().running
    with board.during(OperationKind.METHOD, "train"):
        assert board.publication().running
        with board.during(OperationKind.RECV, "actor:0"):
            assert not board.publication().running
        assert board.publication().running
    assert not board.publication().running


def test_what_is_detached_holds_nothing_up_until_it_is_waited_for() -> None:
    board = OperationBoard()
    with board.during(OperationKind.METHOD, "train"):
        put = board.begin(OperationKind.PUT, "data", detached=True)
        assert board.publication().running
        board.attach(put)
        assert not board.publication().running
        board.detach(put)
        assert board.publication().running
        assert board.publication().operations[1].operation.detached
        board.attach(put)
        board.end(put)
        board.attach(put)
        assert board.publication().running
        assert len(board.publication().operations) == 1
        assert board.publication().running


def test_a_driver_runs_unless_its_main_thread_waits() -> None:
    board = OperationBoard(has_main=True)
    assert board.publication().running
    with board.during(OperationKind.CALL, "actor.train"):
        assert not board.publication().running


def test_one_waiting_task_does_not_stop_the_others() -> None:
    board = OperationBoard()
    with (
        board.during(OperationKind.METHOD, "one", strand="task 1"),
        board.during(OperationKind.METHOD, "two", strand="task 2"),
        board.during(OperationKind.GET, "data", strand="task 1"),
    ):
        assert board.publication().running
        with board.during(OperationKind.GET, "data", strand="task 2"):
            assert not board.publication().running


def test_a_thread_of_the_user_runs_between_its_operations() -> None:
    board = OperationBoard()
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


def test_a_thread_that_methods_are_called_on_is_idle_between_them() -> None:
    board = OperationBoard()
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


async def _in_an_operation(board: OperationBoard, go_on: asyncio.Event) -> None:
    with board.during(OperationKind.RECV, "actor:0", strand=task_strand()):
        await go_on.wait()


@pytest.mark.parametrize(("other", "running"), [("waits", False), ("sleeps", True), ("computes", True)])
def test_tasks_of_one_thread_wait_together_only(other: str, running: bool) -> None:
    board = OperationBoard(has_main=True)
    seen: list[bool] = []

    async def main() -> None:
        go_on, busy = asyncio.Event(), threading.Event()
        first = asyncio.create_task(_in_an_operation(board, go_on))
        if other == "waits":
            second: asyncio.Task[object] = asyncio.create_task(_in_an_operation(board, go_on))
        elif other == "sleeps":
            second = asyncio.create_task(asyncio.sleep(0.3))
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
    board = OperationBoard()
    seen: list[bool] = []

    async def method() -> None:
        go_on = asyncio.Event()
        with board.during(OperationKind.METHOD, "train", strand=asyncio.current_task()):
            asyncio.get_running_loop().call_later(0.05, lambda: (seen.append(board.publication().running), go_on.set()))
            await asyncio.gather(_in_an_operation(board, go_on), _in_an_operation(board, go_on))
            seen.append(board.publication().running)

    asyncio.run(method())
    assert seen == [False, True]


async def _compute(busy: threading.Event) -> None:
    await asyncio.sleep(0.06)
    busy.wait(10)

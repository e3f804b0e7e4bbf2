"""The waits of a job: what could end an operation, what is no wait at all, and which waits are logged when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlinf_core.process import inflight_ops
from rlinf_core.process.inflight_ops import InflightOps
from rlinf_core.supervision.wait_graph import Process, WaitGraph
from rlinf_core.supervision.waits import ChannelView, JobView, LongWaits, ProcessAnswer, processes_of
from rlinf_core.waiting import Operation, OperationKind, Publication, PublishedOperation
from tests.clock import Clock

K = OperationKind


def in_method(*operations: tuple[OperationKind, str], detached: bool = False) -> InflightOps:
    board = InflightOps()
    board.begin(K.METHOD, "train")
    for kind, target in operations:
        board.begin(kind, target, detached=detached)
    return board


def driver_in_call(*peers: str) -> InflightOps:
    board = InflightOps(has_main=True)
    board.begin(K.CALL, "actor.train", peers=peers)
    return board


def members(job: JobView, dead: tuple[str, ...] = (), **boards: InflightOps) -> list[tuple[str, ...]]:
    processes = [job.process(name.replace("_", ":"), board.publication()) for name, board in boards.items()]
    processes += [Process(name, died=1) for name in dead]
    return [deadlock.members for deadlock in WaitGraph(processes).deadlocks()]


def test_peers_that_wait_for_each_other() -> None:
    assert members(JobView(), a_0=in_method((K.RECV, "b:0")), b_0=in_method((K.RECV, "a:0"))) == [("a:0", "b:0")]
    assert members(JobView(), a_0=in_method((K.RECV, "b:0")), b_0=in_method()) == []


def test_a_send_that_is_held_back_waits_for_its_receiver() -> None:
    assert members(JobView(), a_0=in_method((K.SEND, "b:0")), b_0=in_method((K.SEND, "a:0"))) == [("a:0", "b:0")]
    in_flight = in_method((K.SEND, "b:0"), detached=True)
    assert members(JobView(), a_0=in_flight, b_0=in_method((K.RECV, "a:0"))) == []


def test_the_driver_is_a_possible_producer_of_every_channel() -> None:
    job = JobView({"x": ChannelView(producers=("b:0",), consumers=("a:0",))})
    boards = {"a_0": in_method((K.GET, "x")), "b_0": in_method((K.RECV, "a:0"))}
    assert members(job, **boards, driver=InflightOps(has_main=True)) == []
    assert members(job, **boards, driver=driver_in_call("a:0", "b:0")) == [("a:0", "b:0", "driver")]


def test_a_call_waits_for_those_that_were_called() -> None:
    boards = {"actor_0": in_method((K.RECV, "driver")), "actor_1": in_method()}
    assert members(JobView(), **boards, driver=driver_in_call("actor:1")) == []
    assert members(JobView(), **boards, driver=driver_in_call("actor:0", "actor:1")) == [("actor:0", "driver")]


def test_a_worker_between_methods_is_idle() -> None:
    process = JobView().process("env:0", InflightOps().publication())
    assert [wait.operation.kind for wait in process.waits] == [K.IDLE]
    assert not process.running
    assert members(JobView(), env_0=InflightOps(), actor_0=in_method((K.RECV, "env:0"))) == [("actor:0",)]


def test_a_running_worker_says_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight_ops, "time", Clock())
    process = JobView().process("env:0", in_method().publication())
    assert process.running
    assert process.doing.startswith("runs `train` for 0.0 s")


def test_a_get_that_only_the_dead_could_serve_is_about_to_fail() -> None:
    job = JobView({"x": ChannelView(producers=("b:0",))}, dead=frozenset({"b:0"}))
    assert members(job, ("b:0",), a_0=in_method((K.GET, "x"))) == []
    empty_since_ever = JobView({"x": ChannelView()}, dead=frozenset({"b:0"}))
    assert members(empty_since_ever, ("b:0",), a_0=in_method((K.GET, "x"))) == [("a:0",)]


@pytest.mark.parametrize(
    ("view", "orphaned"),
    [
        (ChannelView(producers=("b",)), True),
        (ChannelView(producers=("b", "c")), False),
        (ChannelView(producers=("b", "driver")), False),
        (ChannelView(), False),
        (ChannelView(producers=("b",), depths={"k": 1}), False),
        (ChannelView(producers=("b",), depths={"other": 1}), True),
    ],
)
def test_a_channel_is_orphaned_when_all_its_producers_died(view: ChannelView, orphaned: bool) -> None:
    assert view.orphaned("k", frozenset({"b"})) == orphaned


@pytest.mark.parametrize(
    ("kind", "depth", "maxsize", "state"),
    [
        (K.GET, 0, 0, "empty"),
        (K.GET_BATCH, 3, 0, "with 3 items"),
        (K.PUT, 4, 4, "full (4 of 4)"),
        (K.PUT, 0, 0, ""),
    ],
)
def test_a_picture_says_what_an_operation_finds(kind: OperationKind, depth: int, maxsize: int, state: str) -> None:
    job = JobView({"x": ChannelView(("p:0",), ("c:0",), maxsize, {"default": depth})})
    [wait] = job.process("a:0", in_method((kind, "x")).publication()).waits
    assert wait.state == state
    assert wait.role == ("consumer" if kind is K.PUT else "producer")
    assert wait.waits_for == (("c:0",) if kind is K.PUT else ("p:0",))


def test_a_picture_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.0, 0.0, 12.0, 100.0, 100.0, 100.0, 114.0])
    next_tick: Callable[[], float] = lambda: next(ticks)  # noqa: E731
    monkeypatch.setattr("rlinf_core.process.inflight_ops.time.monotonic", next_tick)
    job = JobView({"action": ChannelView(producers=("rollout:1",))}, dead=frozenset({"actor:0"}))
    env = job.process("env:3", in_method((K.GET, "action")).publication())
    rollout = job.process("rollout:1", in_method((K.RECV, "actor:0")).publication())
    assert WaitGraph([env, rollout, Process("actor:0", died=12)]).explain("env:3") == (
        "env:3 waits on channel `action`, empty, for 12 s; "
        "its only producer rollout:1 waits in recv from actor:0 for 14 s; actor:0 died 12 s ago"
    )


def answer(peer: str, *recipients: str) -> ProcessAnswer:
    """That of a process which waits for a message of a peer, with messages of its own on their way."""
    board = InflightOps()
    board.begin(OperationKind.METHOD, "train")
    board.begin(OperationKind.RECV, peer)
    return ProcessAnswer(board.publication(), recipients=recipients)


def members_of(**answers: ProcessAnswer) -> list[tuple[str, ...]]:
    named = {name.replace("_", ":"): one for name, one in answers.items()}
    return [deadlock.members for deadlock in WaitGraph(processes_of(named, {})).deadlocks()]


def test_message_on_its_way_is_no_wait() -> None:
    assert members_of(a_0=answer("b:0"), b_0=answer("a:0")) == [("a:0", "b:0")]
    assert members_of(a_0=answer("b:0", "b:0"), b_0=answer("a:0")) == []


def test_message_to_others_excuses_nobody() -> None:
    third = answer("a:0", "d:0")
    assert members_of(a_0=answer("b:0"), b_0=answer("a:0"), c_0=third) == [("a:0", "b:0")]


def waits_told(waits: LongWaits, serial: int, seconds: int, *, kind: OperationKind = OperationKind.RECV) -> list[int]:
    """Return the seconds at which a word is said of an operation that lasts so long and is looked at every second."""
    return [age for age in range(seconds + 1) if waits.due(in_(serial, age, kind=kind))]


def in_(
    serial: int,
    age: float,
    *,
    kind: OperationKind = OperationKind.RECV,
    target: str = "actor:0",
    detached: bool = False,
) -> Publication:
    operation = Operation(kind, target, None, 0.0, serial, detached)
    return Publication((PublishedOperation(operation, age),), 0, False)


def test_first_wait_notice_comes_late_and_others_grow_rarer() -> None:
    assert waits_told(LongWaits(5.0), 1, 100) == [5, 10, 20, 40, 80]


def test_repeated_long_waits_are_reported_in_the_first_step() -> None:
    waits = LongWaits(5.0)
    assert waits_told(waits, 1, 30) == [5, 10, 20]
    assert [waits_told(waits, serial, 30) for serial in (2, 3, 4)] == [[], [], []]
    assert waits_told(waits, 5, 50) == [40]


def test_waits_for_others_have_their_own_words() -> None:
    waits = LongWaits(5.0)
    assert waits_told(waits, 1, 6) == [5]
    assert waits_told(waits, 2, 6, kind=OperationKind.SEND) == [5]


def test_background_operation_is_no_wait_until_awaited() -> None:
    waits = LongWaits(5.0)
    assert not any(waits.due(in_(1, age, detached=True)) for age in range(60))
    assert [age for age in range(60, 70) if waits.due(in_(1, age))] == [65]


def test_calls_and_methods_say_nothing_here() -> None:
    for kind in (OperationKind.METHOD, OperationKind.CALL, OperationKind.LAUNCH, OperationKind.CONNECT):
        assert waits_told(LongWaits(5.0), 1, 100, kind=kind) == []


def test_what_is_told_is_the_operation() -> None:
    waits = LongWaits(1.0)
    assert waits.due(in_(7, 0)) == []
    (output,) = waits.due(in_(7, 2))
    assert output.waits(2) == "waits in recv from actor:0 for 2.0 s"

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlinf_core.manager.wait_edges import ChannelView, JobView
from rlinf_core.manager.wait_graph import Process, WaitGraph
from rlinf_core.process import inflight_ops
from rlinf_core.process.inflight_ops import InflightOps
from rlinf_core.waiting import OperationKind
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

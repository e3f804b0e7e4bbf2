"""Who is registered, what they wait for, and transfers that are slow."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.endpoint_info import Settings, StaticResolver
from rlinf_core.errors import InvalidNameError, PeerNotFoundError, UnknownGroupError, WorkerDiedError
from rlinf_core.process import activity
from rlinf_core.process.activity import InflightOps
from rlinf_core.supervision.client import ManagerClient
from rlinf_core.supervision.lives import CLOSED, Life, NotYet, Ownership, WorkerRecord, WorkerRegistry
from rlinf_core.supervision.wait_graph import Process, WaitGraph
from rlinf_core.supervision.waits import ChannelView, JobView, LongWaits, ProcessAnswer, processes_of
from rlinf_core.waiting import Operation, OperationKind, Publication
from tests.clock import Clock
from tests.unit.supervision.rig import Job

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
    monkeypatch.setattr(activity, "time", Clock())
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
    monkeypatch.setattr("rlinf_core.process.activity.time.monotonic", next_tick)
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
    return Publication((Operation(kind, target, None, age, serial, detached),), 0, False)


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
    assert output.waits() == "waits in recv from actor:0 for 2.0 s"


ACTOR_0 = WorkerAddress("actor", 0)
ACTOR_1 = WorkerAddress("actor", 1)


@pytest.fixture
def registry() -> WorkerRegistry:
    registry: WorkerRegistry = WorkerRegistry()
    assert registry.open_group("actor", 2) == 1
    return registry


def test_a_worker_can_be_reached_once_it_is_ready(registry: WorkerRegistry) -> None:
    assert registry.look_up(ACTOR_0) == NotYet("`actor:0` is launching")
    assert registry.ready(ACTOR_0, 1, "info 0", "node 0")
    entry = registry.look_up(ACTOR_0)
    assert isinstance(entry, WorkerRecord)
    assert (entry.info, entry.node, entry.life) == ("info 0", "node 0", Life.READY)
    assert registry.groups() == {"actor": 2}
    assert [worker.life for worker in registry.workers("actor")] == [Life.READY, Life.LAUNCHING]


def test_an_unknown_group_may_still_come_and_near_names_are_told(registry: WorkerRegistry) -> None:
    assert registry.look_up(WorkerAddress("actr", 0)) == NotYet(
        "no group is named `actr`; it may still be launched", "did you mean `actor`?"
    )


def test_a_group_that_was_not_declared_is_wrong_at_once(registry: WorkerRegistry) -> None:
    registry.declare(["actor", "rollout"])
    with pytest.raises(UnknownGroupError, match="did you mean `rollout`"):
        registry.look_up(WorkerAddress("rolout", 0))
    waits = registry.look_up(WorkerAddress("rollout", 0))
    assert waits == NotYet("the group `rollout` is declared but not launched yet")


def test_a_group_that_was_launched_needs_no_declaration(registry: WorkerRegistry) -> None:
    registry.declare(["rollout"])
    registry.ready(ACTOR_0, 1, "info")
    assert isinstance(registry.look_up(ACTOR_0), WorkerRecord)


def test_groups_of_workers_are_not_declared(registry: WorkerRegistry) -> None:
    registry.declare(["actor"])
    assert isinstance(registry.look_up(WorkerAddress("actor", (0, 1))), NotYet)
    registry.open_group("actor:0", 2)
    registry.ready(WorkerAddress("actor", (0, 1)), 1, "nested")
    entry = registry.look_up(WorkerAddress("actor", (0, 1)))
    assert isinstance(entry, WorkerRecord)
    assert entry.info == "nested"


def test_a_rank_that_does_not_exist_is_wrong_at_once(registry: WorkerRegistry) -> None:
    with pytest.raises(PeerNotFoundError, match="`actor` has no rank 2") as caught:
        registry.look_up(WorkerAddress("actor", 2))
    assert caught.value.address == "actor:2"
    assert caught.value.why == "it has 2 workers, ranks 0 to 1"
    with pytest.raises(PeerNotFoundError, match="is a group"):
        registry.look_up(WorkerAddress("actor"))


def test_the_dead_are_named_with_their_cause(registry: WorkerRegistry) -> None:
    registry.ready(ACTOR_0, 1, "info", "node 0 (10.0.0.1)")
    assert registry.died(ACTOR_0, 1, now=5.0)
    assert not registry.died(ACTOR_0, 1, now=6.0, cause="killed by the kernel: out of memory")
    with pytest.raises(WorkerDiedError) as caught:
        registry.look_up(ACTOR_0)
    assert (caught.value.address, caught.value.node) == ("actor:0", "node 0 (10.0.0.1)")
    assert caught.value.cause == "killed by the kernel: out of memory"
    record = registry.record(ACTOR_0)
    assert record is not None
    assert (record.died_at, record.info) == (5.0, None)
    assert not registry.ready(ACTOR_0, 1, "late info")


def test_a_name_that_a_channel_has_is_said_to_be_a_channels(registry: WorkerRegistry) -> None:
    registry.open_group("replay", 1, channel=True)
    with pytest.raises(InvalidNameError, match=r"a channel named `replay` already exists(.|\n)*Channel.connect"):
        registry.open_group("replay", 1)
    with pytest.raises(InvalidNameError, match="a group named `actor` is running"):
        registry.open_group("actor", 1, channel=True)
    assert [registry.is_channel(name) for name in ("replay", "actor", "nobody")] == [True, False, False]


def test_the_name_of_a_channel_that_was_closed_stays_its_own(registry: WorkerRegistry) -> None:
    registry.open_group("replay", 1, channel=True)
    registry.died(WorkerAddress("replay", 0), 1, now=1.0, cause=CLOSED)
    with pytest.raises(InvalidNameError, match="a channel named `replay` existed and is closed"):
        registry.open_group("replay", 1, channel=True)
    registry.open_group("inbox", 1, channel=True)
    registry.died(WorkerAddress("inbox", 0), 1, now=1.0, cause="it was killed")
    assert registry.open_group("inbox", 1, channel=True) == 2


def test_a_group_can_be_launched_again_under_its_name(registry: WorkerRegistry) -> None:
    registry.ready(ACTOR_0, 1, "old")
    with pytest.raises(InvalidNameError, match="is running"):
        registry.open_group("actor", 1)
    registry.died(ACTOR_0, 1, now=1.0)
    registry.died(ACTOR_1, 1, now=1.0)
    assert registry.open_group("actor", 1) == 2
    assert registry.ready(ACTOR_0, 2, "new")
    # What the old life still says does not count.
    assert not registry.ready(ACTOR_0, 1, "ghost")
    assert not registry.died(ACTOR_0, 1, now=9.0)
    entry = registry.look_up(ACTOR_0)
    assert isinstance(entry, WorkerRecord)
    assert entry.info == "new"


def test_a_rank_is_launched_again_with_an_incarnation_of_its_own(registry: WorkerRegistry) -> None:
    assert registry.open_group("env", 2) == 1
    first, second = (WorkerAddress("env", rank) for rank in range(2))
    assert registry.ready(first, 1, "a")
    assert registry.ready(second, 1, "b")
    assert registry.died(second, 1, 1.0)
    assert registry.reopen(second) == 2
    assert isinstance(registry.look_up(second), NotYet)
    # What is late from the life before counts for nothing.
    assert not registry.ready(second, 1, "b")
    assert not registry.died(second, 1, 2.0)
    assert registry.ready(second, 2, "c")
    assert [worker.incarnation for worker in registry.workers("env")] == [1, 2]
    assert registry.incarnation("env") == 1
    registry.close_group("env")
    assert registry.open_group("env", 1) == 3


def test_a_closed_group_frees_its_name_and_not_its_incarnation(registry: WorkerRegistry) -> None:
    assert registry.close_group("actor") == (ACTOR_0, ACTOR_1)
    assert registry.close_group("actor") == ()
    assert registry.record(ACTOR_0) is None
    with pytest.raises(UnknownGroupError):
        registry.workers("actor")
    assert registry.open_group("actor", 3) == 2


def test_a_name_that_cannot_be_one_is_refused(registry: WorkerRegistry) -> None:
    with pytest.raises(InvalidNameError):
        registry.open_group("", 1)
    assert registry.record(WorkerAddress("actor")) is None
    assert registry.record(WorkerAddress("nobody", 3)) is None


@pytest.fixture
def owned() -> Ownership:
    """The driver has two groups; actor:0 has launched two of its own, one of which has launched another."""
    owned = Ownership()
    owned.claim("actor", "driver")
    owned.claim("env", "driver")
    owned.claim("helpers", "actor:0")
    owned.claim("deeper", "helpers:1")
    owned.claim("judges", "actor:0")
    return owned


def test_a_worker_takes_what_it_launched_along_and_nothing_else(owned: Ownership) -> None:
    assert owned.gone("actor:1") == ()
    assert owned.gone("helpers:1") == ("deeper",)
    assert owned.gone("helpers:1") == ()
    assert owned.gone("actor:0") == ("judges", "helpers")


def test_a_workers_groups_go_with_it_inner_ones_first(owned: Ownership) -> None:
    assert owned.gone("actor:0") == ("judges", "deeper", "helpers")
    assert owned.gone("driver") == ("env", "actor")


def test_with_the_driver_everything_goes(owned: Ownership) -> None:
    assert owned.gone("driver") == ("judges", "deeper", "helpers", "env", "actor")
    assert owned.gone("driver") == ()


def test_groups_that_are_named_after_their_parents_are_found(owned: Ownership) -> None:
    owned.claim("env:0", "env:0")
    owned.claim("env:0:3", "env:0:3")
    assert owned.gone("env:00") == ()
    assert owned.gone("env:0") == ("env:0:3", "env:0")


def test_what_is_released_or_handed_over_does_not_end_again(owned: Ownership) -> None:
    owned.release("judges")
    owned.release("judges")
    owned.claim("helpers", "env:0")
    assert owned.gone("actor:0") == ()
    assert owned.gone("env:0") == ("helpers", "deeper")


SIZE = 12 << 20
# Longer than a deadlock takes to be told, and in pieces that are further apart than two looks.
PIECE, PAUSE = 1 << 20, 0.4
ONE, OTHER = WorkerAddress("actor", 0), WorkerAddress("actor", 1)


class SlowRoad:
    """A way to a TCP port that lets so many bytes a second through."""

    def __init__(self, port: int) -> None:
        self._there = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._sockets: list[socket.socket] = [self._listener]
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._there))
                far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                self._sockets += [near, far]
                for way in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                carried += len(data)
                if carried > PIECE:
                    carried = 0
                    time.sleep(PAUSE)

    def close(self) -> None:
        for item in self._sockets:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()


@pytest.fixture
def workers(job: Job) -> tuple[ManagerClient, ManagerClient]:
    """Two workers of a job, as if on two hosts."""
    incarnation = job.join("driver").open_group("actor", 2, 10)
    settings = Settings(timeout=60.0, socket_buffer=1 << 16)
    return (
        job.join("actor:0", incarnation, settings=settings),
        job.join("actor:1", incarnation, rank=1, settings=settings),
    )


def test_a_slow_transfer_is_no_deadlock(workers: tuple[ManagerClient, ManagerClient]) -> None:
    one, other = workers
    # Whichever side connects first.
    roads = [SlowRoad(worker.endpoint.info.tcp_port) for worker in workers]
    infos = [
        replace(worker.endpoint.info, unix_path=None, tcp_port=road.port)
        for worker, road in zip(workers, roads, strict=True)
    ]
    outcomes: dict[str, object] = {}

    def send() -> None:
        group = CollectiveGroup(one.endpoint, ONE, (OTHER,), StaticResolver({OTHER: infos[1]}))
        try:
            group.send(bytes(SIZE), OTHER)
            outcomes["sent"] = True
        except Exception as error:
            outcomes["sent"] = error

    sending = threading.Thread(target=send, name="rlinf-test-send", daemon=True)
    began = time.monotonic()
    sending.start()
    group = CollectiveGroup(other.endpoint, OTHER, (ONE,), StaticResolver({ONE: infos[0]}))
    received = group.recv(ONE)
    sending.join(30)
    for road in roads:
        road.close()
    assert received == bytes(SIZE)
    assert outcomes == {"sent": True}
    assert time.monotonic() - began > 3.5

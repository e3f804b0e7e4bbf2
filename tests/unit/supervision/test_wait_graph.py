"""Circles of waiting: in graphs by hand, and in drawn jobs."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.supervision.wait_graph import Deadlock, DeadlockDetector, Process, Wait, WaitGraph, knots
from rlinf_core.supervision.waits import ProcessAnswer, processes_of
from rlinf_core.waiting import Operation, OperationKind, Publication


def operation(kind: str, target: str, *, age: float = 3, serial: int = 1, detached: bool = False) -> Operation:
    return Operation(OperationKind(kind), target, None, age, serial=serial, detached=detached)


def recv(source: str, *, age: float = 14, serial: int = 1) -> Wait:
    return Wait(operation("recv", source, age=age, serial=serial), (source,))


def get(channel: str, *producers: str, anyone: bool = False, age: float = 12, serial: int = 1) -> Wait:
    wait = operation("get", channel, age=age, serial=serial)
    return Wait(wait, producers, anyone=anyone, role="producer", state="empty")


def idle() -> Wait:
    return Wait(operation("idle", ""))


def call(*workers: str) -> Wait:
    return Wait(operation("call", "actor.train", age=20), workers, every=True)


def deadlocks(*processes: Process) -> list[tuple[str, ...]]:
    return [deadlock.members for deadlock in WaitGraph(processes).deadlocks()]


BOXES = ("holds 2 boxes", "tests of made/sum for 9.0 s: /tests/test.sh", "box of made/sum for 3.0 s: idle")


@pytest.mark.parametrize(
    ("processes", "silent", "sentences"),
    [
        (
            [
                Process("env:0", (get("action", "rollout:0", "rollout:1", "ghost:0"),)),
                Process("rollout:0", (recv("env:0"),)),
                Process("rollout:1", running=True, doing="runs `load` for 3.0 s"),
            ],
            {},
            "env:0 waits on channel `action`, empty, for 12 s; its producer rollout:1 runs `load` for 3.0 s; "
            "its producer ghost:0 is unknown; its producer rollout:0 waits in recv from env:0 for 14 s",
        ),
        (
            [Process("a", (recv("b"),))],
            {"b": 0.7},
            "a waits in recv from b for 14 s; b did not answer within 0.7 s",
        ),
        (
            [Process("env:3", (get("action", "agent:0"),)), Process("agent:0", (get("task"),), holds=BOXES)],
            {},
            "env:3 waits on channel `action`, empty, for 12 s; its only producer agent:0 waits on channel `task`,"
            " empty, for 12 s and holds 2 boxes; tests of made/sum for 9.0 s: /tests/test.sh; "
            "it has had no producer so far",
        ),
        (
            [Process("env:0", (get("action", anyone=True),))],
            {},
            "env:0 waits on channel `action`, empty, for 12 s; it has had no producer so far",
        ),
    ],
    ids=["everyone once", "who did not answer", "what goes on meanwhile", "no producers"],
)
def test_a_picture(processes: list[Process], silent: dict[str, float], sentences: str) -> None:
    """That of a job with its dead is in `test_waits.py`."""
    assert WaitGraph(processes, silent=silent).explain(processes[0].name) == sentences


def test_a_picture_of_one_operation_of_several() -> None:
    graph = WaitGraph([Process("a", (recv("b", serial=1), recv("c", serial=2)))])
    assert graph.explain("a", 2) == "a waits in recv from c for 14 s; c is unknown"
    runs = WaitGraph([Process("a", running=True)])
    assert runs.explain("a") == runs.explain("nobody") == ""


def test_a_long_picture_is_cut() -> None:
    many = [Process(f"env:{rank}", (recv(f"env:{rank + 1}"),)) for rank in range(40)]
    sentences = WaitGraph(many).explain("env:0").split("; ")
    assert len(sentences) == 12
    assert sentences[-1] == "and 30 more"


A_AND_B = Process("a", (recv("b"),)), Process("b", (recv("a"),))
C_RUNS = Process("c", running=True)
SENDING = Wait(operation("send", "b", detached=True), ("b",))
FAILING = Wait(operation("get", "x"), ("b",), failing=True)


@pytest.mark.parametrize(
    ("processes", "members"),
    [
        (A_AND_B, [("a", "b")]),
        ((*A_AND_B, C_RUNS), [("a", "b")]),
        ((Process("a", (recv("b"),)), Process("b", (idle(),)), C_RUNS), []),
        ((Process("a", (idle(),)), Process("b", (idle(),))), []),
        ((Process("a", (SENDING,)), A_AND_B[1]), []),
        ((Process("a", (recv("b"), recv("c", serial=2))), A_AND_B[1], C_RUNS), []),
        ((A_AND_B[0], Process("b", (recv("a"), recv("ghost", serial=2)))), []),
        ((Process("a", (FAILING,)), A_AND_B[1]), []),
        (
            (Process("env:10", (recv("env:2"),)), Process("env:2", (recv("env:10"),)), *A_AND_B),
            [("a", "b"), ("env:2", "env:10")],
        ),
    ],
    ids=[
        *("each other", "others that run do not help", "anyone who runs may call", "idle workers alone", "in flight"),
        *("one of several tasks", "the unknown can act", "about to fail", "two knots"),
    ],
)
def test_who_is_stuck(processes: tuple[Process, ...], members: list[tuple[str, ...]]) -> None:
    assert deadlocks(*processes) == members


def test_who_waits_for_a_knot_is_not_of_it() -> None:
    graph = WaitGraph(
        [Process("a", (recv("b"),)), Process("b", (recv("a"),)), Process("c", (recv("a"),)), Process("d", running=True)]
    )
    assert [deadlock.members for deadlock in graph.deadlocks()] == [("a", "b")]
    assert graph.stuck == {("a", 1), ("b", 1), ("c", 1)}


def test_one_possible_producer_that_runs_is_enough() -> None:
    consumer = Process("env:0", (get("action", "rollout:0", "rollout:1"),))
    stuck = Process("rollout:0", (recv("env:0"),))
    assert deadlocks(consumer, stuck, Process("rollout:1", running=True)) == []
    assert deadlocks(consumer, stuck, Process("rollout:1", (recv("env:0"),))) == [("env:0", "rollout:0", "rollout:1")]


def test_a_call_needs_every_worker() -> None:
    driver = Process("driver", (call("actor:0", "actor:1"),))
    waits_for_driver = Process("actor:0", (recv("driver"),))
    assert deadlocks(driver, waits_for_driver, Process("actor:1", running=True)) == [("actor:0", "driver")]
    assert deadlocks(driver, Process("actor:0", running=True), Process("actor:1", running=True)) == []
    assert deadlocks(Process("driver", (call(),))) == []


def test_a_worker_whose_method_nobody_calls() -> None:
    """The driver forgot to call env: everyone waits, and the idle worker is in the picture but not to blame."""
    [deadlock] = WaitGraph(
        [
            Process("driver", (call("actor:0"),)),
            Process("actor:0", (recv("env:0"),)),
            Process("env:0", (idle(),)),
        ]
    ).deadlocks()
    assert deadlock.members == ("actor:0", "driver")
    assert "env:0 is idle: no method of it has been called for 3.0 s" in deadlock.picture


def test_anyone_may_connect_to_a_channel() -> None:
    pair = Process("a", (get("x", "b", anyone=True),)), Process("b", (get("y", "a", anyone=True),))
    assert deadlocks(*pair) == [("a", "b")]
    assert deadlocks(*pair, Process("stranger", running=True)) == []
    assert deadlocks(*pair, Process("stranger", (idle(),))) == [("a", "b")]


def test_operations_in_flight_are_possible_producers() -> None:
    put = Wait(operation("put", "x", serial=2, detached=True), ("c",), wakes=frozenset({"a"}), role="consumer")
    waits = Process("a", (get("x", "b"),))
    producer = Process("b", (recv("a"), put))
    assert deadlocks(waits, producer, Process("c", running=True)) == []
    assert deadlocks(waits, producer, Process("c", (recv("a"),))) == [("a", "b", "c")]
    elsewhere = Wait(put.operation, ("c",), wakes=frozenset({"d"}))
    assert deadlocks(waits, Process("b", (recv("a"), elsewhere)), Process("c", running=True)) == [("a", "b")]


def test_the_dead_cannot_act_but_their_peers_will_be_told() -> None:
    dead = Process("z", died=1)
    assert deadlocks(Process("a", (recv("z"),)), Process("b", (recv("a"),)), dead) == []
    assert deadlocks(Process("a", (get("x", "z", "b"),)), Process("b", (recv("a"),)), dead) == [("a", "b")]
    assert deadlocks(Process("a", (call("z", "b"),)), Process("b", (recv("a"),)), dead) == []


def ring(size: int, progress: int = 0) -> list[Process]:
    return [Process(f"w:{rank}", (recv(f"w:{(rank + 1) % size}"),), progress) for rank in range(size)]


def test_a_deadlock_is_told_after_two_looks_a_second_apart() -> None:
    detector = DeadlockDetector()
    assert detector.look(ring(3), now=10) == []
    assert detector.look(ring(3), now=10.9) == []
    [deadlock] = detector.look(ring(3), now=11)
    assert deadlock.members == ("w:0", "w:1", "w:2")
    assert deadlock.operations == (("w:0", 1), ("w:1", 1), ("w:2", 1))


def test_progress_starts_the_wait_anew() -> None:
    detector = DeadlockDetector()
    detector.look(ring(3), now=0)
    moved = [*ring(3)[:2], Process("w:2", (recv("w:0"),), progress=1)]
    assert detector.look(moved, now=5) == []
    assert len(detector.look(moved, now=6)) == 1


def test_a_newcomer_starts_anew() -> None:
    detector = DeadlockDetector()
    assert detector.look(ring(3)[:2], now=0) == []
    assert detector.look(ring(3), now=5) == []


@pytest.mark.parametrize("size", [2, 1000])
def test_big_jobs_are_looked_at_quickly(size: int) -> None:
    names = tuple(f"w:{rank}" for rank in range(size))
    processes = [Process(name, (get("x", *names, anyone=True),)) for name in names]
    [deadlock] = WaitGraph(processes).deadlocks()
    assert isinstance(deadlock, Deadlock)
    assert deadlock.members == names


graphs = st.integers(0, 8).flatmap(
    lambda size: st.fixed_dictionaries({node: st.lists(st.integers(0, size - 1), max_size=3) for node in range(size)})
)


def reach(edges: dict[int, list[int]], start: int) -> frozenset[int]:
    seen, todo = {start}, [start]
    while todo:
        for successor in edges[todo.pop()]:
            if successor not in seen:
                seen.add(successor)
                todo.append(successor)
    return frozenset(seen)


@given(graphs)
def test_knots_are_the_smallest_sets_that_nothing_leaves(edges: dict[int, list[int]]) -> None:
    reached = {node: reach(edges, node) for node in edges}
    expected = {reached[node] for node in edges if all(reached[other] == reached[node] for other in reached[node])}
    results = [frozenset(knot) for knot in knots(edges)]
    assert set(results) == expected
    assert len(results) == len(expected)


def test_long_chains_need_no_recursion() -> None:
    length = 5 * sys.getrecursionlimit()
    edges = {node: [node + 1] for node in range(length)} | {length: [length - 1]}
    assert knots(edges) == [{length - 1, length}]


@pytest.mark.parametrize("kind", [OperationKind.SEND, OperationKind.RECV, OperationKind.SEND_TENSOR])
def test_waits_for_a_name_that_nobody_has_are_hopeless(kind: OperationKind) -> None:
    def running(*waits: Operation) -> ProcessAnswer:
        return ProcessAnswer(Publication(waits, 1, running=False))

    method = Operation(OperationKind.METHOD, "work", None, 5.0, 1)
    both = [Operation(part, "nobody:0", None, 5.0, 2 + n) for n, part in enumerate((kind, OperationKind.CONNECT))]
    call = Operation(OperationKind.CALL, "work", None, 5.0, 1, peers=("env:0",))
    answers = {"env:0": running(method, *both), "driver": running(call)}
    assert {name for name, _ in WaitGraph(processes_of(answers, {}, frozenset({"nobody:0"}))).stuck} == {*answers}
    assert not WaitGraph(processes_of(answers, {})).stuck


NAMES = ("a", "b", "c", "d")
CHANNELS = ("x", "y")
MAXSIZE = 1

# ("compute",), ("send", to), ("recv", from), ("put", channel), ("push", channel), ("get", channel); push is a put
# with async_op=True.
Step = tuple[str, ...]
steps = st.one_of(
    st.just(("compute",)),
    st.tuples(st.sampled_from(["send", "recv"]), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(["put", "push", "get"]), st.sampled_from(CHANNELS)),
)
programs = st.fixed_dictionaries({name: st.lists(steps, max_size=5) for name in NAMES})


@dataclass
class Job:
    """Workers that follow their programs. A put waits while its channel holds MAXSIZE items; a send never does."""

    programs: dict[str, list[Step]]
    at: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHANNELS, 0))
    pushes: deque[tuple[str, str, int]] = field(default_factory=deque)

    def copy(self) -> Job:
        return Job(self.programs, dict(self.at), dict(self.sent), dict(self.items), deque(self.pushes))

    def step(self, name: str) -> Step | None:
        program = self.programs[name]
        return program[self.at[name]] if self.at[name] < len(program) else None

    def can_move(self, name: str) -> bool:
        match self.step(name):
            case None:
                return False
            case ("recv", source):
                return self.sent.get((source, name), 0) > 0
            case ("get", channel):
                return self.items[channel] > 0
            case ("put", channel):
                return self.items[channel] < MAXSIZE
            case _:
                return True

    def move(self, name: str) -> None:
        match self.step(name):
            case ("send", to):
                self.sent[name, to] = self.sent.get((name, to), 0) + 1
            case ("recv", source):
                self.sent[source, name] -= 1
            case ("get", channel):
                self.items[channel] -= 1
            case ("put", channel):
                self.items[channel] += 1
            case ("push", channel):
                self.pushes.append((name, channel, 100 + self.at[name]))
            case _:
                pass
        self.at[name] += 1
        self.let_in()

    def let_in(self) -> None:
        for push in list(self.pushes):
            if self.items[push[1]] < MAXSIZE:
                self.items[push[1]] += 1
                self.pushes.remove(push)

    def users(self, channel: str, *kinds: str) -> tuple[str, ...]:
        return tuple(name for name in NAMES if any((kind, channel) in self.programs[name] for kind in kinds))

    def wait(self, name: str, step: Step, serial: int, *, anyone: bool, detached: bool = False) -> Wait:
        kind, target = step
        operation = Operation(OperationKind(kind), target, None, 1, serial, detached)
        if kind == "recv":
            return Wait(operation, (target,))
        if kind == "get":
            return Wait(operation, self.users(target, "put", "push"), anyone=anyone, role="producer")
        wakes = frozenset(self.users(target, "get")) if detached else frozenset[str]()
        return Wait(operation, self.users(target, "get"), anyone=anyone, wakes=wakes, role="consumer")

    def processes(self, *, anyone: bool) -> list[Process]:
        result: list[Process] = []
        for name in NAMES:
            step = self.step(name)
            waits = [
                self.wait(name, ("put", channel), serial, anyone=anyone, detached=True)
                for owner, channel, serial in self.pushes
                if owner == name
            ]
            running = step is not None and self.can_move(name)
            if step is None:
                waits.append(Wait(Operation(OperationKind.IDLE, "", None, 1, 1)))
            elif not running:
                waits.append(self.wait(name, step, self.at[name] + 1, anyone=anyone))
            result.append(Process(name, tuple(waits), progress=self.at[name] + len(self.pushes), running=running))
        return result

    def waiting(self) -> set[tuple[str, int]]:
        return {
            (process.name, wait.operation.serial)
            for process in self.processes(anyone=False)
            for wait in process.waits
            if wait.operation.kind is not OperationKind.IDLE
        }


def can_ever_move(job: Job) -> set[str]:
    """Return who moves in some order of events from here, found by trying every order."""
    moved: set[str] = set()
    seen: set[object] = set()
    todo = [job]
    while todo:
        current = todo.pop()
        state = (
            tuple(current.at.items()),
            tuple(sorted(current.sent.items())),
            tuple(current.items.items()),
            tuple(current.pushes),
        )
        if state in seen:
            continue
        seen.add(state)
        for name in NAMES:
            if current.can_move(name):
                moved.add(name)
                after = current.copy()
                after.move(name)
                todo.append(after)
    return moved


@given(programs, st.lists(st.sampled_from(NAMES), max_size=20), st.booleans())
def test_no_false_alarm(programs: dict[str, list[Step]], order: list[str], anyone: bool) -> None:
    job = Job(programs)
    for name in order:
        if job.can_move(name):
            job.move(name)
    stuck = WaitGraph(job.processes(anyone=anyone)).stuck
    alive = can_ever_move(job)
    assert not {name for name, serial in stuck if serial < 100 and job.step(name) is not None} & alive


@given(programs, st.booleans())
def test_every_real_knot_is_found(programs: dict[str, list[Step]], anyone: bool) -> None:
    """Once nothing can move, everything that waits waits for ever."""
    job = Job(programs)
    while movable := [name for name in NAMES if job.can_move(name)]:
        job.move(movable[0])
    graph = WaitGraph(job.processes(anyone=anyone))
    idle = {name for name in NAMES if job.step(name) is None}
    assert {node for node in graph.stuck if node[1] != 1 or node[0] not in idle} == job.waiting()
    blocked = {node for node in job.waiting() if node[1] < 100}
    deadlocks = graph.deadlocks()
    if blocked:
        assert deadlocks
    for deadlock in deadlocks:
        assert set(deadlock.operations) <= job.waiting()
        assert all(member in deadlock.picture for member in deadlock.members)


@given(programs, st.lists(st.sampled_from(NAMES), max_size=20))
def test_a_possible_waker_that_runs_undoes_a_knot(programs: dict[str, list[Step]], order: list[str]) -> None:
    job = Job(programs)
    for name in order:
        if job.can_move(name):
            job.move(name)
    processes = job.processes(anyone=False)
    for deadlock in WaitGraph(processes).deadlocks():
        for name, serial in deadlock.operations:
            [wait] = [
                wait
                for process in processes
                if process.name == name
                for wait in process.waits
                if wait.operation.serial == serial
            ]
            for waker in wait.waits_for:
                awake = [Process(one.name, one.waits, running=one.running or one.name == waker) for one in processes]
                assert (name, serial) not in WaitGraph(awake).stuck


@given(st.integers(2, 4), st.integers(1, 30))
def test_a_pipeline_that_looks_circular_is_never_called_dead(looks: int, rounds: int) -> None:
    """env puts observations and gets actions, rollout gets observations and puts actions, round and round."""
    loop: list[Step] = [("put", "x"), ("get", "y")]
    answer: list[Step] = [("get", "x"), ("compute",), ("put", "y")]
    job = Job({"a": loop * rounds, "b": answer * rounds, "c": [], "d": []})
    detector = DeadlockDetector()
    now = 0.0
    while movable := [name for name in NAMES if job.can_move(name)]:
        job.move(movable[-1])
        for _ in range(looks):
            now += 0.9
            assert detector.look(job.processes(anyone=False), now) == []

"""The wait-for graph on whole jobs: small programs run in a simulator, where what can still move is found by trying."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.supervision.wait_graph import DeadlockDetector, Process, Wait, WaitGraph
from rlinf_core.waiting import Operation, OperationKind

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
        operation = Operation(OperationKind(kind), target, None, 0, serial, detached)
        if kind == "recv":
            return Wait(operation, 1, (target,))
        if kind == "get":
            return Wait(operation, 1, self.users(target, "put", "push"), anyone=anyone, role="producer")
        wakes = frozenset(self.users(target, "get")) if detached else frozenset[str]()
        return Wait(operation, 1, self.users(target, "get"), anyone=anyone, wakes=wakes, role="consumer")

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
                waits.append(Wait(Operation(OperationKind.IDLE, "", None, 0, 1), 1))
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

"""A job in a simulated world: the real manager, and workers that register, look each other up, wait, die and return.

Judged is that a death is told once, and before the successor is; that who is looked up is found, or told dead; and that
a deadlock is told of those that are in one, in time, and of nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.supervision.deaths import Died
from rlinf_core.supervision.lives import Hello
from rlinf_core.supervision.manager import Manager
from rlinf_core.supervision.rpc import ManagerCall, Reply, Rpc
from rlinf_core.supervision.wait_graph import knots
from rlinf_core.supervision.waits import ProcessAnswer
from rlinf_core.waiting import Operation, OperationKind, Publication
from tests.unit.simulation.world import Wire, World

_PLACE = EndpointInfo("manager", "here", 0, None, "", 0, 1)


class Control(Rpc):
    """The calls of the manager: they are run one by one, a moment after they arrived."""

    def __init__(self, endpoint: Any, *arguments: Any) -> None:
        self._world: World = endpoint.world
        self._judge: Callable[[tuple[str, ...]], None] = endpoint.judge_verdict
        self._wire = Wire(self._world, self._step)
        self._ticking = False
        super().__init__(endpoint, *arguments)

    def start(self) -> None:
        """Start no thread."""

    def soon(self, function: Callable[[], object]) -> None:
        self._wire.send(function)

    def send(self, stream: Any, message: ManagerCall | Reply) -> None:
        if isinstance(message, ManagerCall) and message.name == "stuck":
            self._judge(message.args[1])
        stream.wire.send(message)

    def _step(self, function: Callable[[], object]) -> None:
        function()
        self._tick()
        self._plan_tick()

    def _plan_tick(self) -> None:
        if not self._ticking and self._every() < 1.0:
            self._ticking = True
            self._world.after(self._every(), self._due)

    def _due(self) -> None:
        self._ticking = False
        self._tick()
        self._plan_tick()


class Stream:
    """The manager's way to a process."""

    def __init__(self, peer: str, wire: Wire) -> None:
        self.peer, self.wire = peer, wire


class Member:
    """One life of a process of the job."""

    def __init__(self, run: ManagerRun, name: str, incarnation: int) -> None:
        self.run, self.name, self.incarnation = run, name, incarnation
        self.alive = True
        self.stream = Stream(name, Wire(run.world, self._receive))
        self._there = Wire(run.world, lambda message: run.arrived(self.stream, message))
        self.waits_for: Member | None = None
        self.since = self.progress = self.serial = 0.0
        self.lookups: dict[int, str] = {}
        self.reopened: dict[int, str] = {}
        self.reports: list[Died] = []
        info = EndpointInfo(f"{name}/{incarnation}", f"host of {name}", 0, None, "", 0, 1)
        self.tell("hello", Hello(incarnation, info, "node 1"))

    def say(self, message: object) -> None:
        if self.alive:
            self._there.send(message)

    def tell(self, name: str, *args: object) -> None:
        self.say(ManagerCall(name, args))

    def ask(self, name: str, *args: object) -> int:
        self.serial += 1
        self.say(ManagerCall(name, args, int(self.serial)))
        return int(self.serial)

    def wait(self, peer: Member) -> None:
        """Wait for a message of another process, for ever if need be."""
        self.waits_for, self.since = peer, self.run.world.now
        self.progress += 1
        self.run.world.note(self.name, "waits for", peer.name)
        self.run.world.after(2.0, self._report)

    def go_on(self) -> None:
        self.waits_for = None
        self.progress += 1

    def _report(self) -> None:
        if self.alive and self.waits_for is not None:
            self.tell("waits_long")
            self.run.world.after(2.0, self._report)

    def publication(self) -> Publication:
        if self.waits_for is None:
            return Publication((), int(self.progress), True)
        age = self.run.world.now - self.since
        operation = Operation(OperationKind.RECV, self.waits_for.name, None, age, int(self.progress))
        return Publication((operation,), int(self.progress), False)

    def die(self) -> None:
        self.alive = False
        self.run.world.note(self.name, self.incarnation, "dies")
        self._there.send(None)

    def _receive(self, message: ManagerCall | Reply) -> None:
        if not self.alive:
            return
        if isinstance(message, Reply):
            self._answered(message)
            return
        match message.name, message.args:
            case "observe", _:
                self.say(Reply(message.serial, ProcessAnswer(self.publication())))
            case "died", (Died() as died,):
                self.run.world.note(self.name, "hears of", died.address, died.incarnation)
                self.reports.append(died)
                if self.waits_for is not None and self.waits_for.name == died.address:
                    self.go_on()
            case "exit_reason", _:
                self.say(Reply(message.serial, "its log ends"))
            case "stuck", (serials, members, _):
                self.run.stuck(self, serials, members)
            case _:
                pass

    def _answered(self, reply: Reply) -> None:
        name = self.lookups.pop(reply.serial, None)
        reopened = self.reopened.pop(reply.serial, None)
        if reopened is not None:
            self.run.world.soon(self.run.start, reopened, reply.value, within=2.0)
        if name is not None and isinstance(reply.value, EndpointInfo):
            _, _, life = reply.value.incarnation.partition("/")
            self.run.world.note(self.name, "finds", reply.value.incarnation)
            incarnations = [died.incarnation for died in self.reports if died.address == name]
            self.run.world.check(int(life) not in incarnations, name, life, "is found after its death was told")


class ManagerRun:
    """A job of two groups and a driver."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.control: Control
        self._lost: Callable[[str, str], None] = lambda peer, reason: None
        endpoint: Any = self
        control: Any = self._made
        self.info = _PLACE
        self.manager = Manager(endpoint, "job", control, world.clock)
        self.members: dict[str, Member] = {}
        self._present: dict[str, Stream] = {}
        self.died: list[tuple[str, int]] = []

    def _made(self, *arguments: Any) -> Control:
        self.control = Control(*arguments)
        return self.control

    def serve(self, tag: int, handler: object) -> None:
        """Messages arrive by `arrived`."""

    def on_peer_lost(self, callback: Callable[[str, str], None]) -> None:
        self._lost = callback

    def arrived(self, stream: Stream, message: object) -> None:
        if message is None:
            # Streams tell of the end of a peer's present connection alone, see `PeerStreams.lost`.
            if self._present.get(stream.peer) is stream:
                self._lost(stream.peer, "its connection ended")
            return
        if isinstance(message, ManagerCall) and message.name == "hello":
            self._present[stream.peer] = stream
        # What a dead process said is dropped once its successor has spoken, see `PeerStreams.bind`.
        if self._present[stream.peer] is stream:
            self.control.received(stream, message)

    def play(self) -> None:
        world = self.world
        driver = self.members["driver"] = Member(self, "driver", 0)
        sizes = {"a": world.random.randint(1, 3), "b": world.random.randint(1, 3)}
        for group, size in sizes.items():
            driver.ask("open_group", group, size, False)
        names = [f"{group}:{rank}" for group, size in sizes.items() for rank in range(size)]
        for name in names:
            world.after(5.0 + world.random.random(), self.start, name, 1)
        world.run(10.0)
        for _ in range(world.random.randint(0, 8)):
            world.after(world.random.random() * 20, self._look_up, *world.random.choices(names, k=2))
        for name in world.random.sample(names, world.random.randint(0, min(2, len(names)))):
            world.after(world.random.random() * 20, self._die, name)
        for _ in range(world.random.randint(0, 10)):
            world.after(world.random.random() * 20, self._exchange, *world.random.choices(names, k=2))
        world.run(60.0)
        self._judge_deaths()
        stuck = self._really_stuck()
        world.check(not stuck, "a deadlock that nobody tells of:", stuck)

    def start(self, name: str, incarnation: int) -> None:
        self.members[name] = Member(self, name, incarnation)

    def _look_up(self, first: str, second: str) -> None:
        member = self.members[first]
        if member.alive and first != second:
            member.lookups[member.ask("lookup", second, False)] = second

    def _exchange(self, first: str, second: str) -> None:
        """Let one wait for another, which may answer within a second, or wait itself and never."""
        waiting, peer = self.members[first], self.members[second]
        if first == second or not waiting.alive or not peer.alive or waiting.waits_for is not None:
            return
        waiting.lookups[waiting.ask("lookup", second, False)] = second
        waiting.wait(peer)
        self.world.after(self.world.random.random() * 8, self._answer, peer, waiting)

    def _answer(self, peer: Member, waiting: Member) -> None:
        if not peer.alive or waiting.waits_for is not peer:
            return
        if peer.waits_for is not None:
            self.world.after(1.0, self._answer, peer, waiting)
        elif self.world.chance(0.9):
            self.world.soon(self._arrive, waiting, peer, within=0.8)

    def _arrive(self, waiting: Member, peer: Member) -> None:
        if waiting.waits_for is peer:
            waiting.go_on()

    def _die(self, name: str) -> None:
        member = self.members[name]
        if not member.alive:
            return
        member.die()
        self.died.append((name, member.incarnation))
        driver = self.members["driver"]
        self.world.soon(self._reopen, driver, name, within=2.0)

    def _reopen(self, driver: Member, name: str) -> None:
        driver.reopened[driver.ask("reopen", name)] = name

    def _really_stuck(self) -> list[str]:
        """Return who waits in a ring, and has for some seconds."""
        edges = {
            name: [member.waits_for.name] if member.alive and member.waits_for is not None else []
            for name, member in self.members.items()
        }
        rings = [ring for ring in knots(edges) if all(edges[name] for name in ring)]
        old = [ring for ring in rings if all(self.members[name].since < self.world.now - 15 for name in ring)]
        return sorted(name for ring in old for name in ring)

    def judge_verdict(self, names: tuple[str, ...]) -> None:
        """Judge a verdict when it is given: by the time that it is heard, its first member may go on.

        One that died a moment ago, which nobody can know yet, was in it.
        """
        members = [self.members[name] for name in names]
        self.world.check(all(member.waits_for in members for member in members), "no deadlock among", *names)

    def stuck(self, member: Member, serials: tuple[int, ...], members: tuple[str, ...]) -> None:
        self.world.note(member.name, "is told of a deadlock of", *members)
        if int(member.progress) in serials:
            member.go_on()

    def _judge_deaths(self) -> None:
        driver = self.members["driver"]
        messages = [(died.address, died.incarnation) for died in driver.reports]
        self.world.check(sorted(messages) == sorted(set(messages)), "a death is told twice:", messages)
        for name, _ in self.died:
            count = sum(one == name for one, _ in messages)
            self.world.check(count == 1, "the death of", name, "is told", count, "times")
        self.world.check(len(messages) == len(self.died), "told are", messages, "dead are", self.died)
        for member in self.members.values():
            if member.alive:
                missing = [name for name in member.lookups.values() if self.members[name].alive]
                self.world.check(not missing, member.name, "never finds", missing)

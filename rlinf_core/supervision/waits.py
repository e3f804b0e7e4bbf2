"""The waits of a job: their graph, rounds of questions to all processes, deadlock checks, and reports of long waits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.work import Work
from rlinf_core.errors import RuntimeFailure
from rlinf_core.process.activity import InflightOps
from rlinf_core.supervision.lives import MANAGER
from rlinf_core.supervision.wait_graph import Deadlock, DeadlockDetector, Process, Wait, WaitGraph
from rlinf_core.waiting import FIRST_WORD_AFTER, RUNNING, Operation, OperationKind, Publication

# Seconds between rounds while any process waits: slightly more than the detector's patience, so that two suffice.
_LOOK_EVERY = 1.0
_PATIENCE = 0.9
# The time limit for all answers: a process in native code answers late or not at all.
_ROUND_SECONDS = 0.7
# Waits of fewer seconds are ignored.
_LONG_WAIT = 1.0
_PUTS = frozenset({OperationKind.PUT})
_GETS = frozenset({OperationKind.GET, OperationKind.GET_BATCH})
_ANSWERED_BY_CHANNELS = frozenset({OperationKind.QUERY, OperationKind.CLOSE})
_CALLS = frozenset({OperationKind.CALL, OperationKind.LAUNCH})
# The number of past pauses that are kept.
_PAUSES_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class ChannelView:
    """The known facts about a channel.

    Attributes:
        producers: the processes that have put into it, or wait to.
        consumers: the processes that have got from it, or wait to.
        maxsize: the bound of each key; 0 means none.
        depths: the number of items, neither taken nor reserved, by key.
    """

    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    maxsize: int = 0
    depths: Mapping[str, int] = field(default_factory=dict[str, int])

    def orphaned(self, key: str, dead: frozenset[str]) -> bool:
        """Return whether a get of `key` must fail: the key is empty, and all producers of the channel are dead."""
        return bool(self.producers) and not self.depths.get(key) and dead.issuperset(self.producers)

    def state(self, operation: Operation) -> str:
        """Return the state of the channel for an operation, as text."""
        depth = self.depths.get(operation.key or "default", 0)
        if operation.kind in _PUTS:
            return f"full ({depth} of {self.maxsize})" if 0 < self.maxsize <= depth else ""
        return "empty" if depth == 0 else f"with {depth} items"


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """The answer of a process to the manager: its current operations.

    Attributes:
        in_flight: the workers with unanswered calls of this process.
        channels: the channels that it hosts, by name.
        stacks: the stacks of its threads, as text, if requested.
        recent: its operations of the last 30 s, likewise.
        recipients: the processes to which its messages are in transit: their incarnations, or names in the manager.
        holds: descriptions of further resources that it holds.
    """

    publication: Publication
    in_flight: tuple[str, ...] = ()
    channels: Mapping[str, ChannelView] = field(default_factory=dict[str, ChannelView])
    stacks: str = ""
    recent: str = ""
    recipients: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobView:
    """The facts about a job beyond its published operations.

    Attributes:
        channels: the channels, by name.
        dead: the processes that died.
        unknown: the names in lookups that no group or channel has.
    """

    channels: Mapping[str, ChannelView] = field(default_factory=dict[str, ChannelView])
    dead: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()

    def process(self, name: str, publication: Publication) -> Process:
        methods = [operation for operation in publication.operations if operation.kind in RUNNING]
        waits = tuple(self._wait(operation) for operation in publication.operations if operation.kind not in RUNNING)
        held_up = any(not wait.operation.detached for wait in waits)
        if not publication.running and not held_up:
            # No operation has this serial.
            idle = Operation(OperationKind.IDLE, publication.last_call, None, publication.quiet, serial=-1)
            waits = (*waits, Wait(idle, anyone=True))
        doing = methods[-1].waits() if methods else "runs"
        return Process(name, waits, publication.progress, publication.running, doing)

    def _wait(self, operation: Operation) -> Wait:
        if operation.kind in _GETS or operation.kind in _PUTS:
            return self._wait_on_channel(operation)
        if operation.kind in (OperationKind.CALL, OperationKind.LAUNCH, OperationKind.BROADCAST):
            peers = operation.peers
            return Wait(operation, peers, every=bool(peers), anyone=not peers, failing=operation.bounded)
        if operation.target in self.unknown:
            # Any running process may still launch it.
            state = "which has not been launched"
            return Wait(operation, anyone=True, state=state)
        # Only the process of a channel answers a query of it.
        target = f"{operation.target}:0" if operation.kind in _ANSWERED_BY_CHANNELS else operation.target
        peers = operation.peers or (target,)
        wakes = frozenset(peers) if operation.detached else frozenset[str]()
        return Wait(operation, peers, wakes=wakes, failing=operation.bounded)

    def _wait_on_channel(self, operation: Operation) -> Wait:
        channel = self.channels.get(operation.target, ChannelView())
        getting = operation.kind in _GETS
        wakes = channel.consumers if not getting else ()
        return Wait(
            operation,
            channel.producers if getting else channel.consumers,
            # Any running process, such as the driver, may connect to a channel and wake its waiters.
            anyone=True,
            wakes=frozenset(wakes) if operation.detached else frozenset(),
            failing=operation.bounded or (getting and channel.orphaned(operation.key or "default", self.dead)),
            role="producer" if getting else "consumer",
            state=channel.state(operation),
        )


@dataclass(slots=True)
class Round:
    """A round of questions to all processes, which ends at `until` (monotonic seconds), answered or not.

    Attributes:
        asked: the processes that should answer.
        calls: the serials of the questions.
        answers: the answers so far, by process.
    """

    stacks: bool
    until: float
    done: Callable[[Round], None]
    asked: set[str] = field(default_factory=set[str])
    calls: list[int] = field(default_factory=list[int])
    answers: dict[str, ProcessAnswer] = field(default_factory=dict[str, ProcessAnswer])

    @property
    def complete(self) -> bool:
        return self.asked <= self.answers.keys()

    def graph(self, dead: Mapping[str, float]) -> WaitGraph:
        silent = dict.fromkeys(self.asked - self.answers.keys() - dead.keys(), _ROUND_SECONDS)
        return WaitGraph(processes_of(self.answers, dead), silent=silent)


def processes_of(
    answers: Mapping[str, ProcessAnswer], dead: Mapping[str, float], unknown: frozenset[str] = frozenset()
) -> list[Process]:
    """Return the processes that answered, and the dead processes, given with the seconds since their deaths."""
    channels: dict[str, ChannelView] = {}
    called: set[str] = set()
    expecting: set[str] = set()
    for answer in answers.values():
        channels.update(answer.channels)
        called.update(answer.in_flight)
        expecting.update(answer.recipients)
    view = JobView(channels, frozenset(dead), unknown)
    processes = [Process(name, died=seconds) for name, seconds in dead.items()]
    for name, answer in answers.items():
        publication = answer.publication
        if name in expecting or (name in called and not publication.operations):
            # A message, a call or its reply is in transit, on a link that may be slow or cut: it arrives, or the link
            # is declared lost.
            publication = replace(publication, running=True)
        processes.append(replace(view.process(name, publication), holds=answer.holds))
    return processes


class Watch:
    """The running rounds, and periodic checks while any process waits.

    Args:
        ask: asks all processes for a round.
        end: called with a round that has ended.
        dead: returns the seconds since its death for each dead worker.
    """

    def __init__(
        self,
        ask: Callable[[Round], None],
        end: Callable[[Round], None],
        dead: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._end, self._dead, self._clock = ask, end, dead, clock
        self._rounds: list[Round] = []
        self._detector = DeadlockDetector(_PATIENCE)
        self._watching = False
        self._looking = False
        self._next_look = 0.0
        self._deadlocks: list[Deadlock] = []
        # Unknown names that processes look up; set by the manager.
        self.unknown: frozenset[str] = frozenset()

    def alarm(self) -> None:
        """Start checking, since a process has waited for long."""
        self._watching = True

    @property
    def busy(self) -> bool:
        """Whether rounds are running or periodic checks are on."""
        return self._watching or bool(self._rounds)

    def begin(self, done: Callable[[Round], None], *, stacks: bool = False) -> None:
        """Ask all processes; `done` is called when all have answered or the time is up."""
        round_ = Round(stacks, self._clock() + _ROUND_SECONDS, done)
        self._rounds.append(round_)
        self._ask(round_)

    def left(self, name: str) -> None:
        """Record that a process has ended, so that its answers are not awaited."""
        for round_ in self._rounds:
            round_.asked.discard(name)

    def tick(self) -> list[Deadlock]:
        """End due rounds; return new deadlocks."""
        now = self._clock()
        if self._watching and not self._looking and now >= self._next_look:
            self._looking = True
            self._next_look = now + _LOOK_EVERY
            self.begin(self._look)
        for round_ in [round_ for round_ in self._rounds if round_.complete or now >= round_.until]:
            self._rounds.remove(round_)
            self._end(round_)
            round_.done(round_)
        deadlocks, self._deadlocks = self._deadlocks, []
        return deadlocks

    def _look(self, round_: Round) -> None:
        self._looking = False
        self._watching = any(map(_waits, round_.answers.items()))
        self._deadlocks += self._detector.look(processes_of(round_.answers, self._dead(), self.unknown), self._clock())


def _waits(named: tuple[str, ProcessAnswer]) -> bool:
    name, answer = named
    return any(is_long_wait(operation, is_worker=":" in name) for operation in answer.publication.operations)


def is_long_wait(operation: Operation, *, is_worker: bool) -> bool:
    """Return whether an operation is a long wait that may be a deadlock; a driver's calls on workers do not count."""
    if operation.kind in RUNNING or operation.age < _LONG_WAIT:
        return False
    return is_worker or operation.kind not in _CALLS


# The kinds of operations that are not logged; group calls and peer lookups have their own messages.
_SILENT = frozenset({*RUNNING, OperationKind.IDLE, OperationKind.CALL, OperationKind.LAUNCH, OperationKind.CONNECT})


class LongWaits:
    """The record of logged waits: a wait is logged when it lasts twice as long as any similar wait logged before.

    So a long wait is logged at growing intervals, and regular waits of equal length, as in training steps, only once.
    """

    def __init__(self, first_word_after: float = FIRST_WORD_AFTER) -> None:
        self._first_word_after = first_word_after
        # By operation and target: the duration from which the next wait is logged.
        self._silence: dict[tuple[OperationKind, str], float] = {}
        # By serial: the age of an operation when a wait for it was first seen. Before, its process may have worked.
        self._since: dict[int, float] = {}

    def due(self, publication: Publication) -> list[Operation]:
        """Return the operations to log now; to be called about every second with the current operations."""
        waited_for = [
            operation for operation in publication.operations if not (operation.detached or operation.kind in _SILENT)
        ]
        self._since = {operation.serial: self._since.get(operation.serial, operation.age) for operation in waited_for}
        due: list[Operation] = []
        for operation in waited_for:
            waited, like_it = operation.age - self._since[operation.serial], (operation.kind, operation.target)
            if waited >= self._silence.get(like_it, self._first_word_after):
                self._silence[like_it] = 2 * waited
                due.append(operation)
        return due


class Pauses:
    """The times in which any process waits at a breakpoint, which extend the deadlines of other processes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: set[str] = set()
        self._since = 0.0
        self._past: deque[tuple[float, float]] = deque(maxlen=_PAUSES_KEPT)

    def begin(self, name: str) -> None:
        """Record that a process waits at a breakpoint."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting.add(name)

    def end(self, name: str) -> None:
        """Record that a process continues, or has ended."""
        if name in self._waiting:
            self._waiting.remove(name)
            if not self._waiting:
                self._past.append((self._since, self._clock()))

    def within(self, seconds: float) -> float:
        """Return for how many of the last `seconds` any process waited at a breakpoint."""
        now = self._clock()
        spans = [*self._past, *([(self._since, now)] if self._waiting else [])]
        return sum(max(0.0, end - max(begin, now - seconds)) for begin, end in spans)


_log = logging.getLogger("rlinf.job")
_REPORT_EVERY: Final = 1.0
_PICTURE_SECONDS: Final = 1.5
_SHORTEST_EXTENDED: Final = 1.0
# The serial that stands for an expired operation; no operation has it.
_EXPIRED: Final = -2


class WaitReports:
    """The reports of one process about its waits.

    Args:
        me: the address of this process.
        operations: the pending operations of this process.
        call: calls a method of the manager by name, with its arguments and the time limit `seconds`.
        notify: calls a method of the manager by name, without waiting for a result.

    Attributes:
        long_waits: decides which waits are logged.
    """

    def __init__(
        self, me: WorkerAddress, operations: InflightOps, call: Callable[..., Any], notify: Callable[[str], object]
    ) -> None:
        self._name, self._is_worker = me.get_name(), bool(me.ranks)
        self._operations, self._call, self._notify = operations, call, notify
        self.long_waits = LongWaits()
        self._next = 0.0
        self._closed = False

    @property
    def due_in(self) -> float:
        """Seconds until the next report."""
        return max(0.0, self._next - time.monotonic())

    def report(self) -> None:
        """Report long waits to the manager and to the log."""
        self._next = time.monotonic() + _REPORT_EVERY
        publication = self._operations.publication()
        if any(is_long_wait(operation, is_worker=self._is_worker) for operation in publication.operations):
            self._notify("waits_long")
        for operation in self.long_waits.due(publication):
            # In a separate thread: the description of a wait needs answers of other processes, and of this one.
            threading.Thread(
                target=self._log, args=(operation, publication), name="rlinf-first-word", daemon=True
            ).start()

    def paused(self, target: str, seconds: float) -> float:
        """Return the number of the last `seconds` in which a process of the job waited at a breakpoint.

        Time limits below a second are not extended: their callers are meant to continue after them.
        """
        if target == MANAGER or seconds < _SHORTEST_EXTENDED or self._closed:
            return 0.0
        try:
            return self._call("paused", seconds, seconds=_PICTURE_SECONDS)
        except RuntimeFailure:
            return 0.0

    def picture_of(self, serial: int) -> str | None:
        """Return a description of the peers that an operation of this process waits for; None if it takes too long."""
        return self._explained(serial, self._operations.publication())

    def picture_of_expired(self, work: Work[Any]) -> str | None:
        """Return a description of the peers that an expired operation waits for; blocks briefly."""
        if work.target == MANAGER:
            return None
        # The operation may have ended already, so an entry for it is added.
        shown = Operation(work.kind, work.target, work.key, time.monotonic() - work.since, _EXPIRED)
        now = self._operations.publication()
        return self._explained(_EXPIRED, replace(now, operations=(*now.operations, shown), running=False))

    def close(self) -> None:
        """Stop reporting."""
        self._closed = True

    def _log(self, operation: Operation, publication: Publication) -> None:
        picture = self._explained(operation.serial, publication)
        if picture is None:
            picture = f"{self._name} {operation.waits()}"
        if not self._closed:
            _log.warning("%s", picture)

    def _explained(self, serial: int, publication: Publication) -> str | None:
        if self._closed:
            return None
        try:
            return self._call("explain", serial, publication, seconds=_PICTURE_SECONDS) or None
        except RuntimeFailure:
            return None

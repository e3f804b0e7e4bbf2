"""Polling rounds over all processes of a job, and deadlock detection on the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlinf_core.manager.manager_messages import ProcessAnswer
from rlinf_core.manager.wait_edges import ChannelView, JobView
from rlinf_core.manager.wait_graph import Deadlock, DeadlockDetector, Process, WaitGraph
from rlinf_core.waiting import FIRST_WORD_AFTER, RUNNING, Operation, OperationKind, Publication, PublishedOperation

# Seconds between rounds while any process waits; slightly more than the detector's patience, so that two rounds
# suffice.
_LOOK_EVERY = 1.0
_PATIENCE = 0.9
# Seconds to wait for the last answer: a process in native code answers late or not at all.
_ROUND_SECONDS = 0.7
# Shorter waits are ignored.
_LONG_WAIT = 1.0
_CALLS = frozenset({OperationKind.CALL, OperationKind.LAUNCH})


@dataclass(slots=True)
class Round:
    """A question to all processes, which ends at `until` (monotonic seconds), answered or not."""

    serial: int
    stacks: bool
    until: float
    done: Callable[[Round], None]
    asked: set[str] = field(default_factory=set[str])
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
    """Return the processes that answered, and the dead with the seconds since."""
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
            # A message, a call or its answer is on its way, on a link that may be slow or cut: it goes on by itself, or
            # the link is given up.
            publication = replace(publication, running=True)
        processes.append(view.process(name, publication))
    return processes


class Watch:
    """The running rounds, and periodic checks while any process waits.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rounds: dict[int, Round] = {}
        self._serial = 0
        self._detector = DeadlockDetector(_PATIENCE)
        self._watching = False
        self._looking = False
        self._next_look = 0.0
        self._found: list[Deadlock] = []
        # Unknown names that processes look up; set by the manager.
        self.unknown: frozenset[str] = frozenset()

    def alarm(self) -> None:
        """Start checking, since a process has waited for long."""
        self._watching = True

    @property
    def busy(self) -> bool:
        """Whether something is due soon."""
        return self._watching or bool(self._rounds)

    def begin(
        self,
        now: float,
        ask: Callable[[Round], Iterable[str]],
        done: Callable[[Round], None],
        *,
        stacks: bool = False,
    ) -> None:
        """Ask all processes; `done` is called when all have answered, or time is up."""
        self._serial += 1
        started = Round(self._serial, stacks, now + _ROUND_SECONDS, done)
        self._rounds[started.serial] = started
        started.asked.update(ask(started))

    def answered(self, name: str, answer: ProcessAnswer) -> None:
        round_ = self._rounds.get(answer.round)
        if round_ is not None:
            round_.answers[name] = answer

    def left(self, name: str) -> None:
        for round_ in self._rounds.values():
            round_.asked.discard(name)

    def tick(
        self, now: float, ask: Callable[[Round], Iterable[str]], dead: Callable[[], Mapping[str, float]]
    ) -> list[Deadlock]:
        """End due rounds; return the deadlocks found."""
        if self._watching and not self._looking and now >= self._next_look:
            self._looking = True
            self._next_look = now + _LOOK_EVERY
            self.begin(now, ask, lambda answers: self._look(answers, dead()))
        for serial, round_ in list(self._rounds.items()):
            if round_.complete or now >= round_.until:
                del self._rounds[serial]
                round_.done(round_)
        deadlocks, self._found = self._found, []
        return deadlocks

    def _look(self, answers: Round, dead: Mapping[str, float]) -> None:
        self._looking = False
        self._watching = any(map(_waits, answers.answers.items()))
        self._found += self._detector.look(processes_of(answers.answers, dead, self.unknown), self._clock())


def _waits(named: tuple[str, ProcessAnswer]) -> bool:
    name, answer = named
    return any(is_long_wait(operation, is_worker=":" in name) for operation in answer.publication.operations)


def is_long_wait(published: PublishedOperation, *, is_worker: bool) -> bool:
    """Return whether an operation is a suspicious wait: a driver that waits for its workers is normal."""
    kind = published.operation.kind
    if kind in RUNNING or published.age < _LONG_WAIT:
        return False
    return is_worker or kind not in _CALLS


# Group calls and peer lookups have their own messages.
_SILENT = frozenset({*RUNNING, OperationKind.IDLE, OperationKind.CALL, OperationKind.LAUNCH, OperationKind.CONNECT})


class LongWaits:
    """The record of logged waits: a wait is logged when it lasts twice as long as any similar one before.

    So a long wait is logged at growing intervals, and regular waits of equal length, as in training steps, only once.
    """

    def __init__(self, first_word_after: float = FIRST_WORD_AFTER) -> None:
        self._first_word_after = first_word_after
        # By operation and target: the duration from which the next wait is logged.
        self._silence: dict[tuple[OperationKind, str], float] = {}
        # By serial: the age of an operation when a wait for it was first seen; before, its process may have done other
        # work.
        self._since: dict[int, float] = {}

    def due(self, publication: Publication) -> list[Operation]:
        """Return the operations to log now; called about every second with the current operations of the process."""
        waited_for = [
            operation
            for operation in publication.operations
            if not (operation.operation.detached or operation.operation.kind in _SILENT)
        ]
        self._since = {
            operation.operation.serial: self._since.get(operation.operation.serial, operation.age)
            for operation in waited_for
        }
        due: list[Operation] = []
        for wait in waited_for:
            operation = wait.operation
            waited, like_it = wait.age - self._since[operation.serial], (operation.kind, operation.target)
            if waited >= self._silence.get(like_it, self._first_word_after):
                self._silence[like_it] = 2 * waited
                due.append(operation)
        return due

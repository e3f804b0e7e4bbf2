"""The flow of a recipe's work in virtual time: legal counts, what must be recorded, what a file changes.

Processes are generators that use devices, sleep, and wait for messages:

    clock = VirtualTime()

    def worker():
        yield Receive("orders")
        yield Use(device, 0.3)
        clock.put("done")

    clock.start(worker())
    clock.run()
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Generator, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from rlinf_core.advice.arrangements import Arrangement
from rlinf_core.advice.durations import CallRow, Durations
from rlinf_core.advice.search import Flow

# A trial of a few steps that saves nothing and is not evaluated. Its first step warms up.
TRIAL: Mapping[str, Any] = MappingProxyType(
    {
        "runner.max_steps": 4,
        "runner.max_epochs": -1,
        "runner.max_staleness": 0,
        "runner.max_restarts": 0,
        "runner.val_check_interval": -1,
        "runner.save_interval": -1,
        "runner.save_on_interrupt": False,
        "runner.skip_checks": True,
        "runner.resume_dir": None,
        "runner.only_eval": False,
        "runner.logger.logger_backends": [],
        "runner.profiler": None,
        "runner.metrics_port": None,
        "actor.checkpoint_save_path": None,
    }
)


def halves(most: int, unit: int = 1) -> list[int]:
    """Return a number, its half and its quarter, as multiples of a unit; those that are the same once."""
    sizes = [most // part // unit * unit for part in (4, 2, 1)]
    return sorted({max(unit, size) for size in sizes})


Sizes: TypeAlias = Mapping[str, Sequence[tuple[float, int]]]
"""Sizes of what has no duration, as answers have tokens: a size and how many had about that one, by phase."""


class Recorded(Protocol):
    """A run, as far as a recipe looks at it as a whole.

    Attributes:
        arrangement: where its components were.
        models: the model of the accelerators of each kind.
        rows: its calls.
        phases: median seconds of the phases of its steps, by metric, as `time/step`.
        sizes: the sizes of what has no duration.
    """

    @property
    def arrangement(self) -> Arrangement: ...
    @property
    def models(self) -> Mapping[str, str]: ...
    @property
    def rows(self) -> Sequence[CallRow]: ...
    @property
    def phases(self) -> Mapping[str, float]: ...
    @property
    def sizes(self) -> Sizes: ...


class JobFlow(Protocol):
    """The flow of one job, before its durations are known.

    Attributes:
        components: those that are placed, in the order in which a step needs them; the one that trains is the last.
        phases: the phases of each component that must have been recorded.
        stages: numbers of pipeline stages worth trying.
        stages_now: the pipeline stages of the file.
    """

    @property
    def components(self) -> tuple[str, ...]: ...
    @property
    def phases(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def stages(self) -> tuple[int, ...]: ...

    @property
    def stages_now(self) -> int: ...

    def legal(self, arrangement: Arrangement) -> bool:
        """Return whether the recipe takes an arrangement, as far as arithmetic says."""
        ...

    def flow(self, durations: Durations, models: Mapping[str, str], sizes: Sizes) -> Flow:
        """Return the flow with durations; `models` are the accelerators of each kind, `sizes` as in `Recorded`."""
        ...

    def calls(self, run: Recorded) -> Sequence[CallRow]:
        """Return the calls of a run with the rows that the flow gives calls in an arrangement."""
        ...

    def constants(self, run: Recorded, durations: Durations) -> list[CallRow]:
        """Return what no call says and a whole run does, such as the seconds of a message, as calls of the driver."""
        ...

    def rows(self, arrangement: Arrangement) -> Mapping[str, float]:
        """Return the rows that a call of each phase has in an arrangement."""
        ...

    def changes(self, arrangement: Arrangement) -> Mapping[str, Any]:
        """Return the values besides the placement that a file needs for an arrangement, by key."""
        ...

    def trial_sizes(self, now: Arrangement) -> Sequence[int]:
        """Return three sizes of trials, or as many as there are, about the calls that a process has now.

        A trial is a job of few steps with one process a component; its size is the number of what a step begins with,
        such as environments.
        """
        ...

    def trial_size(self, component: str, rows: int, now: Arrangement) -> int:
        """Return the size of a trial in which a call of a component has that many rows; 0: there is none."""
        ...

    def trial(self, size: int, now: Arrangement) -> Mapping[str, Any]:
        """Return the values besides the placement that a file needs for a trial, by key."""
        ...

    def rehearsal(self) -> Sequence[str]:
        """Return the overrides with which a file's job has stand-ins that do nothing in the place of its work.

        Raises:
            RLinfError: the job cannot be rehearsed.
        """
        ...


class Use(NamedTuple):
    """Work on a device for some seconds, once those are done that asked before; without a device it is a sleep."""

    device: Hashable
    seconds: float


class Receive(NamedTuple):
    """A wait for `number` messages in a box, which are taken out of it."""

    box: Hashable
    number: int = 1


Process: TypeAlias = Generator[Use | Receive, None, None]


class VirtualTime:
    """A clock that jumps from event to event.

    Attributes:
        now: seconds since the start.
        busy: seconds that each device has worked.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.busy: defaultdict[Hashable, float] = defaultdict(float)
        self._events: list[tuple[float, int, Any, Any, int]] = []
        self._serial = 0
        self._queues: dict[Hashable, deque[tuple[float, Process]]] = {}
        self._boxes: defaultdict[Hashable, int] = defaultdict(int)
        self._waiting: defaultdict[Hashable, deque[tuple[int, Process]]] = defaultdict(deque)

    def start(self, process: Process) -> None:
        """Start a process now."""
        self._at(self.now, process, None, 0)

    def put(self, box: Hashable, delay: float = 0.0, count: int = 1) -> None:
        """Put messages into a box, after a delay in seconds."""
        if delay > 0:
            self._at(self.now + delay, None, box, count)
        else:
            self._deliver(box, count)

    def stop(self) -> None:
        """Forget what is still to come, so that `run` returns."""
        self._events.clear()

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self._events:
            self.now, _, process, place, count = heapq.heappop(self._events)
            if process is None:
                self._deliver(place, count)
                continue
            if place is not None:
                self._release(place)
            self._advance(process)

    def _at(self, moment: float, process: Process | None, place: Hashable, count: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (moment, self._serial, process, place, count))

    def _advance(self, process: Process) -> None:
        for wish in process:
            if isinstance(wish, Receive):
                if self._boxes[wish.box] >= wish.number and not self._waiting[wish.box]:
                    self._boxes[wish.box] -= wish.number
                    continue
                self._waiting[wish.box].append((wish.number, process))
            elif wish.device is None:
                self._at(self.now + wish.seconds, process, None, 0)
            elif wish.device in self._queues:
                self._queues[wish.device].append((wish.seconds, process))
            else:
                self._queues[wish.device] = deque()
                self._occupy(wish.device, wish.seconds, process)
            return

    def _occupy(self, device: Hashable, seconds: float, process: Process) -> None:
        self.busy[device] += seconds
        self._at(self.now + seconds, process, device, 0)

    def _release(self, device: Hashable) -> None:
        queue = self._queues[device]
        if queue:
            self._occupy(device, *queue.popleft())
        else:
            del self._queues[device]

    def _deliver(self, box: Hashable, count: int) -> None:
        self._boxes[box] += count
        waiting = self._waiting[box]
        while waiting and self._boxes[box] >= waiting[0][0]:
            wanted, process = waiting.popleft()
            self._boxes[box] -= wanted
            self._advance(process)

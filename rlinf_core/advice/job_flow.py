"""The interface that a recipe implements for placement advice, and the virtual time that simulates its work.

Simulated processes are generators that use devices, sleep, and wait for messages:

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

from rlinf_core.advice.arrangements import Arrangement, Flow
from rlinf_core.advice.durations import CallRow, Durations

# The values of a trial: a few steps, the first of which warms up, without checkpoints or evaluation.
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
    """Return `most`, its half and its quarter, as multiples of `unit` from 1 on; ascending, without repeats."""
    sizes = [most // part // unit * unit for part in (4, 2, 1)]
    return sorted({max(unit, size) for size in sizes})


Sizes: TypeAlias = Mapping[str, Sequence[tuple[float, int]]]
"""The sizes of items, such as tokens of answers, by phase: pairs of a size and the number of items about that size."""


class Recorded(Protocol):
    """The record of a run.

    Attributes:
        arrangement: the placement of its components.
        models: the accelerator model of each group.
        rows: its calls.
        phases: the median seconds of the phases of its steps, by metric, as in `time/step`.
        sizes: the sizes of its items.
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
        components: the placed components, in the order in which a step needs them, the trainer last.
        phases: the phases that the record must have, by component.
        stages: the numbers of pipeline stages to try.
        stages_now: the number of pipeline stages in the file.
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
        """Return whether the recipe accepts an arrangement by its numbers of processes, stages and rows."""
        ...

    def flow(self, durations: Durations, models: Mapping[str, str], sizes: Sizes) -> Flow:
        """Return the flow with durations; `models` and `sizes` are as in `Recorded`."""
        ...

    def calls(self, run: Recorded) -> Sequence[CallRow]:
        """Return the calls of a run, with rows counted as in `rows`."""
        ...

    def constants(self, run: Recorded, durations: Durations) -> list[CallRow]:
        """Return durations that only a whole run shows, such as the seconds of a message, as calls of the driver."""
        ...

    def rows(self, arrangement: Arrangement) -> Mapping[str, float]:
        """Return the rows that a call of each phase has in an arrangement."""
        ...

    def changes(self, arrangement: Arrangement) -> Mapping[str, Any]:
        """Return the values that an arrangement needs in the file besides the placement, by key."""
        ...

    def trial_sizes(self, now: Arrangement) -> Sequence[int]:
        """Return up to three trial sizes close to the size of a process's calls in the arrangement `now`.

        A trial is a job of a few steps with one process per component. Its size is the number of items with which a
        step begins, such as environments.
        """
        ...

    def trial_size(self, component: str, rows: int, now: Arrangement) -> int:
        """Return the size of a trial in which a call of `component` has `rows` rows; 0 if there is none."""
        ...

    def trial(self, size: int, now: Arrangement) -> Mapping[str, Any]:
        """Return the values that a trial needs in the file besides the placement, by key."""
        ...

    def rehearsal(self) -> Sequence[str]:
        """Return the overrides that replace the job's work by stand-ins that do nothing.

        Raises:
            RLinfError: the job cannot be rehearsed.
        """
        ...


class Use(NamedTuple):
    """Work on a device for some seconds, after all earlier requests for it; a sleep if the device is None."""

    device: Hashable
    seconds: float


class Receive(NamedTuple):
    """A wait for `number` messages in a box, which it removes."""

    box: Hashable
    number: int = 1


Process: TypeAlias = Generator[Use | Receive, None, None]


class VirtualTime:
    """A clock that jumps from event to event.

    Attributes:
        now: the seconds since the start.
        busy: the seconds that each device has worked.
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
        """Start a process at the present time."""
        self._at(self.now, process, None, 0)

    def put(self, box: Hashable, delay: float = 0.0, count: int = 1) -> None:
        """Put messages into a box, after a delay in seconds."""
        if delay > 0:
            self._at(self.now + delay, None, box, count)
        else:
            self._deliver(box, count)

    def stop(self) -> None:
        """Discard all pending events, so that `run` returns."""
        self._events.clear()

    def run(self) -> None:
        """Run until no event is pending."""
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

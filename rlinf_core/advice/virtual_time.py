"""Virtual time: processes as generators that use devices, sleep, and wait for messages.

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
from collections.abc import Generator, Hashable
from typing import Any, NamedTuple, TypeAlias


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

"""A simulated world: one clock, events in an order drawn by a seed, and connections that delay, stall and end."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any


class WrongOutcomeError(AssertionError):
    """What the simulation found wrong."""


class World:
    """The clock and the events to come.

    Args:
        seed: decides everything that is not decided by the code under test.

    Attributes:
        now: seconds.
        trace: one line for each thing that happened.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: list[str] = []
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        return self.now

    def note(self, *words: object) -> None:
        self.trace.append(f"{self.now:.6f} {' '.join(map(str, words))}")

    def at(self, moment: float, action: Callable[..., object], *arguments: object) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), action, arguments))

    def after(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        self.at(self.now + seconds, action, *arguments)

    def soon(self, action: Callable[..., object], *arguments: object, within: float = 0.01) -> None:
        """Have something done within so many seconds."""
        self.after(self.random.random() * within, action, *arguments)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def run(self, until: float) -> None:
        """Let everything happen that happens by this time."""
        while self._events and self._events[0][0] <= until:
            moment, _, action, arguments = heapq.heappop(self._events)
            self.now = max(self.now, moment)
            action(*arguments)
        self.now = until

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def check(self, holds: object, *words: object) -> None:
        """Raise an error unless something holds."""
        if not holds:
            raise WrongOutcomeError(f"at {self.now:.3f} s: {' '.join(map(str, words))}")


class Wire:
    """One direction of a connection: what is sent arrives in order, after delays that are drawn, or not at all."""

    def __init__(self, world: World, receive: Callable[[Any], object]) -> None:
        self.world = world
        self._receive = receive
        self._last = 0.0
        # Messages are numbered; those up to this number are lost.
        self._sent = self._lost = 0

    def send(self, message: object) -> None:
        world = self.world
        # A message in fifty meets a link that stands still for a while.
        delay = world.random.random() * (3.0 if world.chance(0.02) else 0.01)
        self._last = max(self._last, world.now + delay)
        self._sent += 1
        world.at(self._last, self._arrive, self._sent, message)

    def lose(self) -> None:
        """Lose what is under way."""
        self._lost = self._sent

    def _arrive(self, number: int, message: object) -> None:
        if number > self._lost:
            self._receive(message)

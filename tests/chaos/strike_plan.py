"""The plan of faults for one run: a pure function of its seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from tests.chaos.fault_table import FAULTS, Deed

MOST_STRIKES: Final = 3
# Seconds after the end of a step: a thousandth hits the same step's end, a second the work of a later one.
_DELAYS: Final = (0.001, 1.0)
_PAUSES: Final = (0.2, 4.0)
# One run in so many may not restart anything, so that its first death ends it.
_WITHOUT_RESTARTS: Final = 6
_RESTARTS: Final = 50


class Strike(NamedTuple):
    """One fault, and its moment.

    Attributes:
        fault: its name in the table.
        step: it comes once this step has finished for the first time; 0: during the launch.
        delay: so many seconds later; during the launch a share of the launch's usual time.
        pick: which process of several, from 0 to 1.
        seconds: how long a pause lasts; 0 for other deeds.
    """

    fault: str
    step: int
    delay: float
    pick: float
    seconds: float = 0.0

    def __str__(self) -> str:
        when = f"after step {self.step} + {self.delay:.3f} s" if self.step else f"at {self.delay:.0%} of the launch"
        return f"{self.fault} {when}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


class StrikePlan(NamedTuple):
    """The faults of one run, in order of their moments, and its `runner.max_restarts`."""

    seed: int
    strikes: tuple[Strike, ...]
    max_restarts: int


def plan_of(seed: int, steps: int, faults: Sequence[str] = tuple(FAULTS), most: int = MOST_STRIKES) -> StrikePlan:
    """Return the plan of a seed.

    Args:
        seed: any integer; the same one gives the same plan on every machine.
        steps: the length of the run.
        faults: the names to draw from.
        most: the largest number of strikes.
    """
    chance = random.Random(f"rlinf.chaos/1 {seed}")
    limited = chance.randrange(_WITHOUT_RESTARTS) == 0
    count = 1 if limited else chance.randint(1, most)
    weights = [FAULTS[name].weight for name in faults]
    strikes: list[Strike] = []
    for name, step in zip(
        chance.choices(list(faults), weights, k=count),
        sorted(chance.randrange(steps) for _ in range(count)),
        strict=True,
    ):
        delay = _between(chance, _DELAYS) if step else chance.random()
        pick = chance.random()
        lasting = FAULTS[name].deed in (Deed.PAUSE, Deed.FILL)
        strikes.append(Strike(name, step, delay, pick, _between(chance, _PAUSES) if lasting else 0.0))
    return StrikePlan(seed, tuple(strikes), 0 if limited else _RESTARTS)


def _between(chance: random.Random, bounds: tuple[float, float]) -> float:
    """Return a number whose logarithm is uniform."""
    low, high = map(math.log, bounds)
    return math.exp(chance.uniform(low, high))

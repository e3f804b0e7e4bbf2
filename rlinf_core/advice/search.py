"""A search for the fastest arrangements of a job: a bound for each, simulation in the order of the bounds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from rlinf_core.advice.arrangements import Arrangement, Device, Shapes

# Most arrangements that a search simulates.
_MOST_SIMULATED: Final = 2000
# Steps whose durations differ by a smaller fraction count as equally fast.
_ALIKE: Final = 1e-3


class Simulated(NamedTuple):
    """A step in virtual time.

    Attributes:
        seconds: the mean duration of a step.
        busy: the fraction of that time for which each accelerator works.
        parts: the seconds of a step's consecutive phases.
    """

    seconds: float
    busy: Mapping[Device, float] = {}
    parts: Mapping[str, float] = {}


class Flow(Shapes, Protocol):
    """A recipe's flow of work, with the durations of one job."""

    def bound(self, arrangement: Arrangement) -> float:
        """Return a lower bound of the seconds of a simulated step."""
        ...

    def simulate(self, arrangement: Arrangement) -> Simulated:
        """Simulate a step in virtual time."""
        ...


class Ranked(NamedTuple):
    """An arrangement with its bound and its simulation."""

    arrangement: Arrangement
    bound: float
    step: Simulated


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        best: the fastest arrangements, fastest first; among equally fast ones, fewer accelerators first.
        judged: the number of legal arrangements, each with a bound.
        simulated: the number of simulated arrangements.
        unfit: the number of arrangements that were due for simulation and do not fit into memory.
        proven: whether the bounds prove that no other arrangement is among the fastest under the model.
    """

    best: tuple[Ranked, ...]
    judged: int
    simulated: int
    unfit: int
    proven: bool


def search(
    flow: Flow,
    arrangements: Iterable[Arrangement],
    *,
    top: int = 10,
    fits: Callable[[Arrangement], bool] = lambda arrangement: True,
    most: int = _MOST_SIMULATED,
) -> SearchResult:
    """Return the `top` fastest arrangements under the model.

    Arrangements are simulated in the order of their bounds until the slowest of the best is no slower than the next
    bound, or `most` were simulated.

    Args:
        flow: the model.
        arrangements: the legal arrangements.
        top: the number of arrangements to return.
        fits: whether an arrangement fits into memory; called before its simulation.
        most: the maximum number of simulations.
    """
    order = [(flow.bound(arrangement), number, arrangement) for number, arrangement in enumerate(arrangements)]
    judged = len(order)
    heapq.heapify(order)
    # A heap of the `top` fastest simulated arrangements, the slowest first.
    fastest: list[tuple[float, int, Ranked]] = []
    simulated = unfit = 0
    while order and simulated < most:
        bound, number, arrangement = order[0]
        if len(fastest) >= top and bound >= -fastest[0][0]:
            break
        heapq.heappop(order)
        if not fits(arrangement):
            unfit += 1
            continue
        step = flow.simulate(arrangement)
        simulated += 1
        entry = (-step.seconds, -number, Ranked(arrangement, bound, step))
        if len(fastest) < top:
            heapq.heappush(fastest, entry)
        elif entry > fastest[0]:
            heapq.heapreplace(fastest, entry)
    proven = not order or (len(fastest) >= top and order[0][0] >= -fastest[0][0])
    best = _in_order([ranked for *_, ranked in sorted(fastest, reverse=True)])
    return SearchResult(tuple(best), judged, simulated, unfit, proven)


def _in_order(fastest_first: Sequence[Ranked]) -> list[Ranked]:
    """Return the arrangements by duration, with equally fast ones ordered by their number of accelerators."""
    ordered: list[Ranked] = []
    alike: list[Ranked] = []
    for ranked in fastest_first:
        if alike and ranked.step.seconds > alike[0].step.seconds * (1 + _ALIKE):
            ordered += sorted(alike, key=lambda other: other.arrangement.accelerators)
            alike = []
        alike.append(ranked)
    return ordered + sorted(alike, key=lambda other: other.arrangement.accelerators)

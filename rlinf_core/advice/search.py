"""The best arrangements of a job under a model: bounds for all, simulation in the order of bounds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from rlinf_core.advice.arrangements import Arrangement, Device, Shapes

# Arrangements that are simulated at most.
_MOST_SIMULATED: Final = 2000
# Steps whose seconds differ by a smaller part are equally fast.
_ALIKE: Final = 1e-3


class Simulated(NamedTuple):
    """A step in virtual time.

    Attributes:
        seconds: the mean of a step.
        busy: the share of its time that each accelerator works.
        parts: seconds of a step by phase, of those that follow each other.
    """

    seconds: float
    busy: Mapping[Device, float] = {}
    parts: Mapping[str, float] = {}


class Flow(Shapes, Protocol):
    """A recipe's flow of work, with the durations of one job."""

    def bound(self, arrangement: Arrangement) -> float:
        """Return seconds that no simulated step is below."""
        ...

    def simulate(self, arrangement: Arrangement) -> Simulated:
        """Return a step in virtual time."""
        ...


class Ranked(NamedTuple):
    """An arrangement with its bound and its simulation."""

    arrangement: Arrangement
    bound: float
    step: Simulated


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        best: the fastest arrangements, the fastest first; of equally fast ones the one on fewer accelerators.
        judged: legal arrangements, each with a bound.
        simulated: those that were simulated.
        unfit: those that came up and do not fit into memory.
        proven: whether no other arrangement can be among the best of the model.
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
    """Return the `top` fastest arrangements, proven under the model.

    Arrangements are simulated in the order of their bounds, until the last of the best is below the next bound.

    Args:
        flow: the model.
        arrangements: the legal ones.
        top: how many are wanted.
        fits: whether one fits into memory; asked before it is simulated.
        most: how many are simulated at most.
    """
    order = [(flow.bound(arrangement), number, arrangement) for number, arrangement in enumerate(arrangements)]
    judged = len(order)
    heapq.heapify(order)
    # Of those simulated, the `top` fastest: a heap whose first is the slowest of them.
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
    """Return steps as they are shown: of those about as fast as the fastest of them, the one on fewer accelerators
    first.
    """
    ordered: list[Ranked] = []
    alike: list[Ranked] = []
    for ranked in fastest_first:
        if alike and ranked.step.seconds > alike[0].step.seconds * (1 + _ALIKE):
            ordered += sorted(alike, key=lambda other: other.arrangement.accelerators)
            alike = []
        alike.append(ranked)
    return ordered + sorted(alike, key=lambda other: other.arrangement.accelerators)

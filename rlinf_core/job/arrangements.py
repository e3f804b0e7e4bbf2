"""Arrangements: which accelerators hold which components, and how far rollouts run ahead; the search for the fastest.

The search knows a bound for each arrangement, and simulates them in the order of the bounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

# In a group of at most `_EXHAUSTIVE` accelerators every contiguous range is a candidate; of at most `_ALIGNED`, ranges
# that begin or end at 0 or at an end of another component's range. In larger ones, components hold equal or disjoint
# ranges; the last may also start at 0.
_EXHAUSTIVE: Final = 4
_ALIGNED: Final = 16


class DeviceGroup(NamedTuple):
    """The accelerators of one node group, all of one model.

    Attributes:
        label: the group's label.
        units: the number of accelerators.
        per_node: the number of accelerators of a node.
        model: the accelerator's model; empty if unknown.
    """

    label: str
    units: int
    per_node: int
    model: str = ""


Device: TypeAlias = "tuple[str, int] | None"
"""An accelerator by group label and rank, or None for a process without one."""


class DeviceSpan(NamedTuple):
    """The accelerators of a component, one per process: `size` accelerators of a group `kind`, from rank `first`.

    If `kind` is None, the processes have no accelerator.
    """

    kind: str | None
    first: int
    size: int

    @property
    def devices(self) -> tuple[Device, ...]:
        """The accelerator of each process, by rank."""
        if self.kind is None:
            return (None,) * self.size
        return tuple((self.kind, self.first + rank) for rank in range(self.size))

    def overlaps(self, other: DeviceSpan) -> bool:
        """Return whether an accelerator belongs to both spans."""
        alike = self.kind is not None and self.kind == other.kind
        return alike and self.first < other.first + other.size and other.first < self.first + self.size


def share_one(*several: DeviceSpan) -> bool:
    """Return whether one accelerator belongs to all spans."""
    kinds = {seats.kind for seats in several}
    first, end = max(seats.first for seats in several), min(seats.first + seats.size for seats in several)
    return len(kinds) == 1 and None not in kinds and first < end


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A placement as the performance model represents it.

    Attributes:
        seats: the accelerators of each component, as pairs of name and span.
        stages: the number of pipeline stages.
        staleness: the number of steps that rollouts may run ahead.
    """

    seats: tuple[tuple[str, DeviceSpan], ...]
    stages: int = 1
    staleness: int = 0

    def of(self, component: str) -> DeviceSpan:
        """Return the accelerators of a component."""
        for name, seats in self.seats:
            if name == component:
                return seats
        raise KeyError(component)

    @property
    def accelerators(self) -> int:
        """The number of accelerators that hold a process."""
        return len({device for _, seats in self.seats for device in seats.devices if device is not None})

    @property
    def sharing(self) -> bool:
        """Whether two components share an accelerator."""
        return any(
            seats.overlaps(other) for at, (_, seats) in enumerate(self.seats) for _, other in self.seats[at + 1 :]
        )


class Shapes(Protocol):
    """The numbers of processes that a recipe accepts."""

    def counts(self, component: str, kind: DeviceGroup) -> Sequence[int]:
        """Return the numbers of processes to try for a component on a group, ascending."""
        ...

    def most_useful(self, component: str, kind: DeviceGroup, units: int) -> int:
        """Return the number of processes, up to `units`, with which the last component is fastest; 0 if none fits."""
        ...


Legal: TypeAlias = Callable[[Arrangement], bool]


def candidates(
    shapes: Shapes,
    components: Mapping[str, Sequence[DeviceGroup] | DeviceSpan],
    stages: Sequence[int],
    staleness: Sequence[int],
    legal: Legal,
) -> Iterator[Arrangement]:
    """Yield every candidate arrangement, one of each set that differs only in the ranks of identical accelerators.

    Args:
        shapes: the numbers of processes to try.
        components: the groups that each component may use, or the span that it keeps; in the order in which a step
            needs the components, the trainer last.
        stages, staleness: the values to try.
        legal: whether the recipe accepts an arrangement.
    """
    names = list(components)
    large = any(
        kind.units > _ALIGNED for kinds in components.values() if not isinstance(kinds, DeviceSpan) for kind in kinds
    )
    seen: set[object] = set()
    for seats in _seatings(shapes, components, names, (), large):
        if not large:
            signature = _signature(seats)
            if signature in seen:
                continue
            seen.add(signature)
        named = tuple(zip(names, seats, strict=True))
        in_turns = large and _trainer_shares(seats)
        for stage in stages:
            for ahead in staleness:
                if in_turns and ahead:
                    continue
                arrangement = Arrangement(named, stage, ahead)
                if legal(arrangement):
                    yield arrangement


def _trainer_shares(seats: Sequence[DeviceSpan]) -> bool:
    """Return whether the last component's span overlaps another component's, and differs from it."""
    *others, last = seats
    return any(last.overlaps(other) and last != other for other in others)


def _seatings(
    shapes: Shapes,
    components: Mapping[str, Sequence[DeviceGroup] | DeviceSpan],
    names: Sequence[str],
    before: tuple[DeviceSpan, ...],
    large: bool,
) -> Iterator[tuple[DeviceSpan, ...]]:
    if len(before) == len(names):
        yield before
        return
    name, last = names[len(before)], len(before) + 1 == len(names)
    kinds = components[name]
    if isinstance(kinds, DeviceSpan):
        yield from _seatings(shapes, components, names, (*before, kinds), large)
        return
    for kind in kinds:
        held = [seats for seats in before if seats.kind == kind.label]
        choices = _large_seats(shapes, name, kind, held, last) if large else _small_seats(shapes, name, kind, held)
        # The same range may be yielded both as held by others and as free.
        for seats in dict.fromkeys(choices):
            yield from _seatings(shapes, components, names, (*before, seats), large)


def _small_seats(shapes: Shapes, name: str, kind: DeviceGroup, held: Sequence[DeviceSpan]) -> Iterator[DeviceSpan]:
    for count in shapes.counts(name, kind):
        room = kind.units - count
        starts = set(range(room + 1))
        if kind.units > _EXHAUSTIVE:
            edges = {edge for seats in held for edge in (seats.first, seats.first + seats.size)}
            starts &= {0} | edges | {edge - count for edge in edges}
        for first in sorted(starts):
            yield DeviceSpan(kind.label, first, count)


def _large_seats(
    shapes: Shapes, name: str, kind: DeviceGroup, held: Sequence[DeviceSpan], last: bool
) -> Iterator[DeviceSpan]:
    """Yield the spans of other components, and the free accelerators after them.

    For the last component, only its fastest number of processes is tried, on all accelerators and on the free ones.
    """
    end = max((seats.first + seats.size for seats in held), default=0)
    if last:
        for first, units in ((0, kind.units), (end, kind.units - end)) if end else ((0, kind.units),):
            count = shapes.most_useful(name, kind, units)
            if count:
                yield DeviceSpan(kind.label, first, count)
        yield from held
        return
    for count in shapes.counts(name, kind):
        if end + count <= kind.units:
            yield DeviceSpan(kind.label, end, count)
        yield from (seats for seats in held if seats.size == count)


def _signature(seats: Sequence[DeviceSpan]) -> object:
    """Return a key that is equal for seatings that differ only in the ranks of identical accelerators."""
    edges: dict[str, set[int]] = {}
    for held in seats:
        if held.kind is not None:
            edges.setdefault(held.kind, set()).update((held.first, held.first + held.size))
    shift: dict[tuple[str, int], int] = {}
    for kind, points in edges.items():
        position, before = 0, None
        for point in sorted(points):
            if before is not None and any(
                held.kind == kind and held.first <= before < held.first + held.size for held in seats
            ):
                position += point - before
            shift[kind, point], before = position, point
    return tuple((held.kind, held.size, 0 if held.kind is None else shift[held.kind, held.first]) for held in seats)


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

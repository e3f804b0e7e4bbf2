"""The units that a component holds, as ranges: enough to tell who shares with whom without listing them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlinf_core.config.ranks import merge_ranges
from rlinf_core.placement.resolve import Resolution
from rlinf_core.topology import Unit


@dataclass(frozen=True, slots=True)
class Coverage:
    """Units of one kind, by their cluster-wide numbers."""

    unit: Unit
    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))


def coverage(resolution: Resolution) -> Coverage | None:
    """Return what a component holds; None where the units it counts are unknown."""
    selection = resolution.selection
    if selection is None:
        return None
    units = (units for block in resolution.blocks for units in selection.units(block.resources))
    return Coverage(selection.unit, merge_ranges(units))


def intersect(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...]:
    """Return the numbers in both of two lists of ascending, disjoint ranges."""
    common: list[range] = []
    i = j = 0
    while i < len(a) and j < len(b):
        both = range(max(a[i].start, b[j].start), min(a[i].stop, b[j].stop))
        if both:
            common.append(both)
        if a[i].stop <= b[j].stop:
            i += 1
        else:
            j += 1
    return tuple(common)


def subtract(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...]:
    """Return the numbers in the first of two lists of ascending, disjoint ranges that are not in the second."""
    left: list[range] = []
    j = 0
    for piece in a:
        at = piece.start
        while j < len(b) and b[j].stop <= at:
            j += 1
        after = j
        while after < len(b) and b[after].start < piece.stop:
            if b[after].start > at:
                left.append(range(at, b[after].start))
            at = b[after].stop
            after += 1
        if at < piece.stop:
            left.append(range(at, piece.stop))
    return tuple(left)


def overlapping(lists: Iterable[tuple[range, ...]]) -> list[tuple[int, int]]:
    """Return which pairs of lists of ranges have numbers in common, as ascending indices."""
    pieces = sorted((piece.start, piece.stop, index) for index, pieces in enumerate(lists) for piece in pieces)
    pairs: set[tuple[int, int]] = set()
    # The pieces that reach beyond the start of the one being looked at.
    open_: list[tuple[int, int]] = []
    for start, stop, index in pieces:
        open_ = [(end, other) for end, other in open_ if end > start]
        pairs |= {(min(index, other), max(index, other)) for _, other in open_ if other != index}
        open_.append((stop, index))
    return sorted(pairs)

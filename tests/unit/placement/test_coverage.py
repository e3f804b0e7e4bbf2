"""Arithmetic on lists of ranges, against sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.ranks import merge_ranges
from rlinf_core.placement.coverage import intersect, overlapping, subtract

pieces = st.lists(st.builds(range, st.integers(0, 40), st.integers(0, 40)), max_size=6).map(merge_ranges)


def numbers(ranges: tuple[range, ...]) -> list[int]:
    return [number for piece in ranges for number in piece]


@given(pieces, pieces)
def test_intersect(a: tuple[range, ...], b: tuple[range, ...]) -> None:
    assert numbers(intersect(a, b)) == sorted(set(numbers(a)) & set(numbers(b)))


@given(pieces, pieces)
def test_subtract(a: tuple[range, ...], b: tuple[range, ...]) -> None:
    assert numbers(subtract(a, b)) == sorted(set(numbers(a)) - set(numbers(b)))


@given(st.lists(pieces, max_size=5))
def test_overlapping(lists: list[tuple[range, ...]]) -> None:
    sets = [set(numbers(each)) for each in lists]
    expected = [(i, j) for j in range(len(sets)) for i in range(j) if sets[i] & sets[j]]
    assert overlapping(lists) == sorted(expected)

"""Contradictions between claims on ranges of nodes.

They are found by sorting: 10,000 claims are no burden.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V", bound=Hashable)
P = TypeVar("P")


class Claim(NamedTuple, Generic[V, P]):
    """`value` is claimed for `nodes` at `place` of the file. Claims of equal values agree."""

    nodes: range
    value: V
    place: P


def contradictions(claims: Iterable[Claim[V, P]]) -> list[tuple[Claim[V, P], Claim[V, P]]]:
    """Return pairs of claims with different values for a common node: the later one in the file, then the earlier.

    `claims` come in the order of the file. Every claim that contradicts one starting at a lower or the same node is
    met, with one such; not every pair is.
    """
    claims = list(claims)
    position = {id(claim): index for index, claim in enumerate(claims)}
    pairs: list[tuple[Claim[V, P], Claim[V, P]]] = []
    # Of the claims passed, only two can matter to the next one: the one reaching farthest, and the one
    # reaching farthest among those of any other value.
    farthest: Claim[V, P] | None = None
    other: Claim[V, P] | None = None
    for claim in sorted(claims, key=lambda claim: claim.nodes.start):
        rival = other if farthest is not None and farthest.value == claim.value else farthest
        if rival is not None and rival.nodes.stop > claim.nodes.start:
            pairs.append((claim, rival) if position[id(claim)] > position[id(rival)] else (rival, claim))
        if farthest is None or claim.nodes.stop > farthest.nodes.stop:
            if farthest is not None and farthest.value != claim.value:
                other = farthest
            farthest = claim
        elif claim.value != farthest.value and (other is None or claim.nodes.stop > other.nodes.stop):
            other = claim
    return pairs


def common(first: range, second: range) -> range:
    """Return the numbers in both ranges."""
    return range(max(first.start, second.start), min(first.stop, second.stop))


def outside(piece: range, inside: Sequence[range]) -> range | None:
    """Return the first numbers of `piece` that `inside` (as `merge_ranges` makes it) lacks, or None when it has
    them all.
    """
    index = bisect_right(inside, piece.start, key=lambda each: each.start) - 1
    if index < 0 or piece.start >= inside[index].stop:
        following = inside[index + 1].start if index + 1 < len(inside) else piece.stop
        return range(piece.start, min(piece.stop, following))
    if piece.stop <= inside[index].stop:
        return None
    following = inside[index + 1].start if index + 1 < len(inside) else piece.stop
    return range(inside[index].stop, min(piece.stop, following))

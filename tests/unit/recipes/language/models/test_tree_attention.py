"""Which tokens of a packed row see which, by the ends of subtrees; the kernel itself is tested on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recipes.language.models import tree_attention
from recipes.language.models.attention import NO_PARENT, PackedPlan, Segment
from recipes.language.models.tree_attention import subtree_ends, tiles

BLOCK = 4


@st.composite
def rows(draw: st.DrawFn) -> list[Segment]:
    """Segments in preorder: each continues one of those on the path to the last, or none."""
    segments: list[Segment] = []
    path: list[int] = []
    for index in range(draw(st.integers(1, 8))):
        depth = draw(st.integers(0, len(path)))
        path = path[:depth]
        start = segments[-1].start + segments[-1].length if segments else 0
        segments.append(Segment(start, draw(st.integers(1, 9)), path[-1] if path else NO_PARENT))
        path.append(index)
    return segments


def seen_by_chains(segments: list[Segment]) -> Tensor:
    """Return which tokens see which, bool [T, T], by going up from each segment."""
    length = segments[-1].start + segments[-1].length
    sees = torch.zeros(length, length, dtype=torch.bool)
    for index, own in enumerate(segments):
        while index != NO_PARENT:
            key = segments[index]
            sees[own.start : own.start + own.length, key.start : key.start + key.length] = True
            index = key.parent
    return sees.tril()


def laid(segments: list[Segment]) -> tuple[Tensor, Tensor]:
    ends = subtree_ends([(segment.start, segment.length, segment.parent) for segment in segments])
    assert ends is not None
    lengths = torch.tensor([segment.length for segment in segments])
    return torch.tensor(ends).repeat_interleave(lengths), PackedPlan(segments).positions[0]


@given(rows(), st.none() | st.integers(1, 12))
def test_tiles_cover_what_tokens_see(segments: list[Segment], window: int | None) -> None:
    ends, positions = laid(segments)
    places = torch.arange(len(ends))
    sees = (places[None] <= places[:, None]) & (places[:, None] < ends[None])
    assert torch.equal(sees, seen_by_chains(segments))
    if window is not None:
        sees &= positions[:, None] - positions[None] < window
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "BLOCK", BLOCK)
        partial, full = tiles(ends, positions, window)
    assert not (partial & full).any()
    for (row, column), tile in (
        ((row, column), sees[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK])
        for row in range(len(partial))
        for column in range(len(partial))
    ):
        if full[row, column]:
            assert tile.all()
        elif not partial[row, column]:
            assert not tile.any()


def test_tiles_of_unlike_sequences_are_skipped() -> None:
    ends, positions = laid([Segment(number * BLOCK * 2, BLOCK * 2) for number in range(4)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "BLOCK", BLOCK)
        partial, full = tiles(ends, positions)
    assert int(partial.sum()) == 8
    assert int(full.sum()) == 4


def test_rows_in_another_order_are_refused() -> None:
    assert subtree_ends([(0, 3, -1), (3, 2, -1), (5, 2, 0)]) is None

"""One loss out of many: in several ways, with masks, and in parts that add up."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.algorithms.aggregation import AGGREGATIONS, aggregate, denominator, masked_mean
from rlinf_core.config.sections.values import LossAggregation

how_strategy = st.sampled_from(AGGREGATIONS).map(lambda name: cast("LossAggregation", name))


def naive(losses: torch.Tensor, mask: torch.Tensor, how: str) -> float:
    rows = [[float(x) for x, m in zip(row, marks, strict=True) if m] for row, marks in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if how == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    scale = {"seq-mean-token-mean": 0, "seq-mean-token-sum": 1, "seq-mean-token-sum-norm": losses.shape[1]}[how]
    per_row = [sum(row) / (scale or len(row)) for row in rows]
    return sum(per_row) / len(rows)


@given(st.integers(0, 10_000), how_strategy, st.floats(0, 1))
def test_equals_a_loop(seed: int, how: LossAggregation, share: float) -> None:
    random = torch.Generator().manual_seed(seed)
    losses = torch.randn(5, 4, generator=random, dtype=torch.float64)
    mask = torch.rand(5, 4, generator=random) < share
    assert aggregate(losses, mask, how).item() == pytest.approx(naive(losses, mask, how), abs=1e-6)
    full = torch.ones(5, 4)
    assert aggregate(losses, None, how).item() == pytest.approx(naive(losses, full, how), abs=1e-6)


@given(st.integers(0, 10_000), how_strategy, st.integers(1, 5))
def test_parts_add_up_to_the_whole(seed: int, how: LossAggregation, cut: int) -> None:
    random = torch.Generator().manual_seed(seed)
    losses = torch.randn(6, 4, generator=random, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=random) < 0.5
    mask[0, 0] = mask[-1, 0] = True  # no part is empty, which would count as one
    parts = [(losses[:cut], mask[:cut]), (losses[cut:], mask[cut:])]
    total = torch.stack([denominator(marks, part.shape, how) for part, marks in parts]).sum()
    result = sum(aggregate(part, marks, how, total).item() for part, marks in parts)
    assert result == pytest.approx(aggregate(losses, mask, how).item(), abs=1e-6)


def test_a_constant_length_does_not_depend_on_the_batch() -> None:
    for width in (2, 3):
        losses, mask = torch.ones(4, width), torch.tensor([[1] * width, [1] + [0] * (width - 1)] * 2)
        total = denominator(mask, losses.shape, "seq-mean-token-sum-norm", longest=10)
        result = aggregate(losses, mask, "seq-mean-token-sum-norm", total)
        assert result.item() == pytest.approx(2 * (width + 1) / (4 * 10))


def test_what_is_masked_may_be_anything() -> None:
    losses = torch.tensor([[1.0, float("nan")], [float("inf"), 3.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [0, 1]])
    loss = aggregate(losses, mask)
    loss.backward()
    assert loss.item() == 2
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.5, 0], [0, 0.5]]


def test_masks_reach_over_trailing_dimensions() -> None:
    losses = torch.arange(12.0).reshape(3, 2, 2)
    assert aggregate(losses, torch.tensor([True, False, False])).item() == 1.5
    assert masked_mean(losses, torch.tensor([[True, False], [False, False], [False, True]])).item() == 5.5
    with pytest.raises(ValueError, match="beginning"):
        aggregate(losses, torch.ones(2))


def test_nothing_counted_is_nothing() -> None:
    for how in AGGREGATIONS:
        assert aggregate(torch.ones(2, 2), torch.zeros(2, 2), cast("LossAggregation", how)).item() == 0
    assert masked_mean(torch.ones(2), torch.zeros(2)).item() == 0


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(torch.ones(2), None, cast("LossAggregation", "mean"))

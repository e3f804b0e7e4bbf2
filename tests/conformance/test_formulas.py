"""Losses and advantages against loops over the formulas of papers and peers; the counts may only rise."""

from __future__ import annotations

import pytest

from tests.conformance import formula_loops as loops
from tests.conformance.formulas import CLOSE_GRADIENT, DRAWS, batch, counts, policy_losses, stored


@pytest.mark.parametrize("draws", [1, pytest.param(DRAWS, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
def test_formulas_equal_loops_or_differ_as_peers_do(draws: int) -> None:
    result, different = counts(draws)
    assert different == []
    expected = stored()
    assert expected["different"] == 0
    assert result["equal"] >= expected["equal"]
    assert result["explained"] >= expected["explained"]


def test_formula_that_is_wrong_counts_as_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of another clip is told from ours in value or gradient, on every kind of mask."""
    right = loops.ppo
    monkeypatch.setattr(loops, "ppo", lambda ratio, a, low, high, bound: right(ratio, a, low, high + 0.02, bound))
    clipped = [
        comparison for comparison in policy_losses("full") if comparison.name.startswith("actor {'loss_agg_func'")
    ]
    apart = [any(max(c.differs(batch(seed, "full"))) > CLOSE_GRADIENT for seed in range(8)) for c in clipped]
    assert apart
    assert all(apart)

"""Batches from several sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.replay.buffer import ReplayBuffer, ReplayMixture
from recipes.embodied.replay.storage import ColumnSpec, ReplayError, Transitions, TransitionSpec

SPEC = TransitionSpec({"states": ColumnSpec((1,), "float32")}, ColumnSpec((1,), "float32"))


def filled(mark: float, steps: int = 5) -> ReplayBuffer:
    buffer = ReplayBuffer(SPEC, 1, 10)
    for _ in range(steps):
        here = {"states": np.full((1, 1), mark)}
        flags = np.zeros(1, np.bool_)
        buffer.add(Transitions(here, np.zeros((1, 1)), np.full(1, mark), flags, flags, here))
    return buffer


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any), st.integers(1, 300))
def test_shares_are_exact(shares: list[int], total: int) -> None:
    names = [str(number) for number in range(len(shares))]
    mixture = ReplayMixture({name: filled(1) for name in names}, dict(zip(names, shares, strict=True)))
    counts = mixture.counts(total)
    assert sum(counts.values()) == total
    for name, share in zip(names, shares, strict=True):
        exact = total * share / sum(shares)
        assert counts[name] == exact or (abs(counts[name] - exact) < 1 and exact != int(exact))


def test_a_batch_holds_each_source_as_often_as_its_share_says() -> None:
    mixture = ReplayMixture({"online": filled(1), "demonstrations": filled(2)}, {"online": 0.5, "demonstrations": 0.5})
    batch = mixture.sample(64, np.random.default_rng(0), 1, 0.9)
    assert batch.rewards.tolist() == [1.0] * 32 + [2.0] * 32


def test_what_an_empty_source_cannot_give_the_others_do() -> None:
    mixture = ReplayMixture({"online": filled(1, 0), "demonstrations": filled(2)}, {"online": 1, "demonstrations": 1})
    assert mixture.counts(10) == {"online": 0, "demonstrations": 10}
    with pytest.raises(ReplayError, match="empty"):
        ReplayMixture({"online": filled(1, 0)}, {"online": 1}).counts(1)


@pytest.mark.parametrize("shares", [{"a": 1.0}, {"a": -1.0, "b": 2.0}, {"a": 0.0, "b": 0.0}])
def test_shares_that_are_not_those_of_the_sources_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ReplayError, match="shares"):
        ReplayMixture({"a": filled(1), "b": filled(2)}, shares)

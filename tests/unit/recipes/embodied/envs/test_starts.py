"""Random numbers that depend on nothing but where they are used."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.envs.starts import Starts

seeds = st.integers(0, 2**32 - 1)


def draws(seed: int, groups: list[int], reset: int = 0, episode: int = 0) -> np.ndarray:
    starts = Starts(seed, np.array(groups))
    starts.begin(reset)
    return starts.of(np.arange(len(groups)), np.full(len(groups), episode)).uniform(5)


@given(seeds, st.integers(0, 1000), st.integers(0, 1000))
def test_the_same_place_has_the_same_numbers(seed: int, reset: int, episode: int) -> None:
    whole = draws(seed, [0, 1, 2, 3], reset, episode)
    part = draws(seed, [2, 3], reset, episode)
    assert np.array_equal(whole[2:], part)
    assert ((whole >= 0) & (whole < 1)).all()


@given(seeds)
def test_other_places_have_others(seed: int) -> None:
    first = draws(seed, [0])
    for other in (draws(seed + 1, [0]), draws(seed, [1]), draws(seed, [0], 1), draws(seed, [0], 0, 1)):
        assert not np.isin(first, other).any()


def test_members_of_a_group_share() -> None:
    drawn = draws(7, [0, 0, 1])
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_numbers_are_spread_evenly() -> None:
    """Means, spreads and correlations of 200,000 draws are those of independent uniform numbers, within 5 sigma."""
    drawn = draws(0, list(range(40_000)))
    assert np.abs(drawn.mean(axis=0) - 0.5).max() < 5 * (1 / 12 / 40_000) ** 0.5
    assert np.abs(drawn.var(axis=0) - 1 / 12).max() < 5 * (1 / 180 / 40_000) ** 0.5
    correlations = np.corrcoef(drawn.T)
    assert np.abs(correlations - np.eye(5)).max() < 5 / 200
    following = np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]
    assert abs(following) < 5 / 200


def test_seeds_are_what_other_libraries_take() -> None:
    starts = Starts(3, np.arange(1000))
    starts.begin(0)
    result = starts.seeds()
    assert all(0 <= seed < 2**31 for seed in result)
    assert len(set(result)) > 990

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.load_balancing import Balancer, LeastLoaded, RoundRobin, partition

WEIGHTS = st.lists(st.integers(0, 10_000), max_size=60)
RANKS = st.integers(1, 9)
NO_RANKS: list[Any] = [0, -1, 2.0, "2", None, True, float("nan")]


def skewed(count: int, seed: int = 0) -> list[float]:
    """Lengths as rollouts have them: many short, few very long (log-normal, 20 to 30 k tokens)."""
    generator = random.Random(seed)
    return [min(30_000.0, generator.lognormvariate(6.5, 1.2)) for _ in range(count)]


def imbalance(loads: Sequence[float]) -> float:
    """Return the heaviest rank's load over the mean load; 1 is perfect."""
    return max(loads) * len(loads) / sum(loads)


def sums(parts: list[list[int]], weights: list[float]) -> list[float]:
    return [sum(weights[index] for index in part) for part in parts]


def dealt(balancer: Balancer, weights: list[float]) -> list[int]:
    return [balancer.assign(weight) for weight in weights]


def test_round_robin_takes_each_rank_in_turn() -> None:
    assert dealt(RoundRobin(3), [5, 1, 1, 9, 0]) == [0, 1, 2, 0, 1]


def test_round_robin_balances_a_queue_that_grows() -> None:
    weights = sorted(skewed(512))
    turns, blocks = RoundRobin(8), [0.0] * 8
    for index, weight in enumerate(weights):
        turns.assign(weight)
        blocks[index // 64] += weight
    assert imbalance(turns.loads) < 1.1
    assert imbalance(blocks) > 3


@pytest.mark.parametrize("seed", range(5))
def test_by_weight_is_better_where_lengths_come_in_any_order(seed: int) -> None:
    weights = skewed(512, seed)
    turns, light = RoundRobin(8), LeastLoaded(8)
    dealt(turns, weights)
    dealt(light, weights)
    assert imbalance(light.loads) < 1.2
    assert imbalance(light.loads) < imbalance(turns.loads)
    assert imbalance(sums(partition(weights, 8), weights)) < 1.001
    assert imbalance(sums(partition(weights, 8, equal_counts=True), weights)) < 1.002


def test_the_lightest_rank_is_next() -> None:
    assert dealt(LeastLoaded(3), [5, 1, 1, 1, 1, 9]) == [0, 1, 2, 1, 2, 1]
    assert dealt(LeastLoaded(2), [0, 0, 0, 0]) == [0, 1, 0, 1]


@given(WEIGHTS, RANKS)
def test_least_loaded_is_within_one_item_of_the_mean(weights: list[float], ranks: int) -> None:
    balancer = LeastLoaded(ranks)
    given_to = dealt(balancer, weights)
    loads = [sum(weight for weight, rank in zip(weights, given_to, strict=True) if rank == one) for one in range(ranks)]
    assert list(balancer.loads) == loads
    assert balancer.counts == tuple(given_to.count(rank) for rank in range(ranks))
    assert max(loads) <= sum(weights) / ranks + max(weights, default=0)


@given(WEIGHTS, RANKS, st.booleans())
def test_a_partition_has_every_item_once(weights: list[float], ranks: int, equal_counts: bool) -> None:
    parts = partition(weights, ranks, equal_counts=equal_counts)
    assert len(parts) == ranks
    assert sorted(index for part in parts for index in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in parts)


@given(WEIGHTS, RANKS)
def test_equal_counts_are_equal(weights: list[float], ranks: int) -> None:
    sizes = [len(part) for part in partition(weights, ranks, equal_counts=True)]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_a_partition_keeps_grahams_bound(weights: list[int], ranks: int) -> None:
    best = min(
        max(sum(weight for weight, one in zip(weights, given_to, strict=True) if one == rank) for rank in range(ranks))
        for given_to in itertools.product(range(ranks), repeat=len(weights))
    )
    heaviest = max(sum(weights[index] for index in part) for part in partition(weights, ranks))
    assert heaviest <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def test_nothing_is_divided_into_nothing() -> None:
    assert partition([], 2) == [[], []]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 10**400, "3", None, [1], numpy.array([1, 2])])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    for call in (
        lambda: RoundRobin(2).assign(weight),
        lambda: partition([1, weight], 2),
        lambda: partition([1, weight], 2, equal_counts=True),
    ):
        with pytest.raises(ValueError, match="`weight`"):
            call()


@pytest.mark.parametrize("kind", [RoundRobin, LeastLoaded])
def test_ranks_there_must_be(kind: type[RoundRobin | LeastLoaded]) -> None:
    for number in NO_RANKS:
        with pytest.raises(ValueError, match=r"`num_ranks` is .*, expected an integer >= 1"):
            kind(number)


def test_a_partition_is_among_ranks_that_there_are() -> None:
    for number in NO_RANKS:
        with pytest.raises(ValueError, match=r"`num_ranks` is .*, expected an integer >= 1"):
            partition([1, 2], number)


def test_numbers_of_other_libraries_weigh_as_much() -> None:
    assert partition(numpy.array([3, 1, 2]), numpy.int64(2)) == [[0], [1, 2]]  # pyright: ignore[reportArgumentType]
    balancer = LeastLoaded(numpy.int64(2))  # pyright: ignore[reportArgumentType]
    assert [balancer.assign(weight) for weight in numpy.array([3.0, 1.0, 1.0], dtype=numpy.float32)] == [0, 1, 1]
    assert balancer.loads == (3, 2)
    assert all(type(load) in (int, float) for load in balancer.loads)

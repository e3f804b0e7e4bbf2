"""Arrangements and the search among them: every one that differs, the best of all, and memory as a hard limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core.job.arrangements import (
    Arrangement,
    DeviceGroup,
    DeviceSpan,
    Simulated,
    candidates,
    search,
    share_one,
)

NAMES = ("env", "actor")


class Toy:
    """A flow of two components: their work divides, and one that shares waits."""

    def __init__(self, env: float, actor: float, overhead: float) -> None:
        self._work, self._overhead = {"env": env, "actor": actor}, overhead

    def counts(self, component: str, kind: DeviceGroup) -> Sequence[int]:
        return range(1, kind.units + 1) if kind.units < 100 else range(100, kind.units + 1, 100)

    def most_useful(self, component: str, kind: DeviceGroup, units: int) -> int:
        return min((count for count in self.counts(component, kind) if count <= units), key=self._actor, default=0)

    def _actor(self, number: int) -> float:
        return self._work["actor"] / number + self._overhead * number

    def bound(self, arrangement: Arrangement) -> float:
        env, actor = (arrangement.of(name) for name in NAMES)
        acts, trains = self._work["env"] / env.size, self._actor(actor.size)
        together = not arrangement.staleness or env.overlaps(actor)
        return 0.9 * (acts + trains if together else max(acts, trains))

    def simulate(self, arrangement: Arrangement) -> Simulated:
        return Simulated(self.bound(arrangement) / 0.9)


def every(units: int) -> list[Arrangement]:
    spans = [DeviceSpan("gpu", first, size) for size in range(1, units + 1) for first in range(units + 1 - size)]
    return [
        Arrangement(tuple(zip(NAMES, both, strict=True)), 1, ahead) for *both, ahead in product(spans, spans, (0, 1))
    ]


times = st.floats(0.1, 50)


@settings(max_examples=40, deadline=None)
@given(times, times, st.floats(0, 2), st.integers(1, 6))
def test_nothing_is_faster_than_what_the_search_finds(env: float, actor: float, overhead: float, units: int) -> None:
    flow, kinds = Toy(env, actor, overhead), (DeviceGroup("gpu", units, units),)
    result = search(flow, candidates(flow, dict.fromkeys(NAMES, kinds), (1,), (0, 1), lambda arrangement: True))
    fastest = min(flow.simulate(arrangement).seconds for arrangement in every(units))
    assert result.proven
    assert min(ranked.step.seconds for ranked in result.best) <= fastest * (1 + 1e-9)
    assert all(one.step.seconds <= other.step.seconds * 1.01 for one, other in pairwise(result.best))


def test_alike_accelerators_are_tried_once() -> None:
    flow, kinds = Toy(1, 1, 0), (DeviceGroup("gpu", 3, 3),)
    listed = list(candidates(flow, dict.fromkeys(NAMES, kinds), (1,), (0,), lambda arrangement: True))
    # Each alone on one of three accelerators differs from both on one, and not by which.
    alone = [where for where in listed if where.of("env").size == where.of("actor").size == 1]
    assert sorted(where.sharing for where in alone) == [False, False, True]


def test_memory_is_a_hard_limit() -> None:
    flow, kinds = Toy(8, 8, 0), (DeviceGroup("gpu", 2, 2),)
    listed = list(candidates(flow, dict.fromkeys(NAMES, kinds), (1,), (0,), lambda arrangement: True))
    result = search(flow, listed, fits=lambda arrangement: not arrangement.sharing)
    assert result.unfit > 0
    assert all(not ranked.arrangement.sharing for ranked in result.best)


def test_of_thousands_equal_and_separate_sets_are_searched() -> None:
    flow = Toy(4000, 4000, 0.01)
    kinds = (DeviceGroup("a", 4000, 8), DeviceGroup("b", 4000, 8))
    listed = list(candidates(flow, {"env": kinds, "actor": kinds}, (1,), (0,), lambda arrangement: True))
    assert any(share_one(where.of("env"), where.of("actor")) for where in listed)
    assert any({seats.kind for _, seats in where.seats} == {"a", "b"} for where in listed)
    assert search(flow, listed).proven


_LISTED = """
from rlinf_core.job.arrangements import DeviceGroup, candidates
from tests.unit.advice.test_search import Toy
kinds = (DeviceGroup("a", 4000, 8), DeviceGroup("b", 4000, 8))
names = ("env", "rollout", "actor")
flow = Toy(4000, 4000, 0.01)
print([where.seats for where in candidates(flow, dict.fromkeys(names, kinds), (1,), (0,), lambda where: True)])
"""


def test_candidates_are_listed_once_and_always_in_the_same_order() -> None:
    first, second = (
        subprocess.run(
            [sys.executable, "-c", _LISTED], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second
    for units in (6, 40, 4000):
        kinds = (DeviceGroup("a", units, 8), DeviceGroup("b", units, 8))
        toy = Toy(1, 1, 0.01)
        where = list(candidates(toy, dict.fromkeys(("env", "actor"), kinds), (1, 2), (0, 1), lambda arrangement: True))
        assert len(where) == len(set(where)) > 1


@pytest.mark.parametrize(("difference", "smaller_first"), [(0.0002, True), (0.004, False)])
@pytest.mark.parametrize("seconds", [1.0, 1.0049, 9.994, 99.96])
def test_about_equally_fast_is_a_difference_and_no_rounding(
    seconds: float, difference: float, smaller_first: bool
) -> None:
    class Sloping(Toy):
        def bound(self, arrangement: Arrangement) -> float:
            return seconds * (1 + (difference if arrangement.accelerators == 1 else 0))

        def simulate(self, arrangement: Arrangement) -> Simulated:
            return Simulated(self.bound(arrangement))

    flow, kinds = Sloping(1, 1, 0), (DeviceGroup("gpu", 2, 2),)
    listed = list(candidates(flow, dict.fromkeys(NAMES, kinds), (1,), (0,), lambda arrangement: True))
    result = search(flow, listed, top=len(listed))
    assert (result.best[0].arrangement.accelerators == 1) == smaller_first


def test_of_equally_fast_ones_the_smaller_comes_first() -> None:
    class Flat(Toy):
        def bound(self, arrangement: Arrangement) -> float:
            return 1.0

        def simulate(self, arrangement: Arrangement) -> Simulated:
            return Simulated(1.0)

    flow, kinds = Flat(1, 1, 0), (DeviceGroup("gpu", 3, 3),)
    listed = list(candidates(flow, dict.fromkeys(NAMES, kinds), (1,), (0,), lambda arrangement: True))
    result = search(flow, listed, top=len(listed))
    assert result.best[0].arrangement.accelerators == 1

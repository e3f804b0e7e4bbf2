"""Thousands of drawn histories of the parts that decide, each a function of its seed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.simulation.channel_run import ChannelRun
from tests.unit.simulation.manager_run import ManagerRun
from tests.unit.simulation.plan_run import PlanRun
from tests.unit.simulation.planted_races import PLANTED
from tests.unit.simulation.task_run import TaskRun
from tests.unit.simulation.world import World, WrongOutcomeError

SCENARIOS: dict[str, Callable[[World], Any]] = {
    "channel": ChannelRun,
    "manager": ManagerRun,
    "plan": PlanRun,
    "tasks": TaskRun,
}
_SEEDS, _MANY = 260, 10_000


def played(scenario: Callable[[World], Any], seed: int) -> World:
    world = World(seed)
    try:
        scenario(world).play()
    except Exception as error:
        raise WrongOutcomeError(f"seed {seed}: {error!r}") from error
    return world


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", SCENARIOS)
def test_outcomes_are_right_for_seeds(name: str) -> None:
    worlds = [played(SCENARIOS[name], seed) for seed in range(_SEEDS // len(SCENARIOS))]

    assert all(world.trace for world in worlds)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCENARIOS)
def test_outcomes_are_right_for_ten_thousand_seeds(name: str) -> None:
    lines = sum(len(played(SCENARIOS[name], seed).trace) for seed in range(_MANY))

    assert lines > _MANY


def digests() -> list[str]:
    return [played(scenario, seed).digest() for scenario in SCENARIOS.values() for seed in range(5)]


def test_seed_replays_to_the_byte_in_another_process() -> None:
    code = "from tests.unit.simulation import test_simulation as t; print(t.digests())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert there.stdout.strip() == str(digests())


@pytest.mark.parametrize("name", PLANTED)
def test_planted_race_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    monkeypatch.setattr(planted.owner, planted.method, planted.wrong)

    def play() -> None:
        for seed in range(400):
            played(planted.scenario, seed)

    with pytest.raises(WrongOutcomeError):
        play()

"""Thousands of drawn histories of the parts that decide: channels, their connections, deaths and successors."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.simulation.channel_run import ChannelRun
from tests.unit.simulation.planted_races import PLANTED
from tests.unit.simulation.world import World, WrongOutcomeError

SCENARIOS: dict[str, Callable[[World], Any]] = {"channel": ChannelRun}
_SEEDS = 200


def played(scenario: Callable[[World], Any], seed: int) -> World:
    world = World(seed)
    try:
        scenario(world).play()
    except WrongOutcomeError as error:
        error.add_note(f"seed {seed}")
        raise
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
    lines = sum(len(played(SCENARIOS[name], seed).trace) for seed in range(10_000))

    assert lines > 10_000


@pytest.mark.parametrize("name", SCENARIOS)
def test_seed_replays_to_the_byte_in_another_process(name: str) -> None:
    code = (
        "import logging; logging.disable(30)\n"
        "from tests.unit.simulation.test_simulation import SCENARIOS, played\n"
        f"print([played(SCENARIOS[{name!r}], seed).digest() for seed in range(5)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert there.stdout.strip() == str([played(SCENARIOS[name], seed).digest() for seed in range(5)])


@pytest.mark.parametrize("name", PLANTED)
def test_planted_race_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    monkeypatch.setattr(planted.owner, planted.method, planted.wrong)

    def play() -> None:
        for seed in range(400):
            played(planted.scenario, seed)

    with pytest.raises(WrongOutcomeError):
        play()

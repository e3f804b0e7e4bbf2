"""Every environment that Gymnasium registers steps, or is refused with a sentence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import gymnasium
import pytest

from recipes.embodied.envs.contract import random_actions
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from rlinf_core.errors import RLinfError

IDS = Path(__file__).with_name("gymnasium_registry.json")


def refusal(task: str) -> str | None:
    """Return why two environments of an id do not step; None where they do.

    Raises:
        Exception: they raise something else than our errors.
    """
    try:
        env = make_env("gymnasium", EnvSettings(num_envs=2, task=task, num_processes=0))
        env.reset()
        result = env.step(random_actions(env.spec, 2))
        env.close()
    except RLinfError as error:
        return f"{error.message}; {error.help}"
    return None if result.rewards.shape == (2, 1) else f"rewards of shape {result.rewards.shape}"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_registry_of_gymnasium_steps_as_ever() -> None:
    """Each id of the list steps, but for its package where this machine lacks it; others are refused with a remedy."""
    warnings.simplefilter("ignore")
    package_by_id: dict[str, str] = json.loads(IDS.read_text(encoding="utf-8"))
    refused = {task: why for task in gymnasium.registry if (why := refusal(task)) is not None}
    packages = {task: written.split(", ") if written else [] for task, written in package_by_id.items()}
    lacking = {task for task, why in refused.items() if any(package in why for package in packages.get(task, []))}
    assert {task: why for task, why in refused.items() if task in packages and task not in lacking} == {}
    assert [why for why in refused.values() if why.endswith("; None")] == []
    assert len(package_by_id) >= 45
    assert len(gymnasium.registry) - len(refused) >= 12

"""A batch whose cheap environments are checked together: the same as one by one, also where one raises."""

# Gymnasium is an optional package.
# pyright: basic

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.env_spec import EnvSettings
from rlinf_core import ConfigError

gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402

from recipes.embodied.envs.simulators.gymnasium.gymnasium_env import GymnasiumEnv  # noqa: E402


class Walk(gymnasium.Env):
    """A random walk of 5 steps; the steps of a class attribute, counted over all environments, return or raise."""

    odd: dict[int, Any] = {}  # noqa: RUF012 - set by each test
    made = steps = 0

    def __init__(self) -> None:
        Walk.made += 1
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._place, self._time = self.np_random.normal(), 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        Walk.steps += 1
        self._time += 1
        self._place += float(action[0]) + self.np_random.normal()
        action[0] = 7  # an environment may
        result = (self._seen(), self._place, self._time >= 5, False, {"success": True} if Walk.odd == "tell" else {})
        odd = Walk.odd.get(Walk.steps) if isinstance(Walk.odd, dict) else None
        if odd == "raise":
            raise OSError("a cable")
        return result if odd is None else odd(result)

    def _seen(self) -> Any:
        return np.array([self._place, self._time], np.float32)


@pytest.fixture(autouse=True)
def walk() -> Iterator[None]:
    gymnasium.register("RlinfWalk-v0", entry_point=Walk)
    yield
    del gymnasium.registry["RlinfWalk-v0"]


def played(odd: Any) -> list[Any]:
    """Return what 3 environments show in 13 steps, with rewards and ends."""
    Walk.odd, Walk.made, Walk.steps = odd, 0, 0
    env = GymnasiumEnv(EnvSettings(num_envs=3, task="RlinfWalk-v0", seed=4, resumable=True))
    history = [env.reset()["states"]]
    for step in range(13):
        result = env.step(np.full((3, 1, 1), np.sin(step), np.float32))
        history += [result.observations["states"], result.rewards, result.terminations, result.valid]
    env.close()
    return history


def same(history: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(history, other, strict=True))


def test_one_by_one_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    together = played({})
    monkeypatch.setattr("recipes.embodied.envs.processes.simulation_batch.CheapSimulation", type("Other", (), {}))
    assert same(played({}), together)


@pytest.mark.parametrize("at", [1, 2, 14, 20, 35])
def test_one_that_raises_is_repeated(at: int) -> None:
    fine = played({})
    again = played({at: "raise"})
    assert same(again, fine)
    assert Walk.made == 4


def test_success_is_seen_in_any_step() -> None:
    assert same(played("tell"), played({}))
    Walk.odd = "tell"
    env = GymnasiumEnv(EnvSettings(num_envs=3, task="RlinfWalk-v0"))
    env.reset()
    env.step(np.zeros((3, 1, 1), np.float32))
    assert env.knows_success


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda result: result[:4], "returns 4 values"),
        (lambda result: (*result[:1], "much", *result[2:]), "the reward of `RlinfWalk-v0` is 'much'"),
        (lambda result: (*result[:2], 3, *result[3:]), "`terminated` of `RlinfWalk-v0` is 3"),
        (lambda result: (np.zeros(3, np.float32), *result[1:]), "has the shape [3]"),
        (lambda result: (np.array(["a", "b"]), *result[1:]), "has values of the type <U1"),
    ],
)
def test_a_wrong_result_of_one_is_refused_at_once(wrong: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        played({8: wrong})
    assert words in str(refused.value)
    assert Walk.steps <= 9

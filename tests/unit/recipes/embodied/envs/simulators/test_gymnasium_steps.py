"""What environments of Gymnasium return, held against their own spaces."""

# Gymnasium is an optional package.
# pyright: basic

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.contract import random_actions
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.simulators.gymnasium import gymnasium_spaces
from recipes.training.arrays import NonFiniteError
from rlinf_core import ConfigError

gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402

from recipes.embodied.envs.simulators.gymnasium.gymnasium_env import GymnasiumEnv  # noqa: E402

STATES = spaces.Box(np.array([-1, -np.inf, 0], np.float32), np.array([1, np.inf, 5], np.float32))
PICTURE = spaces.Box(0, 255, (16, 16, 3), np.uint8)


class Odd(gymnasium.Env):
    """Returns from the given step on what it is told to return."""

    def __init__(
        self, space: Any = STATES, shown: Any = None, result: Any = None, first: Any = None, act: Any = None
    ) -> None:
        self.observation_space, self.action_space = space, act or spaces.Box(-1, 1, (1,))
        self._shown, self._result, self._first = shown, result, first

    def _fine(self) -> Any:
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return (self._fine(), {}) if self._first is None else self._first

    def step(self, action: Any) -> Any:
        shown = self._fine() if self._shown is None else self._shown
        rest = (1.0, False, False, {}) if self._result is None else self._result
        return (shown, *rest) if isinstance(rest, tuple) else rest


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("Odd-v0", Odd)
    gymnasium_spaces._warned.clear()
    yield
    del gymnasium.registry["Odd-v0"]


def played(steps: int = 1, **options: Any) -> None:
    env = GymnasiumEnv(EnvSettings(num_envs=2, task="Odd-v0", options=options))
    try:
        env.reset()
        for _ in range(steps):
            env.step(np.zeros((2, 1, 1), np.float32))
    finally:
        env.close()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"shown": np.zeros(4, np.float32)}, r"an observation of `Odd-v0` has the shape \[4\]"),
        ({"shown": np.zeros((1, 3), np.float32)}, r"has the shape \[1, 3\]"),
        ({"shown": np.array(["a", "b", "c"])}, "has values of the type"),
        (
            {"space": PICTURE, "shown": np.zeros((16, 16, 3))},
            "the type float64, but its space says uint8",
        ),
        ({"space": PICTURE, "shown": np.zeros((3, 16, 16), np.uint8)}, r"has the shape \[3, 16, 16\]"),
        ({"result": (None, False, False, {})}, "the reward of `Odd-v0` is None"),
        ({"result": (np.ones(2), False, False, {})}, "the reward of `Odd-v0` is an array of the shape"),
        ({"result": ("1", False, False, {})}, "the reward of `Odd-v0` is '1'"),
        ({"result": (1.0, 2, False, {})}, "`terminated` of `Odd-v0` is 2"),
        ({"result": (1.0, False, None, {})}, "`truncated` of `Odd-v0` is None"),
        ({"result": (1.0, False, False, {"success": "no"})}, "`success` of `Odd-v0` is 'no'"),
        ({"result": (1.0, False, False, {"is_success": np.array([True, False])})}, "`success` of `Odd-v0`"),
        ({"result": (1.0, False, {})}, "`step` of `Odd-v0` returns 4 values"),
        ({"result": 3}, "`step` of `Odd-v0` returns int"),
        ({"first": (1.0, 2.0)}, "`reset` of `Odd-v0` does not return an observation and a dictionary"),
        ({"first": np.zeros(3)}, "`reset` of `Odd-v0` does not return an observation and a dictionary"),
        ({"first": (np.zeros(2, np.float32), {})}, r"has the shape \[2\]"),
    ],
)
def test_what_does_not_fit_the_spaces_is_refused(odd: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        played(**odd)


def test_an_observation_that_is_no_number_is_refused() -> None:
    with pytest.raises(NonFiniteError):
        played(shown=np.array([0, np.nan, 0], np.float32))


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ([2, 0, 0], "number 0 is 2, and its bounds are -1 and 1"),
        ([1, -1e9, -3], "number 2 is -3, and its bounds are 0 and 5"),
        ([1.000001, 9, 5], None),
    ],
)
def test_states_out_of_their_bounds_are_told_once(
    shown: list[float], words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rlinf"):
        played(steps=3, shown=np.array(shown, np.float32))
    messages = [record.getMessage() for record in caplog.records if "leaves its space" in record.getMessage()]
    assert [words in message for message in messages] == ([] if words is None else [True])
    assert all("`Odd-v0`" in message for message in messages)


def test_the_part_of_a_dictionary_is_named(caplog: pytest.LogCaptureFixture) -> None:
    space = spaces.Dict(a=spaces.Discrete(3), hand=spaces.Dict(b=spaces.Box(-2, 2, (2,), np.float64)))
    reader = gymnasium_spaces.Reader("task", space)
    with caplog.at_level(logging.WARNING, "rlinf"):
        seen = reader({"a": 2, "hand": {"b": np.array([0.0, 2.5])}})
        reader.check_bounds({name: np.array([value]) for name, value in seen.items()})
    assert "`hand.b` of an observation of `task` leaves its space: number 1 is 2.5" in caplog.text


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-2, 2, (1,)),
        spaces.Box(np.array([0, -np.inf, 3], np.float32), np.array([5, np.inf, np.inf], np.float32)),
        spaces.Box(0, 9, (2, 2), np.int64),
        spaces.Discrete(3, start=-1),
    ],
)
def test_a_spec_tells_the_numbers_that_a_simulator_gets(space: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    step = Odd.step

    def noted(self: Any, action: Any) -> Any:
        taken.append(np.asarray(action).reshape(-1))
        return step(self, action)

    monkeypatch.setattr(Odd, "step", noted)
    env = GymnasiumEnv(EnvSettings(num_envs=1, task="Odd-v0", options={"act": space}))
    actions = random_actions(env.spec, 1, chunk=6)
    env.reset()
    env.step(actions)
    wanted = env.spec.native(actions[0])
    np.testing.assert_allclose(np.stack(taken), wanted, rtol=1e-6)
    assert all(space.contains(item.reshape(space.shape).astype(space.dtype)) for item in wanted)

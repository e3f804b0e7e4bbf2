"""The arm under a camera: the picture shows where everything is, the sentence which point counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.contract import check_env
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.franka.franka_vision import COLORS, POINT_HEIGHT, SEEN_HIGH, SEEN_LOW, FrankaVisionEnv
from recipes.embodied.robots.franka_arm import distance
from rlinf_core.errors import ConfigError


def make(num_envs: int = 16, **settings: Any) -> FrankaVisionEnv:
    env = FrankaVisionEnv(EnvSettings(num_envs=num_envs, auto_reset=False, **settings))
    env.reset()
    return env


def test_it_keeps_the_promises_of_environments() -> None:
    check_env(FrankaVisionEnv)


def test_the_expert_touches_the_named_point() -> None:
    env = make(64)
    for _ in range(16):
        env.step(env.expert()[:, None])
    assert env._episodes.success_once.all()


def test_the_named_point_is_where_the_picture_shows_its_colour() -> None:
    env = make(options={"points": 3, "image_size": 64})
    seen = env.observe()
    assert seen["images.main"].shape == (16, 64, 64, 3)
    assert seen["images.main"].dtype == np.uint8
    for row, text in enumerate(seen["instructions"]):
        color = np.array(COLORS[str(text).split()[2]])
        line, column = np.nonzero((np.abs(seen["images.main"][row].astype(int) - color) < 3).all(axis=-1))
        share = (np.stack((line.mean(), column.mean())) + 0.5) / 64
        place = SEEN_HIGH - (SEEN_HIGH - SEEN_LOW) * share
        # The hand and the arm may cover a part of it.
        np.testing.assert_allclose(place, env._target[:2, row], atol=0.03)
    assert (env._target[2] == POINT_HEIGHT).all()


def test_states_say_nothing_of_points_and_instructions_vary() -> None:
    env, other = make(group_size=16), make(group_size=16)
    other._places += 0.1
    np.testing.assert_array_equal(env.observe()["states"], other.observe()["states"])
    assert set(make(64).observe()["instructions"]) == {"touch the red point", "touch the blue point"}


def test_the_other_point_is_no_success() -> None:
    env = make(64)
    env._named = 1 - env._named
    wrong = env._target.copy()
    env._named = 1 - env._named
    for _ in range(16):
        way = (wrong - env._hand) / 0.04
        env.step(np.clip(way, -1, 1).T.astype(np.float32)[:, None])
    assert env._episodes.success_once.mean() < 0.1


def test_rewards_are_the_way_to_the_named_point_and_success() -> None:
    env = make(64)
    before = distance(env._target, env._hand)
    result = env.step(np.random.default_rng(0).uniform(-1, 1, (64, 1, 3)).astype(np.float32))
    after = distance(env._target, env._hand)
    np.testing.assert_allclose(result.rewards[:, 0], 10 * (before - after) + (after < 0.05), atol=1e-5)


@pytest.mark.parametrize("options", [{"points": 9}, {"points": 0}, {"image_size": 2}])
def test_what_cannot_be_drawn_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"options.{next(iter(options))}`"):
        make(options=options)

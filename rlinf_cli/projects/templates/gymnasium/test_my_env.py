"""The environment is one of Gymnasium, rlinf reads its spaces, and its job file is valid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gymnasium.utils.env_checker import check_env

from recipes.embodied import EnvSettings, make_env
from rlinf_core import load_job

from my_env import CartEnv


def test_environment_is_one_of_gymnasium() -> None:
    check_env(CartEnv(), skip_render_check=True)


def test_carts_move_as_they_are_pushed() -> None:
    carts = make_env("my_env:CartEnv", EnvSettings(num_envs=4, max_episode_steps=50))
    before = carts.reset()["states"][:, 0]
    after = carts.step(np.ones((4, 1, 1), np.float32)).observations["states"][:, 0]
    assert (after > before).all()


def test_job_file_is_valid() -> None:
    job = load_job(str(Path(__file__).with_name("my_env.yaml")))
    assert job.ok, job.diagnostics

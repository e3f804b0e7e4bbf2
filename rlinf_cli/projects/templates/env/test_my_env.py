"""The environment keeps the promises that recipes rely on, and its job file is valid."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recipes.embodied import EnvSettings, check_env
from rlinf_core import load_job

from my_env import Cart


def test_environment_keeps_the_contract() -> None:
    check_env(Cart)


def test_carts_move_as_they_are_pushed() -> None:
    carts = Cart(EnvSettings(num_envs=8))
    before = carts.reset()["states"][:, 0]
    pushed = np.tile(np.array([1, -1], np.float32), 4).reshape(8, 1, 1)  # of each cart one action of one number
    after = carts.step(pushed).observations["states"][:, 0]
    assert (np.sign(after - before) == pushed[:, 0, 0]).all()


def test_each_cart_has_a_picture() -> None:
    carts = Cart(EnvSettings(num_envs=8))
    carts.reset()
    assert carts.picture(carts.look(np.arange(2))).shape == (2, 40, 200, 3)


def test_job_file_is_valid() -> None:
    job = load_job(str(Path(__file__).with_name("my_env.yaml")))
    assert job.ok, job.diagnostics

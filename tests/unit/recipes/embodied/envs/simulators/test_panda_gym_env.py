"""The tasks of panda-gym, where it is installed: `pip install panda-gym`, in an interpreter of its own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from rlinf_core.errors import ConfigError

pytest.importorskip("panda_gym", reason="the extra `panda` is not installed")


def make(task: str = "PandaReachDense-v3", **settings: Any) -> VectorEnv:
    return make_env("panda_gym", EnvSettings(num_envs=2, task=task, **settings))


@pytest.mark.parametrize(("task", "states", "actions"), [("PandaReachDense-v3", 12, 3), ("PandaPush-v3", 24, 3)])
def test_it_steps_and_starts_again(task: str, states: int, actions: int) -> None:
    env = make(task, max_episode_steps=3)
    try:
        assert (env.spec.state_size, env.spec.action_size) == (states, actions)
        first = env.reset()["states"]
        assert first.shape == (2, states)
        results = [env.step(np.zeros((2, 1, actions), np.float32)) for _ in range(3)]
        assert results[-1].episodes is not None
        assert results[-1].episodes.success_at_end is not None
        np.testing.assert_array_equal(env.reset(0)["states"], first)
    finally:
        env.close()
        env.close()


def test_a_script_reaches() -> None:
    """The hand goes straight to the point: the first six states are where it is and where it should be."""
    env = make(max_episode_steps=50, auto_reset=False)
    try:
        states, solved = env.reset()["states"], np.zeros(2, np.bool_)
        for _ in range(30):
            way = states[:, 3:6] - states[:, :3]
            result = env.step((10 * way)[:, None].astype(np.float32))
            states, solved = result.observations["states"], solved | env._episodes.success
        assert solved.all()
        assert env.knows_success
    finally:
        env.close()


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="PandaDance-v3"):
        make("PandaDance-v3")


def test_it_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    make().close()
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""
    print("heard")
    assert capfd.readouterr().out == "heard\n"


def test_pybullet_prints_nothing() -> None:
    program = (
        "from recipes.embodied.envs.base import EnvSettings\n"
        "from recipes.embodied.envs.registry import make_env\n"
        "make_env('panda_gym', EnvSettings(num_envs=1, task='PandaReach-v3')).close()\n"
        "import sys; print('seen', flush=True); print('too', file=sys.stderr, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("seen\n", "too\n")

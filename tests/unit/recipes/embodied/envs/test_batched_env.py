"""Simulators that step all their environments at once keep the promises of every environment."""

# It calls a part of `check_env`, and looks at what the stand-in was given.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar

import numpy as np
import pytest

from recipes.embodied.envs.env_spec import EnvSettings
from rlinf_core import ConfigError

gymnasium = pytest.importorskip("gymnasium")
torch = pytest.importorskip("torch")


class StandIn(gymnasium.Env):
    """What the adapter uses of ManiSkill 3: tensors [B, ...], resets of some by `env_idx`, `info["success"]`."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, num_envs: int, obs_mode: str, sensor_configs: dict[str, int], **fields: Any) -> None:
        if fields["sim_backend"] == "physx_cpu" and num_envs > 1:
            raise RuntimeError("Cannot set the sim backend to 'cpu' and have multiple environments.")
        self.fields, self.num_envs, self.device = fields, num_envs, torch.device("cpu")
        self.control_freq = 20
        self.images, self.size = obs_mode == "rgb+state", sensor_configs
        self.single_action_space = gymnasium.spaces.Box(np.array([-1, -2], np.float32), np.array([1, 4], np.float32))
        self.action_space = gymnasium.spaces.Box(-9, 9, (num_envs, 2))
        self.observation_space = gymnasium.spaces.Box(-9, 9, (num_envs, 3))
        self.place = torch.zeros(num_envs, 3)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = (options or {}).get("env_idx", torch.arange(self.num_envs))
        self.place[rows] = torch.zeros(len(rows), 3)
        # As ManiSkill does it: the first seed counts, whoever is reset.
        with torch.random.fork_rng():
            torch.manual_seed(np.resize(seed, self.num_envs)[0])
            self.place[rows, 2] = torch.rand(len(rows))
        return self.seen(), {}

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor)
        self.place[:, :2] += actions
        success = self.place[:, 1] > 6
        # A limit of the simulator's own is not what ends episodes here.
        truncated = torch.ones(self.num_envs, dtype=torch.bool)
        return self.seen(), -self.place[:, 0], success, truncated, {"success": success}

    def seen(self) -> Any:
        if not self.images:
            return self.place.clone()
        image = self.place[:, :1, None, None].abs().clamp(0, 255).to(torch.uint8)
        shape = (self.num_envs, self.size["height"], self.size["width"], 3)
        return {"state": self.place.clone(), "sensor_data": {"base_camera": {"rgb": image.expand(shape)}}}


class TestManiskill:
    """`env_type: maniskill`, with a stand-in for the package: it has not run with the package itself."""

    @pytest.fixture(autouse=True)
    def package(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from recipes.embodied.envs.simulators.maniskill import ManiskillEnv

        for name in ("mani_skill", "mani_skill.envs"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        gymnasium.register("StandIn-v1", StandIn, disable_env_checker=True, max_episode_steps=7)
        self.make = ManiskillEnv
        yield
        del gymnasium.registry["StandIn-v1"]

    def test_promises_are_kept_but_for_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from recipes.embodied.envs import contract

        env = self.make(EnvSettings(num_envs=2, task="StandIn-v1", max_episode_steps=1000, auto_reset=False))
        contract._check_rest(env)
        with pytest.raises(ConfigError, match="equal starts"):
            self.make(EnvSettings(num_envs=2, task="StandIn-v1", group_size=2))

    def test_what_it_observes_and_how_episodes_end(self) -> None:
        options = {"cameras": ["main"], "image_size": 16, "control_mode": "pd_joint_delta_pos"}
        env = self.make(EnvSettings(num_envs=3, task="StandIn-v1", options=options))
        assert (env.spec.state_size, env.spec.action_size, env.spec.cameras) == (3, 2, {"main": (16, 16, 3)})
        assert env.max_episode_steps == 7
        assert env._base.fields["control_mode"] == "pd_joint_delta_pos"
        assert env.control_hz == 20
        seen = env.reset()
        assert seen["images.main"].dtype == np.uint8
        starts = seen["states"][:, 2].copy()
        # The bounds of the second number are -2 and 4: half a unit is 2.5.
        actions = np.full((3, 1, 2), 0.5, np.float32)
        actions[0] = 1
        first = env.step(actions)
        assert np.allclose(first.observations["states"][:, 1], [4, 2.5, 2.5])
        second = env.step(actions)
        assert second.terminations[:, 0].tolist() == [True, False, False]
        assert not second.truncations.any()
        assert second.episodes is not None
        assert np.asarray(second.episodes.success_at_end).tolist() == [True]
        assert second.observations["states"][0, :2].tolist() == [0, 0]
        assert second.observations["states"][1:, 2].tolist() == starts[1:].tolist()
        assert env.knows_success

    def test_environment_reset_alone_starts_elsewhere_each_time(self) -> None:
        env = self.make(EnvSettings(num_envs=3, task="StandIn-v1"))
        env.reset()
        actions = np.zeros((3, 1, 2), np.float32)
        actions[2] = 1  # solves it in two steps
        starts = [env.step(actions).observations["states"][2, 2] for _ in range(6)][1::2]
        assert len(set(starts)) == 3

    def test_what_the_simulator_refuses_is_told(self) -> None:
        with pytest.raises(ConfigError, match="have multiple environments") as caught:
            self.make(EnvSettings(num_envs=2, task="StandIn-v1", options={"sim_backend": "physx_cpu"}))
        assert "Vulkan" in (caught.value.help or "")

    def test_a_camera_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="no camera `hand_camera`") as caught:
            self.make(EnvSettings(num_envs=1, task="StandIn-v1", options={"cameras": ["wrist"]}))
        assert "`base_camera`" in (caught.value.help or "")

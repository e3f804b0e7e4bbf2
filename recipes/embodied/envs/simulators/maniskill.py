"""ManiSkill 3: manipulation on SAPIEN, many environments on one GPU, or one on the CPU.

Written for the interface of ManiSkill 3.0.1 and tested against a stand-in, because ManiSkill needs Vulkan even without
images.
"""

# ManiSkill is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import numpy as np

from recipes.embodied.config.env_types import ManiskillOptions
from recipes.embodied.envs.batched_env import BatchedEnv
from recipes.embodied.envs.env_spec import BoolArray, EnvSettings, EnvSpec, IntArray, Observation, Transition
from recipes.embodied.envs.observation_keys import STATES, image_key
from recipes.embodied.envs.processes.simulator import checked_options
from recipes.embodied.envs.simulators.packages import imported
from recipes.training.arrays import Array
from rlinf_core import ConfigError

_DEFAULT_TASK = "PickCube-v1"
_HELP = (
    "ManiSkill needs a Vulkan driver even without images (`vulkaninfo --summary` lists the devices), and an NVIDIA GPU"
    " for more than one environment"
)
# ManiSkill's names of cameras; not every task and robot has a hand camera.
_CAMERAS = {"main": "base_camera", "wrist": "hand_camera"}


class ManiskillEnv(BatchedEnv):
    """`task` is an id: `PickCube-v1`, `StackCube-v1`, `PegInsertionSide-v1`, ...

    All starts of a reset are drawn from one seed, so that environments cannot share a start: groups, as for GRPO, are
    impossible.
    """

    # Success is reported in every step, and the simulator continues until a reset.
    ends = False

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self._options: ManiskillOptions = checked_options(ManiskillOptions, settings.options)
        if settings.group_size > 1:
            raise ConfigError(
                "`env_type: maniskill` cannot give the environments of a group equal starts",
                where="algorithm.group_size",
                help="write `group_size: 1`, and an `adv_type` that compares no groups, such as gae",
            )
        task = settings.task or _DEFAULT_TASK
        gymnasium = imported("gymnasium", "maniskill")
        imported("mani_skill.envs", "maniskill")
        self._torch = imported("torch", "maniskill")
        options = self._options
        size = options.image_size
        named: dict[str, Any] = {"robot_uids": options.robot} if options.robot else {}
        try:
            self._env = gymnasium.make(
                task,
                num_envs=settings.num_envs,
                obs_mode="rgb+state" if options.cameras else "state",
                control_mode=options.control_mode,
                reward_mode=options.reward_mode,
                sim_backend=options.sim_backend,
                sensor_configs={"width": size, "height": size},
                # A reset would otherwise build other scenes, which a subset of the environments cannot.
                reconfiguration_freq=0,
                **named,
            )
        except (gymnasium.error.Error, KeyError, NotImplementedError, AssertionError) as error:
            raise ConfigError(f"`{task}` cannot be made: {error}", where="env.task") from error
        except RuntimeError as error:
            # No driver, several environments on the CPU, or an unknown robot.
            raise ConfigError(f"`{task}` cannot be made: {error}", where="env", help=_HELP) from error
        self._base: Any = self._env.unwrapped
        self.control_hz = float(self._base.control_freq)
        self.default_max_episode_steps = _limit(self._env)
        space = self._base.single_action_space
        self._middle, self._half = (space.high + space.low) / 2, (space.high - space.low) / 2
        first = self._read(self._env.reset(seed=0)[0])
        self._spec = EnvSpec(
            first[STATES].shape[1],
            int(np.prod(space.shape)),
            cameras={name: first[image_key(name)].shape[1:] for name in options.cameras},
        )

    @property
    def spec(self) -> EnvSpec:
        """ManiSkill's flat state vector, and one image per camera."""
        return self._spec

    def _begin_rows(self, mask: BoolArray, seeds: IntArray) -> Observation:
        rows = np.flatnonzero(mask)
        # Most tasks draw the starts of a reset with torch, from the first seed, whichever environments are reset.
        seed = [int(seeds[rows[0]]), *seeds[1:].tolist()]
        options = {} if mask.all() else {"env_idx": self._torch.as_tensor(rows, device=self._base.device)}
        observation, _ = self._env.reset(seed=seed, options=options)
        return self._read(observation)

    def _step_all(self, actions: Array) -> tuple[Observation, Transition]:
        scaled = (self._middle + self._half * np.clip(actions, -1, 1)).astype(np.float32)
        # `VectorEnv` enforces the limit, which may exceed ManiSkill's own.
        observation, rewards, terminated, _, info = self._env.step(
            self._torch.as_tensor(scaled, device=self._base.device)
        )
        count = self.num_envs
        success = info.get("success")
        successes = None if success is None else _array(success, np.bool_, count)
        ended = _array(terminated, np.bool_, count)
        return self._read(observation), Transition(_array(rewards, np.float32, count), ended, None, successes)

    def _read(self, observation: Any) -> Observation:
        """Convert observations; ManiSkill keeps the batch dimension even with one environment."""
        if not self._options.cameras:
            return {STATES: _array(observation, np.float32, self.num_envs, -1)}
        seen: Observation = {STATES: _array(observation["state"], np.float32, self.num_envs, -1)}
        for camera in self._options.cameras:
            name = _CAMERAS[camera]
            if name not in observation["sensor_data"]:
                known = ", ".join(f"`{camera_name}`" for camera_name in observation["sensor_data"])
                raise ConfigError(
                    f"`{self.settings.task or _DEFAULT_TASK}` has no camera `{name}`, the source of `{camera}`",
                    where="env.options",
                    help=f"it has {known}",
                )
            seen[image_key(camera)] = _to_numpy(observation["sensor_data"][name]["rgb"])[..., :3].astype(np.uint8)
        return seen

    def close(self) -> None:
        """Close the simulator."""
        if hasattr(self, "_env"):
            self._env.close()


def _limit(env: Any) -> int | None:
    """Return the limit of an episode: from the outermost wrapper that has one, or from the id."""
    while env is not None:
        limit = vars(env).get("_max_episode_steps") or getattr(getattr(env, "spec", None), "max_episode_steps", None)
        if limit is not None:
            return int(limit)
        env = vars(env).get("env")
    return None


def _to_numpy(value: Any) -> Array:
    return value.cpu().numpy() if hasattr(value, "cpu") else np.asarray(value)


def _array(value: Any, kind: Any, *shape: int) -> Array:
    """Convert a tensor, array or number to a new array of a type and shape."""
    return np.array(_to_numpy(value), kind).reshape(shape)

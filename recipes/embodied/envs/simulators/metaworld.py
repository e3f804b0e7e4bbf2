"""Meta-World: a Sawyer arm at a table, 50 tasks, in MuJoCo."""

# Meta-World is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np

from recipes.embodied.config.env_types import MetaworldOptions
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from recipes.embodied.envs.simulators.packages import imported, unknown_task
from rlinf_core import ConfigError

_SETS = ("MT10", "MT25", "MT50", "ML10", "ML25", "ML45")
_STEPS = 500
_WRIST = "gripperPOV"
# The vertical component of a camera's up direction below which the camera counts as upside down.
_UPSIDE_DOWN = -0.3


class MetaworldSimulation(Simulation):
    """One of Meta-World's tasks: `reach-v3`, or `reach-v3:hidden` if the goal is not observed.

    `goal_seed` determines its 50 goals; ML's test split has other goals.
    """

    options_model = MetaworldOptions
    max_episode_steps = _STEPS

    @classmethod
    def tasks(cls, task: str, options: MetaworldOptions) -> list[str]:
        """Return the tasks of MT10, MT25, MT50, ML10, ML25 and ML45; `ML1:NAME` is one task whose goal is hidden."""
        metaworld = imported("metaworld", "metaworld")
        if task in ("MT1", "ML1"):
            raise ConfigError(
                f"`{task}` takes one task of Meta-World, and none is named",
                where="env.task",
                help=f"name it, as in `{task}:reach-v3`",
            )
        known = list(metaworld.ALL_V3_ENVIRONMENTS)
        name = task.removeprefix("MT1:").removeprefix("ML1:")
        hidden = ":hidden" if task.startswith("ML") else ""
        if name in known:
            return [name + hidden]
        if name not in _SETS:
            raise unknown_task("metaworld", task, [*known, *_SETS])
        splits = getattr(metaworld.env_dict, f"{name}_V3")
        return [f"{split}{hidden}" for split in (splits[options.split] if hidden else splits)]

    def __init__(self, task: str, options: MetaworldOptions) -> None:
        metaworld = imported("metaworld", "metaworld")
        name, _, hidden = task.partition(":")
        self._goals = _goals(name, bool(hidden), options.split, options.goal_seed)
        self._options, self._name = options, name
        cameras = {"main": options.camera, "wrist": _WRIST}
        self._cameras = {camera: cameras[camera] for camera in options.cameras}
        size = options.image_size
        self._env = metaworld.ALL_V3_ENVIRONMENTS[name](
            render_mode="rgb_array" if self._cameras else None,
            camera_name=next(iter(self._cameras.values()), None),
            width=size,
            height=size,
        )
        # `VectorEnv` enforces the limit, which may be longer.
        self._env.max_path_length = 2**31
        self.control_hz = round(1 / self._env.dt, 3)
        self._words = name.removesuffix("-v3").replace("-", " ")
        self._observation = np.zeros(0)
        self._expert: Any = None

    @property
    def spec(self) -> EnvSpec:
        """39 states: the current and the previous positions of the gripper and the objects, and the goal."""
        size = self._options.image_size
        return EnvSpec(
            self._options.state_size, 4, cameras=dict.fromkeys(self._cameras, (size, size, 3)), has_instructions=True
        )

    def reset(self, start: Start) -> None:
        """See `Simulation`; the goals are the fixed starts."""
        # Some tasks draw from numpy's global generator.
        np.random.seed(start.seed)
        self._env.set_task(self._goals[start.number % len(self._goals)])
        self._env.seed(start.seed)
        self._observation, _ = self._env.reset()

    def step(self, action: Any) -> Outcome:
        """See `Simulation`; success ends an episode, which Meta-World leaves to its user."""
        self._observation, reward, _, _, info = self._env.step(action)
        success = bool(info["success"])
        return Outcome(float(reward) * self._options.reward_scale, terminated=success, success=success)

    def expert(self) -> Any:
        """See `Simulation`: Meta-World's own policy for the task, also if the goal is hidden."""
        if self._expert is None:
            policies = imported("metaworld.policies", "metaworld")
            self._expert = policies.ENV_POLICY_MAP[self._name]()
        # A hidden goal is 0 in the observation.
        observed = self._observation.copy()
        observed[-3:] = self._env._target_pos
        return np.clip(self._expert.get_action(observed), -1, 1)

    def observe(self) -> Row:
        row: Row = {STATES: self._observation.astype(np.float32), INSTRUCTIONS: self._words}
        for camera, name in self._cameras.items():
            row[image_key(camera)] = self._image(name)
        return row

    def _image(self, name: str) -> Any:
        renderer = self._env.mujoco_renderer
        renderer.camera_id = number = renderer.model.camera(name).id
        image = renderer.render("rgb_array")
        # Meta-World mounts its corner cameras upside down: if the upper edge of an image points down, the image is
        # rotated by half a turn (not mirrored).
        up = self._env.data.cam_xmat[number].reshape(3, 3)[2, 1]
        return np.ascontiguousarray(image[::-1, ::-1] if up < _UPSIDE_DOWN else image)

    def close(self) -> None:
        self._env.close()


@cache
def _goals(name: str, hidden: bool, split: str, seed: int) -> list[Any]:
    """Return the 50 goals of a task; cached, because Meta-World resets an environment for each goal."""
    metaworld = imported("metaworld", "metaworld")
    benchmark = (metaworld.ML1 if hidden else metaworld.MT1)(name, seed=seed)
    return benchmark.test_tasks if split == "test" else benchmark.train_tasks


class MetaworldEnv(SimulatedEnv):
    """`task` is one of Meta-World's (`reach-v3`), a set (`MT10`, `ML10`, ...), or `ML1:reach-v3`."""

    simulation: ClassVar[str] = f"{__name__}:MetaworldSimulation"
    default_task: ClassVar[str] = "reach-v3"

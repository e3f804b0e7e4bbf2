"""Gymnasium-Robotics: FrankaKitchen, Fetch, and its other MuJoCo environments."""

# Gymnasium-Robotics is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from recipes.embodied.envs.simulators.options import GymnasiumRoboticsOptions
from recipes.embodied.envs.simulators.packages import imported
from rlinf_core import ConfigError


class GymnasiumRoboticsSimulation(Simulation):
    """A Gymnasium-Robotics environment by id; its observations are concatenated into one vector.

    Success is `is_success` (Fetch and others), or that no task is left to do (FrankaKitchen).
    """

    options_model = GymnasiumRoboticsOptions

    def __init__(self, task: str, options: GymnasiumRoboticsOptions) -> None:
        package = imported("gymnasium_robotics", "gymnasium_robotics")
        gymnasium = imported("gymnasium", "gymnasium_robotics")
        from recipes.embodied.envs.simulators.gymnasium.gymnasium_env import GymnasiumSimulation

        gymnasium.register_envs(package)
        if "wrist" in options.cameras:
            raise ConfigError(
                "`gymnasium_robotics` has no camera `wrist`", where="env.options", help="`cameras: [main]`"
            )
        self._size = options.image_size if options.cameras else 0
        rendering = {"render_mode": "rgb_array", "width": self._size, "height": self._size} if self._size else {}
        self._plain = GymnasiumSimulation(task, {**rendering, **options.arguments})
        self.max_episode_steps, self.control_hz = self._plain.max_episode_steps, self._plain.control_hz
        self._bare: Any = self._plain.env.unwrapped
        self._kitchen = hasattr(self._bare, "tasks_to_complete")

    @property
    def spec(self) -> EnvSpec:
        """The specification by the environment's spaces, with a camera if one is configured."""
        spec = self._plain.spec
        cameras = {"main": (self._size, self._size, 3)} if self._size else {}
        return EnvSpec(spec.state_size, spec.action_size, spec.num_choices, cameras)

    def reset(self, start: Start) -> None:
        """See `Simulation`."""
        self._plain.reset(start)

    def step(self, action: Any) -> Outcome:
        """See `Simulation`; an episode of Fetch ends with success, which the environment itself does not do."""
        outcome = self._plain.step(action)
        if self._kitchen:
            done = not self._bare.tasks_to_complete
            return outcome._replace(terminated=done, success=done)
        return outcome._replace(terminated=outcome.terminated or bool(outcome.success))

    def native(self, actions: Any) -> Any:
        """See `Simulation`."""
        return self._plain.native(actions)

    def observe(self) -> Row:
        """See `Simulation`."""
        row = self._plain.observe()
        if self._size:
            row[image_key()] = np.ascontiguousarray(self._plain.env.render())
        return row

    def examine(self, observations: Observation) -> None:
        """See `Simulation`."""
        self._plain.examine(observations)

    def close(self) -> None:
        """See `Simulation`."""
        self._plain.close()


class GymnasiumRoboticsEnv(SimulatedEnv):
    """`task` is an id: `FetchReachDense-v4`, `FrankaKitchen-v1`, ..."""

    simulation: ClassVar[str] = f"{__name__}:GymnasiumRoboticsSimulation"
    default_task: ClassVar[str] = "FetchReachDense-v4"

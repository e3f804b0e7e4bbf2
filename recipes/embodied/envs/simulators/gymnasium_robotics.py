"""Gymnasium-Robotics: FrankaKitchen, Fetch, and its other MuJoCo environments."""

# Gymnasium-Robotics is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np

from recipes.embodied.config.env_types import GymnasiumRoboticsOptions
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row
from recipes.embodied.envs.simulators.gymnasium_env import GymnasiumSimulation
from recipes.embodied.envs.simulators.packages import imported
from rlinf_core import ConfigError


class GymnasiumRoboticsSimulation(GymnasiumSimulation):
    """A Gymnasium-Robotics environment by id; its observations are concatenated into one vector.

    Success is `is_success` (Fetch and others), or that no task remains (FrankaKitchen).
    """

    options_model = GymnasiumRoboticsOptions
    together = False

    def __init__(self, task: str, options: GymnasiumRoboticsOptions) -> None:
        gymnasium.register_envs(imported("gymnasium_robotics", "gymnasium_robotics"))
        if "wrist" in options.cameras:
            raise ConfigError(
                "`gymnasium_robotics` has no camera `wrist`", where="env.options", help="`cameras: [main]`"
            )
        self._size = options.image_size if options.cameras else 0
        rendering = {"render_mode": "rgb_array", "width": self._size, "height": self._size} if self._size else {}
        super().__init__(task, {**rendering, **options.arguments})
        self.mapping = None
        self._bare: Any = self.env.unwrapped
        self._kitchen = hasattr(self._bare, "tasks_to_complete")

    @property
    def spec(self) -> EnvSpec:
        """The spec, derived from the environment's spaces, with a camera if one is configured."""
        spec = super().spec
        cameras = {"main": (self._size, self._size, 3)} if self._size else {}
        return EnvSpec(spec.state_size, spec.action_size, spec.num_choices, cameras)

    def checked(self, result: Any) -> Outcome:
        """See `CheapSimulation`; success ends an episode of Fetch, which the environment itself does not do."""
        outcome = super().checked(result)
        if self._kitchen:
            done = not self._bare.tasks_to_complete
            return outcome._replace(terminated=done, success=done)
        return outcome._replace(terminated=outcome.terminated or bool(outcome.success))

    def observe(self) -> Row:
        row = super().observe()
        if self._size:
            row[image_key()] = np.ascontiguousarray(self.env.render())
        return row


class GymnasiumRoboticsEnv(SimulatedEnv):
    """`task` is an id: `FetchReachDense-v4`, `FrankaKitchen-v1`, ..."""

    simulation: ClassVar[str] = f"{__name__}:GymnasiumRoboticsSimulation"
    default_task: ClassVar[str] = "FetchReachDense-v4"

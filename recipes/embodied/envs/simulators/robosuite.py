"""robosuite: manipulation by arms under operational-space control, in MuJoCo."""

# robosuite is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.env_types import RobosuiteOptions
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import STATES, image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from recipes.embodied.envs.simulators.packages import imported, unknown_task

_STEPS = 200
_WRIST = "robot0_eye_in_hand"


class RobosuiteSimulation(Simulation):
    """A task of robosuite for one arm: `Lift`, `Stack`, `Door`, `NutAssemblySquare`, `PickPlaceCan`, ..."""

    options_model = RobosuiteOptions
    max_episode_steps = _STEPS

    def __init__(self, task: str, options: RobosuiteOptions) -> None:
        suite = imported("robosuite", "robosuite")
        known = [name for name in suite.ALL_ENVIRONMENTS if not name.startswith("TwoArm")]
        if task not in known:
            raise unknown_task("robosuite", task, known)
        cameras = {"main": options.camera, "wrist": _WRIST}
        self._cameras = {camera: cameras[camera] for camera in options.cameras}
        self._size = options.image_size
        self._env = suite.make(
            task,
            robots=options.robot,
            has_renderer=False,
            has_offscreen_renderer=bool(self._cameras),
            use_camera_obs=False,
            use_object_obs=True,
            reward_shaping=options.reward_shaping,
            control_freq=options.control_freq,
            ignore_done=True,
            hard_reset=False,
            seed=0,
        )
        self.control_hz = float(options.control_freq)
        self._observed = self._vector(self._env.reset())

    @property
    def spec(self) -> EnvSpec:
        """The states of the arm, then those of the objects."""
        shape = (self._size, self._size, 3)
        return EnvSpec(len(self._observed), self._env.action_dim, cameras=dict.fromkeys(self._cameras, shape))

    def reset(self, start: Start) -> None:
        # The samplers of positions hold this generator, so its state is set rather than the generator replaced.
        self._env.rng.bit_generator.state = np.random.default_rng(start.seed).bit_generator.state
        np.random.seed(start.seed)
        self._observed = self._vector(self._env.reset())

    def step(self, action: Any) -> Outcome:
        """See `Simulation`; success ends an episode."""
        observed, reward, _, _ = self._env.step(action)
        self._observed = self._vector(observed)
        success = bool(self._env._check_success())
        return Outcome(float(reward), terminated=success, success=success)

    def observe(self) -> Row:
        row: Row = {STATES: self._observed}
        for camera, name in self._cameras.items():
            row[image_key(camera)] = upright(self._env.sim, name, self._size)
        return row

    @staticmethod
    def _vector(observed: dict[str, Any]) -> NDArray[np.float32]:
        parts = (observed["robot0_proprio-state"], observed.get("object-state", ()))
        return np.concatenate([np.asarray(part, np.float32) for part in parts])

    def close(self) -> None:
        self._env.close()


def upright(simulator: Any, camera: str, size: int) -> NDArray[np.uint8]:
    """Return an image of a robosuite camera, [size, size, 3]; robosuite renders as OpenGL, bottom row first."""
    image = simulator.render(camera_name=camera, width=size, height=size, depth=False)
    return np.ascontiguousarray(image[::-1])


class RobosuiteEnv(SimulatedEnv):
    """`task` is one of robosuite's single-arm tasks, by default `Lift`."""

    simulation: ClassVar[str] = f"{__name__}:RobosuiteSimulation"
    default_task: ClassVar[str] = "Lift"

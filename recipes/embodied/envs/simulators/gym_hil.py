"""gym-hil: a Franka Panda with a gripper in MuJoCo; the tasks of lerobot's HIL-SERL."""

# gym-hil is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any, ClassVar, Final

import gymnasium
import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.env_types import GymHilOptions
from recipes.embodied.envs.env_spec import EnvSpec, FloatArray
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Start
from recipes.embodied.envs.simulators.gymnasium_env import GymnasiumSimulation
from recipes.embodied.envs.simulators.packages import imported, unknown_task
from recipes.embodied.interventions.intervention import HandMotion
from rlinf_core import ConfigError

_CAMERAS: Final = {"main": "pixels.front", "wrist": "pixels.wrist"}
# Parts of ids whose actions come from a person at this machine.
_BY_HAND: Final = ("Gamepad", "Keyboard", "Viewer")
# Distances of the expert, in meters: far and near heights over the cube, and their largest sideways offsets; then the
# distances at which open fingers close, and at which closed ones hold.
_FAR, _NEAR, _BESIDE, _ABOVE = 0.1, 0.06, 0.04, 0.012
_CLOSES, _HOLDS = 0.015, 0.03
# The least angle of a closed gripper, in rad, and the largest speed of one at rest on the cube, in rad/s.
_CLOSED, _AT_REST = 0.1, 0.05


def pick_cube(away: NDArray[np.float64], angle: float, speed: float) -> tuple[NDArray[np.float64], float]:
    """Return the motion [3] of the hand, in meters, and of the gripper, from -1 (open) to 1, to pick up a cube.

    Args:
        away: vector [3] from the fingertips to the cube, in meters.
        angle: angle of the gripper's driver joint, 0 where it is open, in rad.
        speed: speed of that joint, in rad/s.
    """
    distance = np.linalg.norm(away)
    closed = angle > _CLOSED
    if distance < (_HOLDS if closed else _CLOSES):
        rise = _FAR if closed and abs(speed) < _AT_REST else 0.0
        return np.array([0.0, 0.0, rise]), 1.0
    flat = np.linalg.norm(away[:2])
    height = _FAR if flat > _BESIDE else _NEAR if flat > _ABOVE else 0.0
    return away + np.array([0.0, 0.0, height]), -1.0


class GymHilSimulation(GymnasiumSimulation):
    """A gym-hil environment by id: `gym_hil/PandaPickCube-v0` (4 actions), `gym_hil/PandaPickCubeBase-v0` (7).

    gym-hil reports success as `succeed`.
    """

    options_model = GymHilOptions
    together = False

    def __init__(self, task: str, options: GymHilOptions) -> None:
        imported("gym_hil", "gym_hil")
        known = [name for name in gymnasium.registry if name.startswith("gym_hil/")]
        known = [name for name in known if not any(part in name for part in _BY_HAND)]
        if task not in known:
            raise unknown_task("gym_hil", task, known)
        arguments: dict[str, Any] = dict(options.arguments)
        if "image_obs" in arguments or "render_spec" in arguments:
            raise ConfigError(
                "images of `gym_hil` are configured by `cameras` and `image_size`",
                where="env.options.arguments",
                help="write `cameras: [main, wrist]`, and remove `image_obs` and `render_spec`",
            )
        if options.cameras:
            rendering = imported("gym_hil.mujoco_gym_env", "gym_hil")
            size = options.image_size
            arguments |= {"image_obs": True, "render_spec": rendering.GymRenderingSpec(size, size)}
        if task not in ("gym_hil/PandaPickCubeBase-v0", "gym_hil/PandaArrangeBoxesBase-v0"):
            # The delay lets a person wait for the arm to come to rest; a policy does not need it.
            arguments = {"reset_delay_seconds": 0.0, **arguments}
        self._has_expert = task == GymHilEnv.default_task
        self._arguments = arguments
        self._cameras = options.cameras
        super().__init__(task, arguments)
        self.mapping = None

    @property
    def spec(self) -> EnvSpec:
        """The spec, derived from the environment's spaces, with the configured cameras."""
        spec = super().spec
        cameras = {camera: spec.cameras[_CAMERAS[camera]] for camera in self._cameras}
        return EnvSpec(spec.state_size, spec.action_size, cameras=cameras, low=spec.low, high=spec.high)

    def reset(self, start: Start) -> None:
        """See `Simulation`; gym-hil draws its starts from numpy's global generator, whose state is restored."""
        before = np.random.get_state()
        np.random.seed(start.seed)
        try:
            super().reset(start)
        finally:
            np.random.set_state(before)

    def checked(self, result: Any) -> Outcome:
        return super().checked(result)._replace(success=bool(result[-1]["succeed"]))

    def observe(self) -> Row:
        row = super().observe()
        images = {image_key(camera): row[image_key(_CAMERAS[camera])] for camera in self._cameras}
        return {**{name: value for name, value in row.items() if not name.startswith("images.")}, **images}

    def expert(self) -> Any:
        """See `Simulation`: picks up the cube; only in `PandaPickCube-v0`."""
        if not self._has_expert:
            return None
        wrappers = imported("gym_hil.wrappers.hil_wrappers", "gym_hil")
        steps = self._arguments.get("ee_step_size") or wrappers.DEFAULT_EE_STEP_SIZE
        arm: Any = self.env.unwrapped
        fingers = arm.data.joint("right_driver_joint")
        away = arm.data.sensor("block_pos").data - arm.data.sensor("2f85/pinch_pos").data
        motion, gripper = pick_cube(away, float(fingers.qpos[0]), float(fingers.qvel[0]))
        return np.clip([*(motion / [steps[axis] for axis in "xyz"]), gripper], -1, 1)


class GymHilEnv(SimulatedEnv):
    """Environments of gym-hil. `task` is an id without human control: `gym_hil/PandaPickCube-v0`, ..."""

    simulation: ClassVar[str] = f"{__name__}:GymHilSimulation"
    default_task: ClassVar[str] = "gym_hil/PandaPickCube-v0"

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """See `VectorEnv`: the gripper's number changes its command, so 0 holds it."""
        return motion.action(self.action_size, np.zeros(self.action_size))

"""gym-hil: a Franka Panda with a gripper in MuJoCo, the tasks that lerobot's HIL-SERL is tried with."""

# gym-hil is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from recipes.embodied.envs.simulators.options import GymHilOptions
from recipes.embodied.envs.simulators.packages import imported, unknown_task
from rlinf_core import ConfigError

_CAMERAS: Final = {"main": "pixels.front", "wrist": "pixels.wrist"}
# Parts of ids whose actions come from a person at this machine.
_BY_HAND: Final = ("Gamepad", "Keyboard", "Viewer")


class GymHilSimulation(Simulation):
    """A gym-hil environment by id: `gym_hil/PandaPickCube-v0` (4 actions), `gym_hil/PandaPickCubeBase-v0` (7).

    Success is what gym-hil reports as `succeed`.
    """

    options_model = GymHilOptions

    def __init__(self, task: str, options: GymHilOptions) -> None:
        gymnasium = imported("gymnasium", "gym_hil")
        imported("gym_hil", "gym_hil")
        from recipes.embodied.envs.simulators.gymnasium.gymnasium_env import GymnasiumSimulation

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
            # A person waits for the arm to come to rest; a policy does not.
            arguments = {"reset_delay_seconds": 0.0, **arguments}
        self._cameras = options.cameras
        self._plain = GymnasiumSimulation(task, arguments)
        self.max_episode_steps, self.control_hz = self._plain.max_episode_steps, self._plain.control_hz

    @property
    def spec(self) -> EnvSpec:
        """The specification by the environment's spaces, with the cameras that are configured."""
        spec = self._plain.spec
        cameras = {camera: spec.cameras[_CAMERAS[camera]] for camera in self._cameras}
        return EnvSpec(spec.state_size, spec.action_size, cameras=cameras, low=spec.low, high=spec.high)

    def reset(self, start: Start) -> None:
        """See `Simulation`; gym-hil draws its starts by numpy's global generator, which is as before afterwards."""
        before = np.random.get_state()
        np.random.seed(start.seed)
        try:
            self._plain.reset(start)
        finally:
            np.random.set_state(before)

    def step(self, action: Any) -> Outcome:
        """See `Simulation`."""
        result = self._plain.raw_step(action)
        outcome = self._plain.checked(result)
        return outcome._replace(success=bool(result[-1]["succeed"]))

    def native(self, actions: Any) -> Any:
        """See `Simulation`."""
        return self._plain.native(actions)

    def observe(self) -> Row:
        """See `Simulation`."""
        row = self._plain.observe()
        images = {image_key(camera): row[image_key(_CAMERAS[camera])] for camera in self._cameras}
        return {**{name: value for name, value in row.items() if not name.startswith("images.")}, **images}

    def examine(self, observations: Observation) -> None:
        """See `Simulation`."""
        self._plain.examine(observations)

    def close(self) -> None:
        """See `Simulation`."""
        self._plain.close()


class GymHilEnv(SimulatedEnv):
    """`task` is an id of gym-hil that no person moves: `gym_hil/PandaPickCube-v0`, ..."""

    simulation: ClassVar[str] = f"{__name__}:GymHilSimulation"
    default_task: ClassVar[str] = "gym_hil/PandaPickCube-v0"

"""Any environment of Gymnasium by its id.

For environments as cheap as the classic ones a process of their own costs more than it gives: by default they are
stepped one after another in the worker's own process. For dear ones, give `num_processes`.
"""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, MAIN_CAMERA, STATES, image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from rlinf_core import ConfigError


class GymnasiumSimulation(Simulation):
    """An environment of Gymnasium; `options` are arguments of `gymnasium.make`.

    Success is what an environment reports as `is_success` or `success`.
    """

    def __init__(self, task: str, options: dict[str, Any]) -> None:
        try:
            self.max_episode_steps = registered(task).max_episode_steps
            # The limit is kept by `VectorEnv`: -1 makes no `TimeLimit` of it.
            self.env = gymnasium.make(task, **{"max_episode_steps": -1, "disable_env_checker": True, **options})
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"`{task}` cannot be made: {error}", where="env.task") from error
        self.control_hz = self.env.metadata.get("render_fps")
        self._reads = Reader(task, self.env.observation_space)
        self._writes = Writer(task, self.env.action_space)
        self._current: Any = None

    @property
    def spec(self) -> EnvSpec:
        """From the spaces of the environment."""
        return EnvSpec(
            state_size=self._reads.state_size,
            action_size=self._writes.size,
            num_choices=self._writes.num_choices,
            cameras=self._reads.cameras,
            has_instructions=self._reads.instruction is not None,
        )

    def reset(self, start: Start) -> None:
        """See `Simulation`."""
        self._current, _ = self.env.reset(seed=start.seed)

    def step(self, action: Any) -> Outcome:
        """See `Simulation`."""
        self._current, reward, terminated, truncated, info = self.env.step(action)
        success = info.get("is_success", info.get("success")) if info else None
        return Outcome(float(reward), terminated, truncated, None if success is None else bool(success))

    def observe(self) -> Row:
        """See `Simulation`."""
        return self._reads(self._current)

    def picture(self) -> NDArray[np.uint8] | None:
        """See `Simulation`; there is one with the option `render_mode: rgb_array`."""
        if self.env.render_mode != "rgb_array":
            return None
        try:
            return np.asarray(self.env.render())
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(
                f"the environment cannot be rendered: {error}", where="env.options.render_mode"
            ) from error

    def native(self, actions: NDArray[Any]) -> Any:
        """See `Simulation`."""
        return self._writes(actions)

    def close(self) -> None:
        """See `Simulation`."""
        self.env.close()


class GymnasiumEnv(SimulatedEnv):
    """`task` is the id, `options` are arguments of `gymnasium.make`.

    Observations that are images (uint8, three dimensions) become `images.CAMERA`: of a dictionary the camera has the
    name of its part, a bare image that of the main camera. A text becomes `instructions`; everything else becomes
    `states`, with the parts of a dictionary one after the other, and a choice as a vector of zeros with a one.
    Continuous actions are stretched from -1..1 to the bounds of the environment where those are finite.
    `max_episode_steps` is by default the limit that the id brings.
    """

    simulation: ClassVar[str] = f"{__name__}:GymnasiumSimulation"
    processes: ClassVar[int] = 0

    def __init__(self, settings: EnvSettings) -> None:
        if settings.task is None:
            raise ConfigError("`env_type: gymnasium` needs a task", help="add `task: CartPole-v1`, or another id")
        super().__init__(settings)


def registered(task: str) -> Any:
    """Return Gymnasium's entry of an id; of `module:id` the module, which registers it, is imported first."""
    module, _, name = task.rpartition(":")
    if module:
        import_module(module)
    return gymnasium.spec(name)


class Reader:
    """Observations of a space as rows of ours.

    Args:
        task: for errors.
        space: of the observations.

    Attributes:
        state_size: numbers in `states`.
        cameras: size of the images, by camera.
        instruction: the part that holds the instruction; None: there is none.

    Raises:
        ConfigError: a part of the space is not understood.
    """

    def __init__(self, task: str, space: spaces.Space[Any]) -> None:
        parts = list(space.spaces.items()) if isinstance(space, spaces.Dict) else [("", space)]
        self._nested = isinstance(space, spaces.Dict)
        images = {name: part for name, part in parts if _is_image(part)}
        # The part of a dictionary that holds the images, by the name of the observation.
        self._images = {image_key(name or MAIN_CAMERA): name for name in images}
        self.cameras: dict[str, Any] = {name or MAIN_CAMERA: part.shape for name, part in images.items()}
        self.instruction = next((name for name, part in parts if name and isinstance(part, spaces.Text)), None)
        self._states = [(name, part) for name, part in parts if name not in images and name != self.instruction]
        for name, part in self._states:
            if not _is_vector(part):
                raise ConfigError(
                    f"observations of `{task}` are not understood: {f'`{name}` is ' if name else ''}{part}",
                    help="wrap it in an environment of your own, `env_type: package.module:Class`",
                )
        self.state_size = sum(_length(part) for _, part in self._states)
        self._bare = not self._nested and not images and isinstance(space, spaces.Box)

    def __call__(self, observation: Any) -> Row:
        """Return an observation of the space as a row."""
        if self._bare:
            return {STATES: np.array(observation, np.float32).reshape(-1)}
        row: Row = {}
        for key, name in self._images.items():
            row[key] = np.array(observation[name] if self._nested else observation)
        if self.instruction is not None:
            row[INSTRUCTIONS] = observation[self.instruction]
        if self._states:
            row[STATES] = np.concatenate(
                [_vector(space, observation[name] if self._nested else observation) for name, space in self._states]
            )
        return row


class Writer:
    """Actions of a batch, as one environment each wants them.

    Raises:
        ConfigError: the space of actions is not understood.
    """

    def __init__(self, task: str, space: spaces.Space[Any]) -> None:
        self.num_choices: int | None = None
        if isinstance(space, spaces.Discrete):
            self.size, self.num_choices = 1, int(space.n)
            self._first = int(space.start)
        elif isinstance(space, spaces.Box):
            self.size = _length(space)
            self._shape = space.shape
            finite = np.isfinite(space.low) & np.isfinite(space.high)
            low, high = np.where(finite, space.low, -1), np.where(finite, space.high, 1)
            self._middle, self._half = ((high + low) / 2).reshape(-1), ((high - low) / 2).reshape(-1)
            self._finite, self._type = finite.reshape(-1), space.dtype
        else:
            raise ConfigError(
                f"actions of `{task}` are not understood: {space}",
                help="wrap it in an environment of your own, `env_type: package.module:Class`",
            )

    def __call__(self, actions: NDArray[Any]) -> Any:
        """Return actions [n, A] as `step` takes them."""
        if self.num_choices is not None:
            return (actions[:, 0] + self._first).tolist()
        bounded = np.where(self._finite, np.clip(actions, -1, 1), actions)
        return (self._middle + self._half * bounded).astype(self._type).reshape(-1, *self._shape)


def _is_image(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def _is_vector(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return all(_is_vector(part) for part in space.spaces.values())
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary)


def _length(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_length(part) for part in space.spaces.values())
    return int(space.n) if isinstance(space, spaces.Discrete) else int(np.prod(space.shape or (1,)))


def _vector(space: spaces.Space[Any], value: Any) -> FloatArray:
    if isinstance(space, spaces.Dict):
        return np.concatenate([_vector(part, value[name]) for name, part in space.spaces.items()])
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[int(value) - int(space.start)]
    return np.asarray(value, np.float32).reshape(-1)

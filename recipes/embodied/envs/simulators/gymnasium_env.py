"""Gymnasium environments by id, Gymnasium-Robotics among them, and the checks of what their `reset` and `step` return.

By default environments are stepped one after another in the worker's own process, since for cheap ones, such as the
classic ones, a separate process costs more than it saves. For expensive environments, set `num_processes`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar, Final, cast

import gymnasium
import numpy as np
from gymnasium.envs import registration
from numpy.typing import NDArray

from recipes.embodied.config.env_types import GymnasiumRoboticsOptions
from recipes.embodied.envs.checks import is_rate
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import CheapSimulation, Columns, Outcome, Row, Start
from recipes.embodied.envs.simulators.gymnasium_spaces import OWN, Reader, Writer, spec_of
from recipes.embodied.envs.simulators.packages import imported
from recipes.training.arrays import Array
from rlinf_core import ConfigError

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false


_OLD_STEP: Final = 4
_STEP: Final = 5
_RESET: Final = 2
SUCCESS: Final = ("is_success", "success")
# The types that most environments return.
_TUPLE: Final = frozenset({tuple})
_NUMBERS: Final[frozenset[type]] = frozenset({float, np.float32, np.float64})
_BOOLEANS: Final[frozenset[type]] = frozenset({bool, np.bool_})
_DICTIONARY: Final[frozenset[type]] = frozenset({dict})


def check_seeded(task: str, env: gymnasium.Env[Any, Any]) -> None:
    """Refuse a `reset` that takes no seed.

    Raises:
        ConfigError: it takes none.
    """
    # Gymnasium's wrappers take a seed, and pass it on to whatever they wrap.
    while isinstance(env, gymnasium.Wrapper) and type(env).reset.__module__.startswith("gymnasium."):
        env = env.env
    try:
        signature(env.reset).bind(seed=0)
    except TypeError:
        raise ConfigError(
            f"`reset` of `{task}` takes no `seed`",
            where="env.task",
            help="write `def reset(self, *, seed=None, options=None)`, and call `super().reset(seed=seed)`",
        ) from None


def checked_reset(task: str, result: Any) -> Any:
    """Return the observation from a result of `reset`.

    Raises:
        ConfigError: the result is not a pair of observation and information.
    """
    if isinstance(result, tuple) and len(result) == _RESET and isinstance(result[1], (dict, Mapping)):
        return result[0]
    raise ConfigError(
        f"`reset` of `{task}` does not return an observation and a dictionary of information",
        where="env.task",
        help="environments of the old Gym return the observation alone: wrap it in `shimmy.GymV21CompatibilityV0`",
    )


def checked_step(task: str, result: Any) -> tuple[Any, Outcome]:
    """Return the observation and the outcome from a result of `step`.

    Raises:
        ConfigError: values are missing or have a wrong type.
    """
    if type(result) is tuple and len(result) == _STEP:
        observation, reward, terminated, truncated, info = result
        # A fast path for the usual types.
        is_plain = type(reward) is float and type(terminated) is bool and type(truncated) is bool
        if is_plain and type(info) is dict and not info:
            return observation, Outcome(reward, terminated, truncated)
    observation, reward, terminated, truncated, info = _five(task, result)
    success = _success(info)
    return observation, Outcome(
        _number(task, reward),
        _truth(task, "terminated", terminated),
        _truth(task, "truncated", truncated),
        None if success is None else _truth(task, "success", success),
    )


def checked_together(results: Sequence[Any]) -> tuple[list[Any], Columns] | None:
    """Return the observations of some steps and their outcomes, much faster than `checked_step` for each.

    Returns:
        None if a step requires `checked_step`, because it reports success or is invalid.
    """
    if not _all_of(_TUPLE, results):
        return None
    try:
        observations, rewards, terminations, truncations, infos = zip(*results, strict=True)
    except ValueError:  # not five values each
        return None
    if not (
        _all_of(_NUMBERS, rewards)
        and _all_of(_BOOLEANS, terminations)
        and _all_of(_BOOLEANS, truncations)
        and _all_of(_DICTIONARY, infos)
    ):
        return None
    if any(infos) and any(name in info for info in infos for name in SUCCESS):
        return None
    return [*observations], (rewards, terminations, truncations)


def _all_of(types: frozenset[type], values: Sequence[Any]) -> bool:
    """Return whether all values are exactly of some types, subclasses excluded."""
    return set(map(type, values)) <= types


def _success(info: Any) -> Any:
    """Return the reported success; None if nothing is reported."""
    if type(info) is dict and not info:
        return None
    return next((info[name] for name in SUCCESS if name in info), None) if isinstance(info, Mapping) else None


def _five(task: str, result: Any) -> tuple[Any, ...]:
    if not isinstance(result, tuple) or len(result) != _STEP:
        count = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        is_old = isinstance(result, tuple) and len(result) == _OLD_STEP
        raise ConfigError(
            f"`step` of `{task}` returns {count}, but Gymnasium's returns 5: observation, reward, terminated,"
            " truncated, info",
            where="env.task",
            help="4 values are the old Gym's: wrap it in `shimmy.GymV21CompatibilityV0`" if is_old else OWN,
        )
    return result


def _number(task: str, reward: Any) -> float:
    if type(reward) is float:  # a fast path for the usual type
        return reward
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "fiub":
        said = f"an array of the shape {list(array.shape)}" if array.size != 1 else reprlib.repr(reward)
        raise ConfigError(f"the reward of `{task}` is {said}", where="env.task", help="return one number")
    return float(array.reshape(()))


def _truth(task: str, name: str, value: Any) -> bool:
    if value is True or value is False or type(value) is np.bool_:  # a fast path for the usual types
        return bool(value)
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "fiub" and array.reshape(()) in (0, 1):
        return bool(array.reshape(()))
    raise ConfigError(f"`{name}` of `{task}` is {reprlib.repr(value)}", where="env.task", help="return true or false")


# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false


# Extras of Gymnasium, by the words in the errors about their missing packages.
_EXTRAS: Final = {
    "mujoco": "mujoco",
    "imageio": "mujoco",
    "box2d": "box2d",
    "swig": "box2d",
    "pygame": "classic-control",
    "jax": "jax",
    "ale_py": "atari",
    "moviepy": "other",
    "cv2": "other",
}


class GymnasiumSimulation(CheapSimulation):
    """An environment of Gymnasium, by its id or its class; `options` are arguments of `gymnasium.make`.

    An environment reports success as `is_success` or `success`.
    """

    def __init__(self, task: str, options: dict[str, Any]) -> None:
        try:
            entry = copy(registered(task))
            self.max_episode_steps = entry.max_episode_steps
            # Here `reset` always precedes `step`, so that the order need not be checked.
            entry.order_enforce = False
            # `VectorEnv` enforces the limit; -1 prevents a `TimeLimit` wrapper.
            self.env = gymnasium.make(entry, **{"max_episode_steps": -1, "disable_env_checker": True, **options})
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise cannot_be_made(task, error) from error
        check_seeded(task, self.env)
        self._task = task
        self.raw_step = self.env.step
        rate = self.env.metadata.get("render_fps")  # for viewers: it may be anything
        self.control_hz = np.asarray(rate).item() if is_rate(rate) else None
        self._reads = Reader(task, self.env.observation_space)
        self._acts = self.env.action_space
        self._writes = Writer(task, self._acts)
        self.mapping = f"{self._reads.mapping}; {self._writes.mapping}"

    @property
    def spec(self) -> EnvSpec:
        """The spec, derived from the environment's spaces."""
        return spec_of(self._reads, self._writes)

    def reset(self, start: Start) -> None:
        self.current = checked_reset(self._task, self.env.reset(seed=start.seed))
        space = self.env.action_space
        if space is not self._acts and space != self._acts:
            raise ConfigError(
                f"`reset` of `{self._task}` changes its action space from {self._acts} to {space}",
                where="env.task",
                help="set `action_space` in the constructor, and leave it as it is",
            )

    def checked(self, result: Any) -> Outcome:
        self.current, outcome = checked_step(self._task, result)
        return outcome

    @classmethod
    def check_together(cls, results: Sequence[Any]) -> tuple[list[Any], Columns] | None:
        return checked_together(results)

    def stacked(self, observations: Sequence[Any]) -> Observation | None:
        return self._reads.together(observations)

    def observe(self) -> Row:
        return self._reads(self.current)

    def examine(self, observations: Observation) -> None:
        """See `Simulation`: logs the first number out of its bounds."""
        self._reads.check_bounds(observations)

    def picture(self) -> NDArray[np.uint8] | None:
        """See `Simulation`; requires the option `render_mode: rgb_array`."""
        if self.env.render_mode != "rgb_array":
            return None
        try:
            view = np.asarray(self.env.render())
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(
                f"the environment cannot be rendered: {error}", where="env.options.render_mode"
            ) from error
        if view.dtype != np.uint8 or view.ndim != 3 or view.shape[2] != 3:
            said = f"{view.dtype} {list(view.shape)}"
            raise ConfigError(
                f"`render` of `{self._task}` returns {said}; `rgb_array` is uint8 [H, W, 3]",
                where="env.options.render_mode",
                help="correct `render`, or remove `render_mode`",
            )
        return view

    def native(self, actions: Array) -> Any:
        return self._writes(actions)

    def close(self) -> None:
        self.env.close()


class GymnasiumEnv(SimulatedEnv):
    """`task` is the id, or the class as `package.module:Class`; `options` are arguments of `gymnasium.make`.

    Observations that are images (uint8 [H, W, 3], [3, H, W], or grey) become `images.CAMERA`: a camera is named after
    its part of a dictionary, `arm.wrist` if nested; a bare image is the main camera. A text becomes `instructions`;
    everything else becomes `states`: the parts of a dictionary or tuple are concatenated, and discrete values are
    one-hot. Continuous actions are scaled from -1..1 to the environment's bounds if both exist; integers each get an
    equal part of -1..1. `max_episode_steps` is by default the limit of the id; a class has none.
    """

    simulation: ClassVar[str] = f"{__name__}:GymnasiumSimulation"
    processes: ClassVar[int] = 0

    def __init__(self, settings: EnvSettings) -> None:
        if settings.task is None and not self.default_task:
            raise ConfigError("`env_type: gymnasium` needs a task", help="add `task: CartPole-v1`, or another id")
        if settings.task is not None and self.default_task:
            raise ConfigError(
                f"`env_type: {self.default_task}` is a class of Gymnasium, which has no `task: {settings.task}`",
                where="env.task",
                help="remove `task`; arguments of the constructor are `options`",
            )
        super().__init__(settings)


def env_of_class(target: str) -> type[GymnasiumEnv]:
    """Return the environments of a subclass of `gymnasium.Env`, named as `package.module:Class`."""
    return type(GymnasiumEnv.__name__, (GymnasiumEnv,), {"default_task": target})


def registered(task: str) -> Any:
    """Return the registry entry of an id, or one made for a class or function of a module.

    Args:
        task: the id; `module:id`, whose module is imported first to register it; or `module:Class`.
    """
    module, _, name = task.rpartition(":")
    made: Any = getattr(import_module(module), name, None) if module else None
    if name not in gymnasium.registry and callable(made):
        return registration.EnvSpec(name, entry_point=cast("Any", made))
    return gymnasium.spec(name)


def cannot_be_made(task: str, error: Exception) -> ConfigError:
    """Return the error about an environment whose constructor failed, with the packages that it needs."""
    text = str(error)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    extra = next((extra for word, extra in _EXTRAS.items() if word in text.lower()), None)
    remedy = None
    own = task.rpartition(":")[0]
    if missing and own:
        # For custom code: the package index may have an unrelated package of the same name.
        named = f"`PYTHONPATH=FOLDER rlinf ...` names the folder that holds `{missing}`"
        if own == missing or own.startswith(f"{missing}."):
            return ConfigError(
                f"`{task}` cannot be made: there is no module `{missing}` here or on PYTHONPATH",
                where="env.task",
                help=f"{named}, or install your package that has it",
            )
        remedy = f"`{own}` imports it: {named}, or install it in this interpreter"
    elif "have been moved" in text:
        remedy = "write a newer version of its id, as in `Hopper-v5`"
    elif "`mujoco<3`" in text:
        remedy = "write a newer version of its id, or run `pip install 'mujoco<3'` in a virtual environment of its own"
    elif "shimmy" in text:
        remedy = (
            "run `pip install 'shimmy[gym-v26]' 'numpy<2'` in a virtual environment of its own, and write"
            " `task: shimmy:GymV26Environment-v0` with `options: {env_id: CartPole-v1}`"
        )
    elif extra is not None:
        remedy = f"run `pip install 'gymnasium[{extra}]'`"
    elif missing:
        remedy = f"run `pip install {missing}`, or follow the environment's documentation"
    return ConfigError(f"`{task}` cannot be made: {error}", where="env.task", help=remedy)


# Gymnasium-Robotics is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false


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

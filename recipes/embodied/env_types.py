"""The table of environments by `env_type`: the one place that names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

_FOLDER: Final = "recipes.embodied.envs"
_SIMULATORS: Final = f"{_FOLDER}.simulators"


class EnvType(NamedTuple):
    """An environment that comes with the recipe.

    Attributes:
        target: the subclass of `VectorEnv`, as `package.module:Class`.
        tasks: values of `task`, the default first; empty where `task` is an id of the simulator's own.
        module: what has to be installed besides; None: nothing.
        robot: type of the hardware that each env worker owns one of; None: a simulator.
        observes: names of its observations; None where that depends on the task.
        max_episode_steps: its limit; None where that depends on the task.
        options: the pydantic model of its options, as `package.module:Class`; None: it has none, or any. With a model
            it is a simulator that `rlinf env setup` makes an interpreter for.
        task: the default, where `tasks` is empty and there is one.
    """

    target: str
    tasks: tuple[str, ...] = ()
    module: str | None = None
    robot: str | None = None
    observes: tuple[str, ...] | None = ("states",)
    max_episode_steps: int | None = 50
    options: str | None = None
    task: str | None = None


def _simulator(module: str, name: str, task: str) -> EnvType:
    """Return the entry of a simulator that has an interpreter of its own."""
    options = f"{_SIMULATORS}.options:{name.removesuffix('Env')}Options"
    return EnvType(
        f"{_SIMULATORS}.{module}:{name}", (), module, observes=None, max_episode_steps=None, options=options, task=task
    )


ENV_TYPES: Final[Mapping[str, EnvType]] = {
    "franka_kin": EnvType(f"{_FOLDER}.franka_kin:FrankaKinEnv", ("pick", "reach")),
    "franka_mujoco": EnvType(f"{_FOLDER}.franka_mujoco:FrankaMujocoEnv", ("reach", "push", "pick", "place"), "mujoco"),
    "franka_vision": EnvType(
        f"{_FOLDER}.franka_vision:FrankaVisionEnv", ("touch",), observes=("states", "images.main", "instructions")
    ),
    "franka_robot": EnvType(f"{_FOLDER}.franka_robot:FrankaRobotEnv", ("reach",), robot="Franka"),
    "gymnasium": EnvType(
        f"{_FOLDER}.gymnasium_env:GymnasiumEnv", module="gymnasium", observes=None, max_episode_steps=None
    ),
    "libero": _simulator("libero", "LiberoEnv", "libero_spatial"),
    "metaworld": _simulator("metaworld", "MetaworldEnv", "reach-v3"),
    "robosuite": _simulator("robosuite", "RobosuiteEnv", "Lift"),
    "gymnasium_robotics": _simulator("gymnasium_robotics", "GymnasiumRoboticsEnv", "FetchReachDense-v4"),
    "panda_gym": EnvType(
        f"{_FOLDER}.panda_gym_env:PandaGymEnv", module="panda_gym", observes=None, max_episode_steps=None
    ),
}
DEFAULT_ENV_TYPE: Final = "franka_kin"
# Names that users of this field know and for which there is no adapter, with how to install the simulator.
NO_ADAPTER: Final[Mapping[str, str]] = {"maniskill": "pip install mani_skill"}


def is_robot(env_type: str) -> bool:
    """Return whether env workers of this type drive hardware."""
    found = ENV_TYPES.get(env_type)
    return found is not None and found.robot is not None


def has_ids(env_type: str) -> bool:
    """Return whether `task` has to be an id of Gymnasium's, of which there are too many to list."""
    found = ENV_TYPES.get(env_type)
    return found is not None and not found.tasks and found.task is None


def is_simulator(env_type: str) -> bool:
    """Return whether `rlinf env setup` makes an interpreter for this type."""
    found = ENV_TYPES.get(env_type)
    return found is not None and found.options is not None


def no_adapter(env_type: str) -> tuple[str, str]:
    """Return the message and the help for a name in `NO_ADAPTER`."""
    return (
        f"`env_type: {env_type}` has no adapter in this version",
        f"`{NO_ADAPTER[env_type]}` and wrap it in a subclass of `VectorEnv` (docs/environments.md shows how), then"
        " write `env_type: package.module:Class`",
    )

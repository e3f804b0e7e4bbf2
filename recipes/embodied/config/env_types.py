"""The table of environments by `env_type`, the only place that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

_FOLDER: Final = "recipes.embodied.envs"
_SIMULATORS: Final = f"{_FOLDER}.simulators"
_NO_OPTIONS: Final = "rlinf_core.config.model:NoOptions"
_ROBOT_OPTIONS: Final = "recipes.embodied.config.camera_config:RobotEnvOptions"
_FRANKA_OPTIONS: Final = "recipes.embodied.config.camera_config:FrankaRobotOptions"
# The hardware type of environments that move a robot by its own `driver`, whatever type the robot is declared as.
DRIVEN: Final = "Robot"


# Drivers of this package, by the class of the robot's entry.
_SHIPPED_DRIVERS: Final[Mapping[str, str]] = {"SO101": f"{_FOLDER}.real.so101:SO101Driver"}


def driver_of(robot: object) -> str | None:
    """Return a robot's driver as `package.module:Class`: the one that its entry names, else ours; None if neither
    exists.
    """
    named: str | None = getattr(robot, "driver", None)
    return named or _SHIPPED_DRIVERS.get(type(robot).__name__)


class EnvType(NamedTuple):
    """A built-in environment.

    Attributes:
        target: the subclass of `VectorEnv`, as `package.module:Class`.
        tasks: values of `task`, the default first; empty if `task` is an id of the simulator, or free text.
        module: the module that it requires; None: none.
        robot: type of the hardware, one of which each env worker owns; None: a simulator.
        observes: names of its observations, without a robot's cameras; None if they depend on the task.
        max_episode_steps: its limit; None if it depends on the task.
        options: the model of its options, as `package.module:Class`; None: any.
        task: the default task of a simulator package, whose tasks are not listed here; None for other environments.
        processes: default number of simulator processes of a worker; None: always stepped in the worker's own process.
        install: the package for pip; None: named as the module, or installed by `rlinf venv setup`.
        action_size, control_hz: the numbers in an action and the actions per second, if equal for all tasks,
            for checks that do not create the environment; else 0 and None.
        stored_sets: task sets whose starts are states stored by their authors, checked by `rlinf venv check`; empty:
            the simulator draws its starts.
    """

    target: str
    tasks: tuple[str, ...] = ()
    module: str | None = None
    robot: str | None = None
    observes: tuple[str, ...] | None = ("states",)
    max_episode_steps: int | None = 50
    options: str | None = None
    task: str | None = None
    install: str | None = None
    processes: int | None = None
    action_size: int = 0
    control_hz: float | None = None
    stored_sets: tuple[str, ...] = ()


_BY_ID: Final = EnvType("", observes=None, max_episode_steps=None)


def _simulator(module: str, name: str, task: str, package: str | None = None) -> EnvType:
    """Return the entry of a simulator; `package` is its module if named differently from our adapter."""
    options = f"{_SIMULATORS}.options:{name.removesuffix('Env')}Options"
    target, package = f"{_SIMULATORS}.{module}:{name}", package or module
    return _BY_ID._replace(target=target, module=package, options=options, task=task, processes=1)


ENV_TYPES: Final[Mapping[str, EnvType]] = {
    "franka_kin": EnvType(f"{_FOLDER}.franka.franka_kin:FrankaKinEnv", ("pick", "reach"), options=_NO_OPTIONS),
    "franka_mujoco": EnvType(
        f"{_FOLDER}.franka.franka_mujoco:FrankaMujocoEnv",
        ("reach", "push", "pick", "place"),
        "mujoco",
        options=_NO_OPTIONS,
    ),
    "franka_vision": EnvType(
        f"{_FOLDER}.franka.franka_vision:FrankaVisionEnv",
        ("touch",),
        observes=("states", "images.main", "instructions"),
        options=f"{_SIMULATORS}.options:FrankaVisionOptions",
    ),
    "franka_robot": EnvType(
        f"{_FOLDER}.real.franka_robot:FrankaRobotEnv",
        ("reach",),
        robot="Franka",
        options=_FRANKA_OPTIONS,
        action_size=7,
    ),
    "robot": EnvType(
        f"{_FOLDER}.real.driver_env:DrivenRobotEnv",
        robot=DRIVEN,
        observes=None,
        max_episode_steps=None,
        options=_ROBOT_OPTIONS,
    ),
    "gymnasium": _BY_ID._replace(
        target=f"{_SIMULATORS}.gymnasium.gymnasium_env:GymnasiumEnv", module="gymnasium", processes=0
    ),
    "envpool": _BY_ID._replace(target=f"{_SIMULATORS}.envpool_env:EnvpoolEnv", module="envpool"),
    "gym_hil": _simulator("gym_hil", "GymHilEnv", "gym_hil/PandaPickCube-v0")._replace(
        install="gym-hil", control_hz=10.0
    ),
    "libero": _simulator("libero", "LiberoEnv", "libero_spatial")._replace(
        action_size=7,
        control_hz=20.0,
        stored_sets=("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"),
    ),
    "metaworld": _simulator("metaworld", "MetaworldEnv", "reach-v3")._replace(action_size=4, control_hz=80.0),
    "robosuite": _simulator("robosuite", "RobosuiteEnv", "Lift"),
    "gymnasium_robotics": _simulator(
        "gymnasium.gymnasium_robotics", "GymnasiumRoboticsEnv", "FetchReachDense-v4", "gymnasium_robotics"
    ),
    "maniskill": _simulator("maniskill", "ManiskillEnv", "PickCube-v1", "mani_skill")._replace(
        install="mani_skill torch", processes=None
    ),
    "panda_gym": _BY_ID._replace(target=f"{_SIMULATORS}.panda_gym_env:PandaGymEnv", module="panda_gym", processes=0),
}
DEFAULT_ENV_TYPE: Final = "franka_kin"
GYMNASIUM: Final = "gymnasium"
# Ids of Gymnasium end in a version, as `my_package:Lift-v0`; ids without a version are set as `task`.
ID_FORM: Final = r"([A-Za-z_][\w.]*:)?([\w-]+/)?[\w.-]+-v\d+"
# Former types, each with advice on what to write instead.
FORMER_ENV_TYPES: Final[Mapping[str, str]] = {
    "gymnasium_vector": "write `env_type: gymnasium`, which steps the same ids, without `vectorization_mode`",
}


def is_robot(env_type: str) -> bool:
    """Return whether env workers of this type drive hardware."""
    known = ENV_TYPES.get(env_type)
    return known is not None and known.robot is not None


def has_ids(env_type: str) -> bool:
    """Return whether `task` must be a Gymnasium id, of which there are too many to list."""
    known = ENV_TYPES.get(env_type)
    return known is not None and not known.tasks and known.task is None and known.robot is None


def share_task(task: str, one: str, other: str) -> bool:
    """Return whether a task exists in both environments."""
    known = ENV_TYPES.get(other)
    return (known is not None and task in known.tasks) or (has_ids(one) and has_ids(other))


def is_simulator(name: str) -> bool:
    """Return whether this type is a simulator in its own package, with a model of its options."""
    known = ENV_TYPES.get(name)
    return known is not None and known.task is not None


def has_setup(name: str) -> bool:
    """Return whether `rlinf venv setup` makes an interpreter for this type."""
    return is_simulator(name) and ENV_TYPES[name].install is None


def how_to_install(name: str) -> str | None:
    """Return advice on getting an interpreter with a simulator; None if its module is installed as any other."""
    if has_setup(name):
        return (
            f"run `rlinf venv setup {name}`: it makes an interpreter with the package and prints the lines that use it"
        )
    install = ENV_TYPES[name].install if name in ENV_TYPES else None
    return install and f"run `pip install {install}` in a separate interpreter, and name that in `env_configs`"

"""The table of environments by `env_type`, the only place that lists them, and the options of simulators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, Field

from recipes.embodied.config.camera_config import FrankaRobotOptions, RobotEnvOptions
from rlinf_core import ConfigModel
from rlinf_core.config.model import NoOptions
from rlinf_core.scalars import Bool, Data, Float, Int, Text

ImageSize = Annotated[Int, Field(ge=8, le=2048)]
Camera = Literal["main", "wrist"]


class SharedStarts(NamedTuple):
    """Starts that training and evaluation share.

    Attributes:
        what: the kind of starts.
        remedy: how to give evaluation other starts.
    """

    what: str
    remedy: str


class FrankaVisionOptions(ConfigModel):
    """Options of `franka_vision`."""

    image_size: Annotated[Int, Field(ge=16, le=512)] = Field(
        default=32, description="Height and width of the images, pixels."
    )
    points: Annotated[Int, Field(ge=1, le=4)] = Field(default=2, description="How many points there are.")


class SimulatorOptions(ConfigModel):
    """Options of every simulator that renders."""

    cameras: tuple[Camera, ...] = Field(
        default=(),
        description="The cameras whose images are observed; none: states alone, which is many times as fast.",
    )
    image_size: ImageSize = Field(default=128, description="Height and width of the images, pixels.")

    @property
    def state_size(self) -> int:
        """The number of values in the observation `states`; 0: only the simulator knows."""
        return 0

    def shared_starts(self, evaluation: Any) -> SharedStarts | None:
        """Return the starts that training with these options shares with evaluation, if a task's starts are fixed.

        By default starts depend on the seed, and are not shared.
        """
        return None


class MetaworldOptions(SimulatorOptions):
    """Options of `metaworld`."""

    camera: Text = Field(
        default="corner2", description="MuJoCo's name of the camera that is `main`; that of the hand is `wrist`."
    )
    split: Literal["train", "test"] = Field(
        default="train", description="Which tasks of an ML set, and which of their goals."
    )
    goal_seed: Int = Field(default=0, description="Seed of the 50 goals of each task.")
    reward_scale: Annotated[Float, Field(gt=0)] = Field(
        default=1.0, description="What rewards are multiplied by; Meta-World's go up to 10 for each step."
    )

    @property
    def state_size(self) -> int:
        return 39

    def shared_starts(self, evaluation: Any) -> SharedStarts | None:
        """See `SimulatorOptions`: a task has 50 goals for each `goal_seed`."""
        if (self.goal_seed, self.split) != (evaluation.goal_seed, evaluation.split):
            return None
        return SharedStarts(
            f"Meta-World's 50 goals of `goal_seed: {self.goal_seed}` are those of training",
            f"write `env.eval.options.goal_seed: {self.goal_seed + 1}`",
        )


class LiberoOptions(SimulatorOptions):
    """Options of `libero`."""

    cameras: tuple[Camera, ...] = ("main", "wrist")
    observe_objects: Bool = Field(
        default=False, description="Append the poses of the objects to `states`, for policies without images."
    )
    initial_states: tuple[Int, Int] | None = Field(
        default=None, description="First and last of the task's fixed initial states that episodes begin in; null: all."
    )
    mirrored: Bool = Field(
        default=False,
        description="Images with left and right exchanged: checkpoints of OpenVLA and openpi learned from such, because"
        " their data turned by half a turn what LIBERO renders bottom row first.",
    )
    settle_steps: Annotated[Int, Field(ge=0)] = Field(
        default=10, description="Steps without a motion at the beginning of an episode, in which objects come to rest."
    )

    @property
    def state_size(self) -> int:
        """See `SimulatorOptions`: the hand and the gripper; the number of objects depends on the task."""
        return 0 if self.observe_objects else 8

    def shared_starts(self, evaluation: Any) -> SharedStarts | None:
        """See `SimulatorOptions`: each task has a list of initial states."""
        (first, last), (begin, end) = self.initial_states or (0, None), evaluation.initial_states or (0, None)
        if (last is not None and begin > last) or (end is not None and first > end):
            return None
        return SharedStarts(
            "LIBERO's initial states of evaluation are among those of training",
            "write `env.train.options.initial_states: [0, 39]` and `env.eval.options.initial_states: [40, 49]`",
        )


class RobosuiteOptions(SimulatorOptions):
    """Options of `robosuite`."""

    robot: Text = Field(default="Panda", description="One of robosuite's robots.")
    camera: Text = Field(
        default="agentview", description="Robosuite's name of the camera that is `main`; that of the hand is `wrist`."
    )
    reward_shaping: Bool = Field(default=True, description="Rewards on the way, and not only for success.")
    control_freq: Annotated[Int, Field(ge=1, le=200)] = Field(default=20, description="Actions a second.")


class GymnasiumRoboticsOptions(SimulatorOptions):
    """Options of `gymnasium_robotics`."""

    cameras: tuple[Camera, ...] = Field(
        default=(),
        description="The cameras whose images are observed: `main` is that of the environment's own renderer; there is"
        " no other.",
    )

    arguments: dict[str, Data] = Field(
        default_factory=dict, description="The arguments of `gymnasium.make`, as in `{tasks_to_complete: [microwave]}`."
    )


class GymHilOptions(SimulatorOptions):
    """Options of `gym_hil`."""

    cameras: tuple[Camera, ...] = Field(
        default=(), description="The cameras whose images are observed; `main` is the one at the front."
    )

    arguments: dict[str, Data] = Field(
        default_factory=dict,
        description="Further arguments of the environment, as in `{reward_type: dense, random_block_position: true}`.",
    )


class ManiskillOptions(SimulatorOptions):
    """Options of `maniskill`."""

    control_mode: Text = Field(default="pd_ee_delta_pose", description="The control mode of the robot's controllers.")
    reward_mode: Literal["normalized_dense", "dense", "sparse"] = Field(
        default="normalized_dense", description="The reward mode of the task."
    )
    sim_backend: Literal["auto", "physx_cpu", "physx_cuda"] = Field(
        default="auto",
        description="Where physics runs: `physx_cuda` steps all environments at once on the accelerator, `physx_cpu`"
        " has one environment.",
    )
    robot: Text | None = Field(default=None, description="The robot, where a task has several; null: the task's own.")


_FOLDER: Final = "recipes.embodied.envs"
_SIMULATORS: Final = f"{_FOLDER}.simulators"
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
        options: the model of its options; None: any.
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
    options: type[BaseModel] | None = None
    task: str | None = None
    install: str | None = None
    processes: int | None = None
    action_size: int = 0
    control_hz: float | None = None
    stored_sets: tuple[str, ...] = ()


_BY_ID: Final = EnvType("", observes=None, max_episode_steps=None)


def _simulator(
    module: str, name: str, task: str, options: type[SimulatorOptions], package: str | None = None
) -> EnvType:
    """Return the entry of a simulator; `package` is its module if named differently from our adapter."""
    target, package = f"{_SIMULATORS}.{module}:{name}", package or module
    return _BY_ID._replace(target=target, module=package, options=options, task=task, processes=1)


ENV_TYPES: Final[Mapping[str, EnvType]] = {
    "franka_kin": EnvType(f"{_FOLDER}.franka.franka_kin:FrankaKinEnv", ("pick", "reach"), options=NoOptions),
    "franka_mujoco": EnvType(
        f"{_FOLDER}.franka.franka_mujoco:FrankaMujocoEnv",
        ("reach", "push", "pick", "place"),
        "mujoco",
        options=NoOptions,
    ),
    "franka_vision": EnvType(
        f"{_FOLDER}.franka.franka_kin:FrankaVisionEnv",
        ("touch",),
        observes=("states", "images.main", "instructions"),
        options=FrankaVisionOptions,
    ),
    "franka_robot": EnvType(
        f"{_FOLDER}.real.franka_robot:FrankaRobotEnv",
        ("reach",),
        robot="Franka",
        options=FrankaRobotOptions,
        action_size=7,
    ),
    "robot": EnvType(
        f"{_FOLDER}.real.driver_env:DrivenRobotEnv",
        robot=DRIVEN,
        observes=None,
        max_episode_steps=None,
        options=RobotEnvOptions,
    ),
    "gymnasium": _BY_ID._replace(target=f"{_SIMULATORS}.gymnasium_env:GymnasiumEnv", module="gymnasium", processes=0),
    "envpool": _BY_ID._replace(target=f"{_SIMULATORS}.envpool_env:EnvpoolEnv", module="envpool"),
    "gym_hil": _simulator("gym_hil", "GymHilEnv", "gym_hil/PandaPickCube-v0", GymHilOptions)._replace(
        install="gym-hil", control_hz=10.0
    ),
    "libero": _simulator("libero", "LiberoEnv", "libero_spatial", LiberoOptions)._replace(
        action_size=7,
        control_hz=20.0,
        stored_sets=("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"),
    ),
    "metaworld": _simulator("metaworld", "MetaworldEnv", "reach-v3", MetaworldOptions)._replace(
        action_size=4, control_hz=80.0
    ),
    "robosuite": _simulator("robosuite", "RobosuiteEnv", "Lift", RobosuiteOptions),
    "gymnasium_robotics": _simulator(
        "gymnasium_env",
        "GymnasiumRoboticsEnv",
        "FetchReachDense-v4",
        GymnasiumRoboticsOptions,
        "gymnasium_robotics",
    ),
    "maniskill": _simulator("maniskill", "ManiskillEnv", "PickCube-v1", ManiskillOptions, "mani_skill")._replace(
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

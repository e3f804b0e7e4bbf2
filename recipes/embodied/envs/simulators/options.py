"""Options of built-in environments, `env.train.options`, validated without importing the simulators.

Imports no numpy, since `rlinf validate` reads these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from rlinf_core import ConfigModel
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

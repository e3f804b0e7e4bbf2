"""Options of the simulators, `env.train.options`, validated without importing the simulators.

numpy is not imported: `rlinf validate` reads these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

ImageSize = Annotated[int, Field(ge=8, le=2048)]
Camera = Literal["main", "wrist"]


class SharedStarts(NamedTuple):
    """Starts that training and evaluation share.

    Attributes:
        what: they are.
        remedy: how evaluation gets others.
    """

    what: str
    remedy: str


class SimulatorOptions(BaseModel):
    """Options of every simulator that renders.

    Attributes:
        cameras: the cameras whose images are observed; none: states alone, which is many times as fast.
        image_size: height and width of the images, pixels.
    """

    model_config = ConfigDict(extra="forbid")

    cameras: tuple[Camera, ...] = ()
    image_size: ImageSize = 128

    @property
    def state_size(self) -> int:
        """Numbers in the observation `states`; 0: only the simulator knows."""
        return 0

    def shared_starts(self, evaluation: Any) -> SharedStarts | None:
        """Return the starts that training with these options shares with evaluation, where a task's starts are fixed.

        By default starts are drawn by the seed, and are others for another seed.
        """
        return None


class MetaworldOptions(SimulatorOptions):
    """Options of `metaworld`.

    Attributes:
        camera: MuJoCo's name of the camera that is `main`; that of the hand is `wrist`.
        split: which tasks of an ML set, and which of their goals.
        goal_seed: seed of the 50 goals of each task.
        reward_scale: what rewards are multiplied by; Meta-World's go up to 10 for each step.
    """

    camera: str = "corner2"
    split: Literal["train", "test"] = "train"
    goal_seed: int = 0
    reward_scale: Annotated[float, Field(gt=0)] = 1.0

    @property
    def state_size(self) -> int:
        """See `SimulatorOptions`."""
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
    """Options of `libero`.

    Attributes:
        observe_objects: append the poses of the objects to `states`, for policies without images.
        initial_states: first and last of the task's fixed initial states that episodes begin in; None: all.
        mirrored: images with left and right exchanged: checkpoints of OpenVLA and openpi learned from such, because
            their data turned by half a turn what LIBERO renders bottom row first.
        settle_steps: steps without a motion at the beginning of an episode, in which objects come to rest.
    """

    cameras: tuple[Camera, ...] = ("main", "wrist")
    observe_objects: bool = False
    initial_states: tuple[int, int] | None = None
    mirrored: bool = False
    settle_steps: Annotated[int, Field(ge=0)] = 10

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
    """Options of `robosuite`.

    Attributes:
        robot: one of robosuite's robots.
        camera: robosuite's name of the camera that is `main`; that of the hand is `wrist`.
        reward_shaping: rewards on the way, and not only for success.
        control_freq: actions a second.
    """

    robot: str = "Panda"
    camera: str = "agentview"
    reward_shaping: bool = True
    control_freq: Annotated[int, Field(ge=1, le=200)] = 20


class GymnasiumRoboticsOptions(SimulatorOptions):
    """Options of `gymnasium_robotics`.

    Attributes:
        cameras: `main` is the camera of the environment's own renderer; there is no other.
        arguments: the arguments of `gymnasium.make`, as in `{tasks_to_complete: [microwave]}`.
    """

    arguments: dict[str, object] = Field(default_factory=dict)


class GymHilOptions(SimulatorOptions):
    """Options of `gym_hil`.

    Attributes:
        cameras: `main` is the camera at the front.
        arguments: further arguments of the environment, as in `{reward_type: dense, random_block_position: true}`.
    """

    arguments: dict[str, object] = Field(default_factory=dict)


class ManiskillOptions(SimulatorOptions):
    """Options of `maniskill`.

    Attributes:
        control_mode: the control mode of the robot's controllers.
        reward_mode: the reward mode of the task.
        sim_backend: `physx_cuda` steps all environments at once on the accelerator, `physx_cpu` has one environment.
        robot: the robot, where a task has several; None: the task's own.
    """

    control_mode: str = "pd_ee_delta_pose"
    reward_mode: Literal["normalized_dense", "dense", "sparse"] = "normalized_dense"
    sim_backend: Literal["auto", "physx_cpu", "physx_cuda"] = "auto"
    robot: str | None = None

"""The interface between intervention sources and environments. numpy only, no device library.

A source of your own is a subclass of `InterventionSource` with one method, `read`; `source: package.module:Class` names
it in a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.cameras.camera import CameraView
from recipes.training.arrays import Array
from rlinf_core.errors import RuntimeFailure

# A person's judgement of the episode that is under way, which ends it. A discarded one is neither recorded nor learned
# from.
Verdict: TypeAlias = Literal["success", "failure", "discard"]
Axes: TypeAlias = tuple[float, float, float]
STILL: Axes = (0.0, 0.0, 0.0)


class InterventionError(RuntimeFailure):
    """A device cannot be opened, disconnected, or sent invalid data; `where` is the source and its device."""


class HandMotion(NamedTuple):
    """A commanded motion of the hand, as fractions of the maximum speed, each from -1 to 1.

    Attributes:
        linear: forward, to the left, up, as seen from the arm's base.
        angular: about these three axes.
        gripper_closed: the gripper is to be closed, or open.
        moves_gripper: the person has pressed the gripper's button in this takeover. Else the gripper stays as it is,
            and `gripper_closed` says what it was last told.
    """

    linear: Axes
    angular: Axes
    gripper_closed: bool
    moves_gripper: bool = True

    def action(self, size: int, last: Array | None = None) -> NDArray[np.float32]:
        """Return an action of that many numbers, float32 [A]: the motion along the axes, then the turns about them as
        far as there is room; the last of more than three numbers closes the gripper (1) or opens it (-1).

        Args:
            size: A.
            last: [A], the last action, whose number for the gripper is repeated where the person does not move it.
        """
        action = np.zeros(size, np.float32)
        axes = (*self.linear, *self.angular)[: size - (size > 3)]
        action[: len(axes)] = axes
        if size > 3:
            action[-1] = 1 if self.gripper_closed else -1
            if last is not None and not self.moves_gripper:
                action[-1] = last[-1]
        return action


class LeaderAction(NamedTuple):
    """An action that brings an arm to the pose of a leader arm.

    Attributes:
        action: float32 [A].
        away: the way that is left for the target of each joint, by name, in the joints' own units.
    """

    action: NDArray[np.float32]
    away: dict[str, float]


@dataclass(frozen=True, slots=True)
class Takeover:
    """Action of a source in one step of a batch of environments.

    Attributes:
        rows: bool [B], environments in which it replaces the policy's action.
        actions: float32 [B, A], its actions; rows of other environments may hold anything.
        verdicts: the verdicts on episodes that end with this step, by row.
        rewards: what a person adds to the reward of this step, by row.
    """

    rows: NDArray[np.bool_]
    actions: NDArray[np.float32]
    verdicts: dict[int, Verdict]
    rewards: dict[int, float] = field(default_factory=dict[int, float])


def check_verdicts(owner: object, num_envs: int, verdicts: object) -> None:
    """Refuse verdicts on environments that do not exist, and words that are none: they would count as failures.

    Raises:
        InterventionError: there is one, or they are no mapping; `where` is the class of `owner`.
    """
    if not isinstance(verdicts, Mapping):
        raise InterventionError(
            f"the verdicts are {type(verdicts).__name__}",
            where=type(owner).__name__,
            help="return a dictionary of rows and verdicts, empty where there are none",
        )
    for row, verdict in cast("Mapping[int, object]", verdicts).items():
        if verdict not in get_args(Verdict) or not 0 <= row < num_envs:
            raise InterventionError(
                f"the verdict on environment {row} is `{verdict}`; there are {num_envs} environments",
                where=type(owner).__name__,
                help=f"verdicts are {', '.join(map(repr, get_args(Verdict)))}, by row from 0",
            )


class EnvProgress(NamedTuple):
    """The step that a batch of environments is about to take.

    Attributes:
        numbers: int64 [B], of the environments among all of the job.
        reset: number of the last reset.
        episode: int64 [B], number of the present episode since the reset.
        steps: int64 [B], steps of the present episode so far.
    """

    numbers: NDArray[np.int64]
    reset: int
    episode: NDArray[np.int64]
    steps: NDArray[np.int64]


class Steerable(Protocol):
    """The part of a batch of environments that sources see."""

    num_envs: int

    @property
    def progress(self) -> EnvProgress:
        """The step that is about to be taken."""
        ...

    @property
    def action_size(self) -> int:
        """A."""
        ...

    @property
    def control_hz(self) -> float | None:
        """Actions per second; None: not known."""
        ...

    @property
    def paces_itself(self) -> bool:
        """Whether a step takes as long as an action does on a real arm."""
        ...

    @property
    def intervention(self) -> InterventionSource | None:
        """The source that takes over from the policy; None: no interventions."""
        ...

    def expert(self) -> NDArray[np.float32] | None:
        """Return actions of a scripted expert, float32 [B, A]; None if there is none."""
        ...

    def steer(self, motion: HandMotion, row: int) -> NDArray[np.float32]:
        """Return the action, float32 [A], that moves the hand of one environment as commanded."""
        ...

    def gripper_is_closed(self, row: int) -> bool:
        """Return whether the gripper of one environment was last told to close."""
        ...

    def follow(self, joints: NDArray[np.float64], row: int) -> LeaderAction | None:
        """Return the action that brings the arm of one environment to the joints of a leader; None: it has none."""
        ...

    def views(self, row: int) -> list[CameraView]:
        """Return the newest picture of each camera of one environment; empty: there is nothing to see."""
        ...


class InterventionSource(ABC):
    """A source of actions that replace those of the policy.

    Args:
        env: the batch of environments.
        options: `intervention.options` of the file; where the class has an attribute `options_model`, its instance.

    Attributes:
        judges: it has keys for success and failure; without them a judge of `keys` opens a device of its own.

    Raises:
        InterventionError: the device cannot be opened.
        ConfigError: the environment is none for this source.
    """

    judges: ClassVar[bool] = True

    def __init__(self, env: Steerable, options: Any) -> None:
        self.env, self.options = env, options

    @abstractmethod
    def read(self) -> Takeover | None:
        """Return the intervention in the next step; None: the policy acts in all environments.

        Called once before every step. Must not wait, but for the pace of a person who watches a simulation.

        Raises:
            InterventionError: the device was lost.
        """

    def wait_for_person(self) -> None:  # noqa: B027 - scripts need no person
        """Wait until a person takes over, at the start of a demonstration."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release the device. May be called twice."""


class ExecutedActions:
    """Replaces the policy's actions by a source's, step by step of a chunk, and records the executed ones.

    Where a source let go within a chunk the rest of it is not the policy's: that was chosen before the environment was
    moved by somebody else. Such an environment is held as it is until the next chunk.

    Args:
        chunk: [B, C, A], the policy's.
        source: None: no interventions.
        held: returns the actions [n, A] that hold some environments as they are, by their rows.

    Attributes:
        actions: [B, C, A], what was carried out.
        taken: bool [B, C], the steps in which the source acted.
        verdicts: those on the last step, by row.
        rewards: what a person adds to the rewards of the last step, by row.
    """

    def __init__(
        self, chunk: Array, source: InterventionSource | None, held: Callable[[NDArray[np.int64]], Array]
    ) -> None:
        self.actions = chunk.copy()
        self.taken = np.zeros(chunk.shape[:2], np.bool_)
        self._source, self._held = source, held
        self.verdicts: dict[int, Verdict] = {}
        self.rewards: dict[int, float] = {}

    def take(self, index: int) -> Array:
        """Return the actions [B, A] to carry out in a step.

        Raises:
            InterventionError: an action of the source is not finite, or it was lost.
        """
        self.verdicts, self.rewards = {}, {}
        taken_over = None if self._source is None else self._source.read()
        left = np.flatnonzero(self.taken[:, :index].any(axis=1))
        if len(left):
            self.actions[left, index] = self._held(left)
        if taken_over is not None:
            self._check(taken_over)
            wanted = taken_over.actions[taken_over.rows]
            if not np.isfinite(wanted).all():
                raise InterventionError(
                    "an intervention action is not finite",
                    where=type(self._source).__name__,
                    help="fix the source; no action was executed",
                )
            self.actions[taken_over.rows, index] = np.clip(wanted, -1, 1)
            self.taken[:, index] = taken_over.rows
            self.verdicts, self.rewards = taken_over.verdicts, taken_over.rewards
        return self.actions[:, index]

    def _check(self, taken_over: Takeover) -> None:
        """Refuse a takeover that is not of this batch: numbers would count for other environments."""
        rows, actions = np.asarray(taken_over.rows), np.asarray(taken_over.actions)
        batch, _, size = self.actions.shape
        if rows.dtype != np.bool_ or rows.shape != (batch,) or actions.shape != (batch, size):
            shapes = f"`rows` {rows.dtype}{list(rows.shape)} and `actions` {list(actions.shape)}"
            raise InterventionError(
                f"a takeover has {shapes}; expected bool{[batch]} and {[batch, size]}",
                where=type(self._source).__name__,
                help="return a row for each environment of the batch; no action was executed",
            )
        check_verdicts(self._source, batch, taken_over.verdicts)

    def replace(self, index: int, actions: Array) -> None:
        """Record the action that the environment executed in a step instead, [B, A]."""
        self.actions[:, index] = actions


class SuccessJudge(ABC):
    """A judge of episodes: its verdicts are the only reward, 1 for a success, which ends the episode.

    Args:
        env: the batch of environments.
        options: `judge.options` of the file; where the class has an attribute `options_model`, its instance.

    Raises:
        ConfigError: the environment is none for this judge.
    """

    def __init__(self, env: Steerable, options: Any) -> None:
        self.env, self.options = env, options

    @abstractmethod
    def judge(self, observations: Mapping[str, Array]) -> dict[int, Verdict]:
        """Return the verdicts on the current states, by row; an episode without a verdict continues.

        Called once after every step. Must not wait.

        Args:
            observations: the observations of all environments, [B, ...] by name.

        Raises:
            InterventionError: a device was lost.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release what it holds. May be called twice."""

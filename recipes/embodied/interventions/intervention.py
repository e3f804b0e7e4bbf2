"""The interface between intervention sources and environments. numpy only, no device library.

A custom source is a subclass of `InterventionSource` with one method, `read`; `source: package.module:Class` names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.cameras.drivers import CameraView
from recipes.training.arrays import Array
from rlinf_core.errors import RuntimeFailure

# A person's verdict on the running episode, which ends it. A discarded episode is neither recorded nor learned from.
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
        gripper_closed: whether the gripper should be closed.
        moves_gripper: whether the person has pressed the gripper's button in this takeover. If not, the gripper stays
            as it is, and `gripper_closed` is its last command.
    """

    linear: Axes
    angular: Axes
    gripper_closed: bool
    moves_gripper: bool = True

    def action(self, size: int, last: Array | None = None) -> NDArray[np.float32]:
        """Return an action of `size` numbers, float32 [A]: the motion along the axes, then as many rotations about them
        as fit; the last of more than three numbers closes the gripper (1) or opens it (-1).

        Args:
            size: A.
            last: [A], the last action, whose gripper number is repeated unless the person moves the gripper.
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
        away: the remaining distance of each joint's target, by name, in the joint's own units.
    """

    action: NDArray[np.float32]
    away: dict[str, float]


@dataclass(frozen=True, slots=True)
class Takeover:
    """Action of a source in one step of a batch of environments.

    Attributes:
        rows: bool [B], environments in which the source replaces the policy's action.
        actions: float32 [B, A], its actions; rows of other environments may hold anything.
        verdicts: the verdicts on episodes that end with this step, by row.
        rewards: a person's addition to the reward of this step, by row.
    """

    rows: NDArray[np.bool_]
    actions: NDArray[np.float32]
    verdicts: dict[int, Verdict]
    rewards: dict[int, float] = field(default_factory=dict[int, float])


def check_verdicts(owner: object, num_envs: int, verdicts: object) -> None:
    """Refuse verdicts on unknown environments, and unknown verdicts, which would count as failures.

    Raises:
        InterventionError: a verdict is invalid, or they are no mapping; `where` is the class of `owner`.
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
        numbers: int64 [B], the numbers of the environments within the job.
        reset: number of the last reset.
        episode: int64 [B], number of the current episode since the reset.
        steps: int64 [B], steps of the current episode so far.
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
        """The size of an action, A."""
        ...

    @property
    def control_hz(self) -> float | None:
        """Actions per second; None: unknown."""
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
        """Return the action, float32 [A], that moves the hand of one environment as a person commands."""
        ...

    def gripper_is_closed(self, row: int) -> bool:
        """Return whether the last command closed the gripper of one environment."""
        ...

    def follow(self, joints: NDArray[np.float64], row: int) -> LeaderAction | None:
        """Return the action that brings the arm of one environment to the joints of a leader; None: no leader."""
        ...

    def views(self, row: int) -> list[CameraView]:
        """Return the newest picture of each camera of one environment; empty: no image."""
        ...


class InterventionSource(ABC):
    """A source of actions that replace those of the policy.

    Args:
        env: the batch of environments.
        options: `intervention.options` of the job file; an instance of the class attribute `options_model`, if it
            exists.

    Attributes:
        judges: whether it has keys for success and failure; if not, a judge of `keys` opens its own device.

    Raises:
        InterventionError: the device cannot be opened.
        ConfigError: the environment does not suit this source.
    """

    judges: ClassVar[bool] = True

    def __init__(self, env: Steerable, options: Any) -> None:
        self.env, self.options = env, options

    @abstractmethod
    def read(self) -> Takeover | None:
        """Return the intervention in the next step; None: the policy acts in all environments.

        Called once before every step. Must not wait, except to pace a simulation for a watching person.

        Raises:
            InterventionError: the device was lost.
        """

    def wait_for_person(self) -> None:  # noqa: B027 - scripts need no person
        """Wait until a person takes over, at the start of a demonstration."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release the device. May be called twice."""


class ExecutedActions:
    """Replaces the policy's actions by a source's, step by step of a chunk, and records the executed ones.

    If a source releases control within a chunk, the policy's remaining actions are outdated, because somebody else has
    moved the environment. The environment is then held still until the next chunk.

    Args:
        chunk: [B, C, A], the policy's actions.
        source: the source of interventions; None: no interventions.
        held: returns the actions [n, A] that hold the environments of given rows still.
        carried_out: returns an action within the bounds of the environments, see `EnvSpec`.
        num_choices: see `EnvSpec`.

    Attributes:
        actions: [B, C, A], the executed actions.
        taken: bool [B, C], the steps in which the source acted.
        verdicts: the verdicts on the last step, by row.
        rewards: a person's additions to the rewards of the last step, by row.
    """

    def __init__(
        self,
        chunk: Array,
        source: InterventionSource | None,
        held: Callable[[NDArray[np.int64]], Array],
        carried_out: Callable[[Array], Array],
        num_choices: int | None = None,
    ) -> None:
        self.actions = chunk.copy()
        self.taken = np.zeros(chunk.shape[:2], np.bool_)
        self._source, self._held = source, held
        self._carried_out, self._num_choices = carried_out, num_choices
        self.verdicts: dict[int, Verdict] = {}
        self.rewards: dict[int, float] = {}

    def take(self, index: int) -> Array:
        """Return the actions [B, A] to execute in a step.

        Raises:
            InterventionError: an action of the source is not finite or no choice, or its device was lost.
        """
        self.verdicts, self.rewards = {}, {}
        taken_over = None if self._source is None else self._source.read()
        left = np.flatnonzero(self.taken[:, :index].any(axis=1))
        if len(left):
            self.actions[left, index] = self._held(left)
        if taken_over is not None:
            rows, actions = self._checked(taken_over)
            wanted = actions[rows]
            choices, fault = self._num_choices, None
            if not np.isfinite(wanted).all():
                fault = "not finite"
            elif choices is not None and not np.isin(wanted, np.arange(choices)).all():
                fault = f"none of the {choices} choices, from 0"
            if fault is not None:
                raise InterventionError(
                    f"an intervention action is {fault}",
                    where=type(self._source).__name__,
                    help="fix the source; no action was executed",
                )
            self.actions[rows, index] = self._carried_out(wanted)
            self.taken[:, index] = rows
            self.verdicts, self.rewards = taken_over.verdicts, taken_over.rewards
        return self.actions[:, index]

    def _checked(self, taken_over: Takeover) -> tuple[NDArray[np.bool_], Array]:
        """Return rows and actions of a takeover; refuse those of another batch, which would count for wrong
        environments.
        """
        rows, actions = np.asarray(taken_over.rows), np.asarray(taken_over.actions)
        batch, _, size = self.actions.shape
        is_number = actions.dtype.kind in "fiu"
        if rows.dtype != np.bool_ or rows.shape != (batch,) or actions.shape != (batch, size) or not is_number:
            shapes = f"`rows` {rows.dtype}{list(rows.shape)} and `actions` {actions.dtype}{list(actions.shape)}"
            raise InterventionError(
                f"a takeover has {shapes}; expected bool{[batch]} and numbers{[batch, size]}",
                where=type(self._source).__name__,
                help="return a row for each environment of the batch; no action was executed",
            )
        check_verdicts(self._source, batch, taken_over.verdicts)
        for row, reward in taken_over.rewards.items():
            if not (0 <= row < batch and np.isfinite(reward)):
                raise InterventionError(
                    f"the reward of environment {row} is {reward}; there are {batch} environments",
                    where=type(self._source).__name__,
                    help="rewards are finite numbers, by row from 0",
                )
        return rows, actions

    def replace(self, index: int, actions: Array) -> None:
        """Record the actions [B, A] that the environment executed instead in a step."""
        self.actions[:, index] = actions


class SuccessJudge(ABC):
    """A judge of episodes: its verdicts are the only reward, 1 for a success, which ends the episode.

    Args:
        env: the batch of environments.
        options: `judge.options` of the job file; an instance of the class attribute `options_model`, if it exists.

    Raises:
        ConfigError: the environment does not suit this judge.
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
        """Release its resources. May be called twice."""

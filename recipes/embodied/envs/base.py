"""The interface of batched environments.

An environment holds `num_envs` copies of a task and steps them together. What is the same for all of them lives here:
when episodes end, how they start again, what is known of those that ended. An environment of your own is a subclass of
`VectorEnv` with three methods, `_start`, `_advance` and `_observe`; `env_type: package.module:Class` names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.starts import Starts

if TYPE_CHECKING:
    from rlinf_core.config.fragments.env import EnvironmentConfig
    from rlinf_core.hardware.robots.unit import RobotUnit

FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]
# By name: `states` float32 [B, S], `images` uint8 [B, H, W, 3], `instructions` text [B]. Some may be missing.
Observation: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What a policy must know of an environment.

    Attributes:
        state_size: S of the observation `states` [B, S]; 0 without states.
        action_size: A of the actions [B, C, A]; 1 for a choice.
        num_choices: an action is one of so many integers, from 0; None: it is A numbers, each from -1 to 1.
        image_shape: (H, W, 3) of the observation `images`; None without images.
        max_episode_steps: steps after which an episode is cut off.
    """

    state_size: int
    action_size: int
    num_choices: int | None = None
    image_shape: tuple[int, int, int] | None = None
    max_episode_steps: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSettings:
    """What every environment is told: the keys of `env.train` and `env.eval`, and which share of the whole it is.

    Attributes:
        num_envs: environments of this batch, B.
        first_env: number of its first one among all environments of the job; starts depend on that number, so that
            they are the same however environments are dealt to workers.
        hardware: the robots that the process owns, `worker_info.hardware`; empty for simulators.
    """

    num_envs: int
    first_env: int = 0
    task: str | None = None
    max_episode_steps: int = 50
    auto_reset: bool = True
    ignore_terminations: bool = False
    group_size: int = 1
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hardware: tuple[RobotUnit, ...] = ()

    @classmethod
    def of(
        cls,
        config: EnvironmentConfig,
        *,
        num_envs: int,
        first_env: int,
        group_size: int,
        hardware: tuple[RobotUnit, ...] = (),
    ) -> EnvSettings:
        """From a section `env.train` or `env.eval`."""
        return cls(
            num_envs=num_envs,
            first_env=first_env,
            task=config.task,
            max_episode_steps=config.max_episode_steps,
            auto_reset=config.auto_reset,
            ignore_terminations=config.ignore_terminations,
            group_size=group_size,
            seed=config.seed,
            options=config.options,
            hardware=hardware,
        )


@dataclass(frozen=True, slots=True)
class Transition:
    """What one step of all environments gave; for those that were not to move, anything.

    Attributes:
        rewards: float32 [B].
        terminations: bool [B], the task ended.
        truncations: bool [B], the environment itself cut the episode off; None: it never does.
        successes: bool [B], the task is solved in this state; None: it does not know success.
    """

    rewards: FloatArray
    terminations: BoolArray
    truncations: BoolArray | None = None
    successes: BoolArray | None = None


@dataclass(frozen=True, slots=True)
class Episodes:
    """The k episodes that ended in a step, ordered by environment.

    Attributes:
        env: int64 [k], the environment, from 0 in this batch.
        number: int64 [k], which episode it was since `reset`, from 0. Where passes are shorter than what environments
            would need to end on the same step, only the episodes 0 are a fair sample: short ones are among the others
            too often.
        returns: float32 [k], sum of rewards.
        lengths: int64 [k], steps.
        success_once: bool [k], solved in some state; None: success is not known.
        success_at_end: bool [k], solved in the last state; None: success is not known.
    """

    env: IntArray
    number: IntArray
    returns: FloatArray
    lengths: IntArray
    success_once: BoolArray | None
    success_at_end: BoolArray | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a chunk of C actions did.

    Attributes:
        observations: what the policy acts on next; of the new episode where one has started.
        rewards: float32 [B, C].
        terminations: bool [B, C], the task ended with this action.
        truncations: bool [B, C], the episode was cut off after this action.
        valid: bool [B, C], the action was carried out. It is not when the episode had ended: the rest of its chunk is
            dropped, and so is everything until the next `reset` without `auto_reset`.
        final_observations: observations at the end of those episodes that ended; rows of other environments hold their
            present one. None when no episode ended.
        episodes: what is known of those that ended; None when none did.
    """

    observations: Observation
    rewards: FloatArray
    terminations: BoolArray
    truncations: BoolArray
    valid: BoolArray
    final_observations: Observation | None
    episodes: Episodes | None

    @property
    def dones(self) -> BoolArray:
        """bool [B, C], the episode ended with this action, one way or the other."""
        return self.terminations | self.truncations


class VectorEnv(ABC):
    """A batch of environments with the same task.

    Episodes end when the task does (unless `ignore_terminations`) or after `max_episode_steps`. With `auto_reset` a new
    one starts in place; without, the environment rests until `reset`. Members of a group (`group_size` neighbours)
    begin their n-th episode after a reset from equal starts.
    """

    def __init__(self, settings: EnvSettings) -> None:
        count = settings.num_envs
        self.settings = settings
        self.num_envs = count
        numbers = settings.first_env + np.arange(count)
        self._starts = Starts(settings.seed, numbers // settings.group_size)
        self._resets = 0
        self._episode = np.zeros(count, np.int64)
        self._steps = np.zeros(count, np.int64)
        self._returns = np.zeros(count, np.float32)
        self._success_once = np.zeros(count, np.bool_)
        self._success = np.zeros(count, np.bool_)
        self._resting = np.zeros(count, np.bool_)

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """What a policy must know."""

    @abstractmethod
    def _start(self, rows: IntArray, starts: Starts) -> None:
        """Begin a new episode in each environment of `rows`; all randomness comes from `starts`."""

    @abstractmethod
    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        """Carry out one action [B, A] in the environments of `rows`, None for all. The others must not change."""

    @abstractmethod
    def _observe(self) -> Observation:
        """Return the present observations: new arrays, or such as are never written to again."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what the environments hold. May be called twice."""

    def reset(self, number: int | None = None) -> Observation:
        """Start new episodes everywhere.

        Args:
            number: of the reset. The same number gives the same starts, and so a run that is continued sees what it
                would have seen. Default: one more than the last, from 0.

        Returns:
            The first observations.
        """
        self._resets = self._resets if number is None else number
        self._starts.begin(self._resets)
        self._resets += 1
        self._episode[:] = 0
        self._resting[:] = False
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Carry out a chunk of actions.

        Args:
            actions: float32 [B, C, A], numbers beyond -1 and 1 count as those; or int64 [B, C, 1], choices.
        """
        chunk = actions.shape[1]
        shape = (self.num_envs, chunk)
        rewards = np.zeros(shape, np.float32)
        terminations, truncations, valid = (np.zeros(shape, np.bool_) for _ in range(3))
        resting = self._resting.copy()
        for index in range(chunk):
            active = ~resting
            rows = np.flatnonzero(active) if resting.any() else None
            if rows is not None and not len(rows):
                break
            valid[:, index] = active
            moved = self._advance(actions[:, index], rows)
            self._account(moved, active, rewards[:, index], terminations[:, index], truncations[:, index])
            resting |= terminations[:, index] | truncations[:, index]
        ended = np.flatnonzero(resting & ~self._resting)
        observations = self._observe()
        if not len(ended):
            return StepResult(observations, rewards, terminations, truncations, valid, None, None)
        final, episodes = observations, self._episodes(ended)
        if self.settings.auto_reset:
            self._episode[ended] += 1
            self._begin(ended)
            observations = self._observe()
        else:
            self._resting = resting
        return StepResult(observations, rewards, terminations, truncations, valid, final, episodes)

    def _begin(self, rows: IntArray) -> None:
        self._steps[rows] = 0
        self._returns[rows] = 0
        self._success_once[rows] = False
        self._success[rows] = False
        self._start(rows, self._starts.of(rows, self._episode[rows]))

    def _account(
        self, moved: Transition, active: BoolArray, rewards: FloatArray, terminations: BoolArray, truncations: BoolArray
    ) -> None:
        """Write what a step gave into the columns of the result, and add it to the running episodes."""
        rewards[:] = np.where(active, moved.rewards, 0)
        self._returns += rewards
        self._steps += active
        cut = self._steps >= self.settings.max_episode_steps
        if moved.truncations is not None:
            cut |= moved.truncations
        truncations[:] = cut & active
        if not self.settings.ignore_terminations:
            terminations[:] = moved.terminations & active
        if moved.successes is not None:
            self._success = np.where(active, moved.successes, self._success)
            self._success_once |= self._success

    def _episodes(self, rows: IntArray) -> Episodes:
        known = self.knows_success
        return Episodes(
            env=rows,
            number=self._episode[rows],
            returns=self._returns[rows],
            lengths=self._steps[rows],
            success_once=self._success_once[rows] if known else None,
            success_at_end=self._success[rows] if known else None,
        )

    @property
    def knows_success(self) -> bool:
        """Whether the task can be solved, rather than only done better or worse."""
        return True

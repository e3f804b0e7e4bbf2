"""The interface of batched environments.

An environment holds `num_envs` copies of a task and steps them together. `VectorEnv` does what is the same for all of
them: it ends episodes, starts new ones, and reports those that ended. An environment of your own is a subclass with
three methods, `_start`, `_advance` and `_observe`; `env_type: package.module:Class` names it. Two more, `_save` and
`_load`, let a resumed run continue in the middle of an episode.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.starts import Starts
from recipes.embodied.envs.state import State, observation_digest
from recipes.training.finite import NonFiniteError, OnNonFinite, nonfinite_rows

if TYPE_CHECKING:
    from recipes.embodied.env_config import EnvironmentConfig
    from rlinf_core import RobotUnit

LOGGER: Final = logging.getLogger("rlinf")

FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]
# What is known of running episodes, apart from what the environment itself keeps.
_COUNTERS: Final = ("episode", "steps", "returns", "success_once", "success", "resting")
_LOOK_AT_ENV: Final = "look for a division by zero, a root of a negative number or an overflow in the environment"
_LOOK_AT_POLICY: Final = "the policy gives it: its weights are not finite; lower `actor.optim.lr` or `clip_grad`"
# By name: `states` float32 [B, S], `images` uint8 [B, H, W, 3], `instructions` text [B]. Some may be missing.
Observation: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The sizes of observations and actions that a policy is built for.

    Attributes:
        state_size: S of the observation `states` [B, S]; 0 without states.
        action_size: A of the actions [B, C, A]; 1 for a choice.
        num_choices: an action is one of so many integers, from 0; None: it is A numbers, each from -1 to 1.
        image_shape: (H, W, 3) of the observation `images`; None without images.
    """

    state_size: int
    action_size: int
    num_choices: int | None = None
    image_shape: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSettings:
    """Constructor argument of every environment: the keys of `env.train` or `env.eval`, and its share of the batch.

    Attributes:
        num_envs: environments of this batch, B.
        first_env: number of its first one among all environments of the job; starts depend on that number, so that
            they are the same however environments are dealt to workers.
        max_episode_steps: steps after which an episode is truncated; None: the environment's own limit.
        hardware: the robots that the process owns, `worker_info.hardware`; empty for simulators.
        resumable: `save` will be called, so that what it needs has to be kept.
        on_nonfinite: what becomes of a NaN or an infinity in a reward or an observation: an error, or the end of that
            episode, whose last step is then not learned from.
    """

    num_envs: int
    first_env: int = 0
    task: str | None = None
    max_episode_steps: int | None = None
    auto_reset: bool = True
    ignore_terminations: bool = False
    group_size: int = 1
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hardware: tuple[RobotUnit, ...] = ()
    resumable: bool = False
    on_nonfinite: OnNonFinite = "stop"

    @classmethod
    def of(
        cls,
        config: EnvironmentConfig,
        *,
        num_envs: int,
        first_env: int,
        group_size: int,
        hardware: tuple[RobotUnit, ...] = (),
        resumable: bool = False,
        on_nonfinite: OnNonFinite = "stop",
    ) -> EnvSettings:
        """Return the settings of a section `env.train` or `env.eval`."""
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
            resumable=resumable,
            on_nonfinite=on_nonfinite,
        )


@dataclass(frozen=True, slots=True)
class Transition:
    """Result of one step of all environments; rows of those that were not stepped may hold anything.

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
class FinishedEpisodes:
    """The k episodes that ended in a step, ordered by environment.

    Attributes:
        env: int64 [k], the environment, from 0 in this batch.
        number: int64 [k], which episode it was since `reset`, from 0. Where every pass resets, only the episodes 0 are
            a fair sample: among the later ones those that end within the pass are the short ones.
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
    """Result of a chunk of C actions.

    Attributes:
        observations: what the policy acts on next; of the new episode where one has started.
        rewards: float32 [B, C].
        terminations: bool [B, C], the task ended with this action.
        truncations: bool [B, C], the episode was cut off after this action.
        valid: bool [B, C], the action was carried out, and counts. It was not when the episode had ended: the rest of
            its chunk is dropped, and so is everything until the next `reset` without `auto_reset`. With
            `on_nonfinite: skip` it does not count where the reward or the observation after it was not finite.
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
    episodes: FinishedEpisodes | None

    @property
    def dones(self) -> BoolArray:
        """bool [B, C], the episode ended with this action, one way or the other."""
        return self.terminations | self.truncations


class VectorEnv(ABC):
    """A batch of environments with the same task.

    An episode ends when the task does (unless `ignore_terminations`) or after `max_episode_steps`. With `auto_reset` a
    new one starts in place; without, the environment rests until `reset`. Members of a group (`group_size` neighbours)
    begin their n-th episode after a reset from equal starts.

    Attributes:
        numbers: int64 [B], those of the environments among all of the job.
        default_max_episode_steps: limit where the settings give none; None: episodes are not limited. A subclass may
            set it, for the class or in its constructor.
    """

    default_max_episode_steps: int | None = 50

    def __init__(self, settings: EnvSettings) -> None:
        count = settings.num_envs
        self.settings = settings
        self.num_envs = count
        self.numbers = settings.first_env + np.arange(count)
        self._starts = Starts(settings.seed, self.numbers // settings.group_size)
        # The number of the last reset; -1 before the first.
        self._reset = -1
        self._episode = np.zeros(count, np.int64)
        self._steps = np.zeros(count, np.int64)
        self._returns = np.zeros(count, np.float32)
        self._success_once = np.zeros(count, np.bool_)
        self._success = np.zeros(count, np.bool_)
        self._resting = np.zeros(count, np.bool_)

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """The sizes of observations and actions."""

    @abstractmethod
    def _start(self, rows: IntArray, starts: Starts) -> None:
        """Begin a new episode in each environment of `rows`; all randomness comes from `starts`."""

    @abstractmethod
    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        """Carry out one action [B, A] in the environments of `rows`, None for all. The others must not change."""

    @abstractmethod
    def _observe(self) -> Observation:
        """Return the present observations: new arrays, or such as are never written to again."""

    def _save(self) -> State | None:
        """Return the arrays [B, ...] that `_load` needs to continue every episode where it is.

        Returns:
            None where the environment cannot: a resumed run then begins new episodes.
        """
        return None

    def _load(self, state: State) -> None:  # noqa: B027 - where `_save` returns none it is never called
        """Continue the episodes of which `_save` returned `state`; the rows are those of this batch."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release what the environments hold. May be called twice."""

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated; None: never."""
        return self.settings.max_episode_steps or self.default_max_episode_steps

    @property
    def started(self) -> bool:
        """Whether episodes are under way, after `reset` or `load`."""
        return self._reset >= 0

    @property
    def knows_success(self) -> bool:
        """Whether the task can be solved, rather than only done better or worse."""
        return True

    def reset(self, number: int | None = None) -> Observation:
        """Start new episodes everywhere.

        Args:
            number: of the reset. The same number gives the same starts, and so a run that is continued sees what it
                would have seen. Default: one more than the last, from 0.

        Returns:
            The first observations.

        Raises:
            NonFiniteError: an observation holds a NaN or an infinity.
        """
        self._reset = self._reset + 1 if number is None else number
        self._starts.begin(self._reset)
        self._episode[:] = 0
        self._resting[:] = False
        self._begin(np.arange(self.num_envs))
        return self.observe()

    def observe(self) -> Observation:
        """Return the present observations, of episodes that are under way.

        Raises:
            NonFiniteError: one of them holds a NaN or an infinity.
        """
        observations = self._observe()
        for name, array in observations.items():
            rows = nonfinite_rows(array)
            if rows.any():
                raise self._nonfinite(f"observation {name}", array, rows)
        return observations

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Carry out a chunk of actions.

        Args:
            actions: float32 [B, C, A], numbers beyond -1 and 1 count as those; or int64 [B, C, 1], choices.

        Raises:
            NonFiniteError: an action is not finite, or a reward or an observation is not and `on_nonfinite` is `stop`.
        """
        strange = nonfinite_rows(actions)
        if strange.any():
            raise self._nonfinite("action", actions, strange, _LOOK_AT_POLICY)
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
            moved = self._finite_rewards(self._advance(actions[:, index], rows), valid[:, index])
            self._account(moved, active, rewards[:, index], terminations[:, index], truncations[:, index])
            resting |= terminations[:, index] | truncations[:, index]
        observations = self._finite_observations(resting, truncations, valid)
        ended = np.flatnonzero(resting & ~self._resting)
        if not len(ended):
            return StepResult(observations, rewards, terminations, truncations, valid, None, None)
        final, episodes = observations, self._episodes(ended)
        if self.settings.auto_reset:
            self._episode[ended] += 1
            self._begin(ended)
            observations = self.observe()
        else:
            self._resting = resting
        return StepResult(observations, rewards, terminations, truncations, valid, final, episodes)

    def save(self) -> State | None:
        """Return the state of all episodes, as arrays [B, ...] by name; None where `_save` returns none."""
        own = self._save()
        if own is None:
            return None
        return {
            "number": self.numbers,
            "reset": np.full(self.num_envs, self._reset),
            **{name: getattr(self, f"_{name}").copy() for name in _COUNTERS},
            "digest": observation_digest(self._observe()),
            **{f"own/{name}": array for name, array in own.items()},
        }

    def load(self, state: State) -> bool:
        """Continue the episodes of which `save` returned `state`.

        Args:
            state: rows of these environments, by their numbers among all.

        Returns:
            Whether the environments observe what they did when their state was saved. Where they do not, their
            episodes cannot be continued, and `reset` has to follow.
        """
        self._reset = int(state["reset"][0])
        self._starts.begin(self._reset)
        for name in _COUNTERS:
            getattr(self, f"_{name}")[:] = state[name]
        self._load({name.removeprefix("own/"): array for name, array in state.items() if name.startswith("own/")})
        return np.array_equal(observation_digest(self._observe()), state["digest"])

    def _begin(self, rows: IntArray) -> None:
        self._steps[rows] = 0
        self._returns[rows] = 0
        self._success_once[rows] = False
        self._success[rows] = False
        self._start(rows, self._starts.of(rows, self._episode[rows]))

    def _account(
        self, moved: Transition, active: BoolArray, rewards: FloatArray, terminations: BoolArray, truncations: BoolArray
    ) -> None:
        """Write a transition into the columns of the result, and add it to the running episodes."""
        rewards[:] = np.where(active, moved.rewards, 0)
        self._returns += rewards
        self._steps += active
        limit = self.max_episode_steps
        cut = np.zeros(self.num_envs, np.bool_) if limit is None else self._steps >= limit
        if moved.truncations is not None:
            cut |= moved.truncations
        truncations[:] = cut & active
        if not self.settings.ignore_terminations:
            terminations[:] = moved.terminations & active
        if moved.successes is not None:
            self._success = np.where(active, moved.successes, self._success)
            self._success_once |= self._success

    def _finite_rewards(self, moved: Transition, valid: BoolArray) -> Transition:
        """Return a transition without NaN and infinities among the rewards of `valid` environments.

        With `on_nonfinite: skip` such a step is made invalid, and its episode is truncated.
        """
        rows = nonfinite_rows(moved.rewards) & valid
        if not rows.any():
            return moved
        self._skip_or_raise("reward", moved.rewards, rows)
        valid &= ~rows
        return replace(
            moved,
            rewards=np.where(rows, 0, moved.rewards).astype(np.float32),
            truncations=rows if moved.truncations is None else moved.truncations | rows,
        )

    def _finite_observations(self, resting: BoolArray, truncations: BoolArray, valid: BoolArray) -> Observation:
        """Return the observations after a chunk without NaN and infinities, as `_finite_rewards` does for rewards.

        Args:
            resting: bool [B], whose episodes have ended; extended by those that end here.
            truncations: bool [B, C] of the chunk, likewise.
            valid: bool [B, C] of the chunk, likewise.
        """
        observations = self._observe()
        for name, array in observations.items():
            rows = nonfinite_rows(array)
            if not rows.any():
                continue
            fresh = rows & ~self._resting
            if fresh.any():
                self._skip_or_raise(f"observation {name}", array, fresh)
            truncations[:, -1] |= rows & ~resting
            resting |= rows
            valid[fresh, _last_true(valid[fresh])] = False
            observations[name] = np.where(rows.reshape(-1, *[1] * (array.ndim - 1)), 0, array).astype(array.dtype)
        return observations

    def _skip_or_raise(self, tensor: str, values: NDArray[Any], rows: BoolArray) -> None:
        error = self._nonfinite(tensor, values, rows)
        if self.settings.on_nonfinite == "stop":
            raise error
        LOGGER.warning("%s; %d episodes end here, and this step is left out", error, rows.sum())

    def _nonfinite(
        self, tensor: str, values: NDArray[Any], rows: BoolArray, help: str = _LOOK_AT_ENV
    ) -> NonFiniteError:
        """Return the error for the first of `rows`, of values [B, ...]."""
        row = int(np.flatnonzero(rows)[0])
        found = values[row].ravel()
        return NonFiniteError(
            tensor,
            float(found[~np.isfinite(found)][0]),
            f"environment {self.numbers[row]}, after {self._steps[row]} steps of its episode {self._episode[row] + 1}",
            help,
        )

    def _episodes(self, rows: IntArray) -> FinishedEpisodes:
        known = self.knows_success
        return FinishedEpisodes(
            env=rows,
            number=self._episode[rows],
            returns=self._returns[rows],
            lengths=self._steps[rows],
            success_once=self._success_once[rows] if known else None,
            success_at_end=self._success[rows] if known else None,
        )


def _last_true(columns: BoolArray) -> IntArray:
    """Return the last column of each row [k, C] that is true; the last of all where none is."""
    return columns.shape[1] - 1 - np.argmax(columns[:, ::-1], axis=1)

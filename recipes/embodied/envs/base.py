"""The interface of batched environments.

An environment holds `num_envs` copies of a task and steps them together. `VectorEnv` does what is the same for all of
them: it ends episodes, starts new ones, and reports those that ended. An environment of your own is a subclass with
three methods, `_start`, `_advance` and `_observe`; `env_type: package.module:Class` names it. Two more, `_save` and
`_load`, let a resumed run continue in the middle of an episode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import (
    BoolArray,
    EnvSettings,
    EnvSpec,
    FloatArray,
    IntArray,
    Observation,
    StepResult,
    Transition,
)
from recipes.embodied.envs.env_state import State, observation_digest
from recipes.embodied.envs.first_step import check_observations, check_transition
from recipes.embodied.envs.nonfinite import NonFiniteGuard
from recipes.embodied.envs.observation_keys import camera_of
from recipes.embodied.envs.running import RunningEpisodes
from recipes.embodied.envs.starts import Starts
from recipes.embodied.interventions.executed import ExecutedActions
from recipes.embodied.interventions.intervention import (
    EnvProgress,
    HandMotion,
    InterventionSource,
    SuccessJudge,
    Verdict,
)
from rlinf_core import ConfigError

# Is told of every step, before any episode begins anew: who was stepped, whose task ended, who was cut off; bool [B].
Watcher: TypeAlias = Callable[[BoolArray, BoolArray, BoolArray], None]
# How an episode ends, besides the names that an environment gives to its failures (`_failures`).
SUCCESS: Final = "success"
TIME_OUT: Final = "time out"
FAILED: Final = "failed"
ENDED: Final = "ended"  # success is not known


class VectorEnv(ABC):
    """A batch of environments with the same task.

    An episode ends when the task does (unless `ignore_terminations`) or after `max_episode_steps`. With `auto_reset` a
    new one starts in place; without, the environment rests until `reset`. Members of a group (`group_size` neighbours)
    begin their n-th episode after a reset from equal starts.

    Attributes:
        numbers: int64 [B], those of the environments among all of the job.
        default_max_episode_steps: limit where the settings give none; None: episodes are not limited. A subclass may
            set it, for the class or in its constructor.
        watcher: is called after every step of an action; None: nobody is.
        intervention: takes over from the policy; None: nobody does.
        judge: says which episodes are solved, and nothing else is rewarded; None: the environment does.
        alters_actions: whether `_advance` may carry out other actions than it is given, `Transition.actions`.
        paces_itself: whether a step takes as long as an action does on a real arm.
    """

    default_max_episode_steps: int | None = 50
    alters_actions: ClassVar[bool] = False
    paces_itself: bool = False

    def __init__(self, settings: EnvSettings) -> None:
        count = settings.num_envs
        self.settings = settings
        self.num_envs = count
        self.numbers = settings.first_env + np.arange(count)
        self._starts = Starts(settings.seed, self.numbers // settings.group_size)
        # The number of the last reset; -1 before the first.
        self._reset = -1
        # Whether `_observe` follows the action that `_advance` is given.
        self._observed_next = False
        # Whether the first observations and the first step were held against `spec`.
        self._observation_checked = self._step_checked = False
        self._episodes = RunningEpisodes(count)
        self._guard = NonFiniteGuard(settings.on_nonfinite, self.numbers, self._episodes)
        self.watcher: Watcher | None = None
        self.intervention: InterventionSource | None = None
        self.judge: SuccessJudge | None = None

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

    def _foresee(self, actions: NDArray[Any]) -> None:  # noqa: B027 - most gain nothing by it
        """Learn the actions [B, C, A] that `_advance` will be given, each as long as its episode goes on."""

    def expert(self) -> FloatArray | None:
        """Return actions of a scripted expert in the present states, float32 [B, A].

        A function of the state alone, so that it can be asked for in states that a policy got into, too.

        Returns:
            None where there is no expert for this task.
        """
        return None

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """Return the action, float32 [A], that moves the hand of an environment as a person asks.

        By default an action begins with the motion along the axes, then come the turns about them as far as there is
        room, and the last of more than three numbers closes the gripper (1) or opens it (-1).

        Raises:
            ConfigError: actions are choices.
        """
        if self.spec.num_choices is not None:
            raise ConfigError(
                "a person cannot steer an environment whose actions are choices",
                help="take `env.train.intervention` out, or give your environment a `steer`",
            )
        found = np.zeros(self.action_size, np.float32)
        axes = (*motion.linear, *motion.angular)[: self.action_size - (self.action_size > 3)]
        found[: len(axes)] = axes
        if self.action_size > 3:
            found[-1] = 1 if motion.gripper_closed else -1
        return found

    @property
    def action_size(self) -> int:
        """Numbers of an action, A."""
        return self.spec.action_size

    @property
    def progress(self) -> EnvProgress:
        """The step that is about to be taken."""
        return EnvProgress(self.numbers, self._reset, self._episodes.episode, self._episodes.steps)

    @property
    def reports_actions(self) -> bool:
        """Whether the result of a step tells what was carried out, because that may be other than what was asked."""
        return self.alters_actions or self.intervention is not None

    def _failures(self) -> NDArray[np.str_] | None:
        """Return what has gone wrong in each running episode, such as `dropped`, text [B]; empty: nothing.

        It is asked for where an episode ends without success.
        """
        return None

    def look(self, rows: IntArray) -> State | None:
        """Return what videos need of the present states of `rows`, arrays [n, ...] by name; by default camera images.

        Returns:
            None where there is nothing to see.
        """
        found = {name: array[rows] for name, array in self._observe().items() if camera_of(name) is not None}
        return found or None

    def picture(self, seen: State) -> NDArray[np.uint8]:
        """Return what `look` saw as pictures, uint8 [n, H, W, 3]; by default the images side by side."""
        height = max(each.shape[1] for each in seen.values())
        padded = [np.pad(each, ((0, 0), (0, height - each.shape[1]), (0, 0), (0, 0))) for each in seen.values()]
        return np.concatenate(padded, axis=2)

    def outcomes(self, rows: IntArray, truncated: BoolArray) -> list[str]:
        """Return how the episodes of `rows` ended, while their last states are the present ones.

        Args:
            rows: int64 [n].
            truncated: bool [n], the episode was cut off.
        """
        solved, failures = self._episodes.success, self._failures()
        found: list[str] = []
        for row, cut in zip(rows.tolist(), truncated.tolist(), strict=True):
            named = "" if failures is None else str(failures[row])
            if not (self.knows_success or self.judge is not None):
                found.append(TIME_OUT if cut else ENDED)
            else:
                found.append(SUCCESS if solved[row] else named or (TIME_OUT if cut else FAILED))
        return found

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release what the environments hold. May be called twice."""

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated; None: never."""
        return self.settings.max_episode_steps or self.default_max_episode_steps

    @property
    def control_hz(self) -> float | None:
        """Actions in a second of the simulated or real arm; None: not known."""
        return None

    def first_starts(self) -> list[dict[str, int]]:
        """Return, for each environment, what its first episode after the last reset began from: the `seed` of all that
        is drawn, and with fixed starts the `number` of one."""
        self._starts.begin(self._reset)
        rows = np.arange(self.num_envs)
        return [{"seed": seed} for seed in self._starts.of(rows, np.zeros(self.num_envs, np.int64)).seeds()]

    @property
    def started(self) -> bool:
        """Whether episodes are under way, after `reset` or `load`."""
        return self._reset >= 0

    @property
    def solved(self) -> BoolArray:
        """bool [B], the task is solved in the present state, or was in the last one of an episode that is over."""
        return self._episodes.success.copy()

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
            EnvContractError: the first observations are not as `spec` says.
            NonFiniteError: an observation holds a NaN or an infinity.
        """
        self._reset = self._reset + 1 if number is None else number
        self._starts.begin(self._reset)
        self._episodes.reset()
        self._begin(np.arange(self.num_envs))
        return self.observe()

    def observe(self) -> Observation:
        """Return the present observations, of episodes that are under way.

        Raises:
            NonFiniteError: one of them holds a NaN or an infinity.
        """
        observations = self._observe()
        if not self._observation_checked:
            check_observations(self.spec, self.num_envs, observations)
            self._observation_checked = True
        self._guard.check_observations(observations)
        return observations

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Carry out a chunk of actions.

        Args:
            actions: float32 [B, C, A], numbers beyond -1 and 1 count as those; or int64 [B, C, 1], choices.

        Raises:
            NonFiniteError: an action is not finite, or a reward or an observation is not and `on_nonfinite` is `stop`.
        """
        self._guard.check_actions(actions)
        chunk = actions.shape[1]
        rewards = np.zeros((self.num_envs, chunk), np.float32)
        flags = np.zeros((3, self.num_envs, chunk), np.bool_)
        terminations, truncations, valid = flags[0], flags[1], flags[2]
        resting = self._episodes.resting.copy()
        # Few operations on arrays: in a small batch of a fast simulator each of them is felt.
        some_rest = np.count_nonzero(resting) > 0
        executed = ExecutedActions(actions, self.intervention) if self.reports_actions else None
        if executed is None and self.judge is None and self.watcher is None:
            self._foresee(actions)
        for index in range(chunk):
            active = ~resting if some_rest else True
            rows = np.flatnonzero(active) if some_rest else None
            if rows is not None and not len(rows):
                break
            valid[:, index] = active
            if self.settings.mask_after_success:  # steps that are carried out and not learned from
                valid[:, index] &= ~self._episodes.success_once
            self._observed_next = index == chunk - 1 or self.judge is not None
            moved = self._advance(actions[:, index], rows) if executed is None else self._obey(executed, index, rows)
            if not self._step_checked:
                check_transition(self.num_envs, moved)
                self._step_checked = True
            if self.judge is not None:
                verdicts = self.judge.judge(self._observe())
                moved = judged(unrewarded(moved), verdicts | ({} if executed is None else executed.verdicts))
            moved = self._guard.finite_rewards(moved, valid[:, index])
            self._account(moved, active, rewards[:, index], terminations[:, index], truncations[:, index])
            if self.watcher is not None:
                self.watcher(~resting, terminations[:, index], truncations[:, index])
            resting |= terminations[:, index]
            resting |= truncations[:, index]
            some_rest = np.count_nonzero(resting) > 0
        observations = self._guard.finite_observations(self._observe(), resting, truncations, valid)
        fresh = resting > self._episodes.resting
        told = (None, None) if executed is None else (executed.actions, executed.taken)
        if not np.count_nonzero(fresh):
            return StepResult(observations, rewards, terminations, truncations, valid, None, None, *told)
        final, ended = observations, np.flatnonzero(fresh)
        knows_success = self.knows_success or self.judge is not None
        episodes = self._episodes.finished(ended, knows_success=knows_success)
        if self.settings.auto_reset:
            self._episodes.episode[ended] += 1
            self._begin(ended)
            observations = self.observe()
        else:
            self._episodes.resting[:] = resting
        return StepResult(observations, rewards, terminations, truncations, valid, final, episodes, *told)

    def _obey(self, executed: ExecutedActions, index: int, rows: IntArray | None) -> Transition:
        """Carry out the policy's action or that of who intervenes, and keep which one it was."""
        moved = self._advance(executed.take(index), rows)
        if moved.actions is not None:
            executed.replace(index, moved.actions)
        return moved if self.judge is not None else judged(moved, executed.verdicts)

    def save(self) -> State | None:
        """Return the state of all episodes, as arrays [B, ...] by name; None where `_save` returns none."""
        own = self._save()
        if own is None:
            return None
        return {
            "number": self.numbers,
            "reset": np.full(self.num_envs, self._reset),
            **self._episodes.save(),
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
        self._episodes.load(state)
        self._load({name.removeprefix("own/"): array for name, array in state.items() if name.startswith("own/")})
        return np.array_equal(observation_digest(self._observe()), state["digest"])

    def _begin(self, rows: IntArray) -> None:
        self._episodes.begin(rows)
        self._start(rows, self._starts.of(rows, self._episodes.episode[rows]))

    def _account(
        self,
        moved: Transition,
        active: BoolArray | Literal[True],
        rewards: FloatArray,
        terminations: BoolArray,
        truncations: BoolArray,
    ) -> None:
        """Write a transition into the columns of the result, and add it to the running episodes.

        Args:
            moved: what the environments did.
            active: environments that were stepped; True: all.
            rewards: column to write, [B], as are the others.
            terminations: whether the task ended the episode.
            truncations: whether a limit of steps ended it.
        """
        given = moved.rewards
        if self.settings.success_reward:
            solved = np.zeros(self.num_envs, np.bool_) if moved.successes is None else moved.successes
            given = (solved & ~self._episodes.success_once).astype(np.float32)
        np.multiply(given, self.settings.reward_coef, out=rewards, where=active)
        self._episodes.add(moved, rewards, active)
        limit = self.max_episode_steps
        if limit is not None:
            np.greater_equal(self._episodes.steps, limit, out=truncations)
        if moved.truncations is not None:
            truncations |= moved.truncations
        if active is not True:
            truncations &= active
        if not self.settings.ignore_terminations:
            np.copyto(terminations, moved.terminations, where=active)


def unrewarded(moved: Transition) -> Transition:
    """Return a transition without what the environment thinks of it."""
    nothing = np.zeros(len(moved.rewards), np.bool_)
    return replace(moved, rewards=np.zeros_like(moved.rewards), terminations=nothing, successes=nothing)


def judged(moved: Transition, verdicts: dict[int, Verdict]) -> Transition:
    """Return a transition as a person judges it: the episode ends, and a success is rewarded by 1 and counts."""
    if not verdicts:
        return moved
    rewards, terminations = moved.rewards.copy(), moved.terminations.copy()
    successes = np.zeros(len(rewards), np.bool_) if moved.successes is None else moved.successes.copy()
    for row, verdict in verdicts.items():
        rewards[row] += (verdict == "success") and not successes[row]
        terminations[row], successes[row] = True, verdict == "success"
    return replace(moved, rewards=rewards, terminations=terminations, successes=successes)

"""Bookkeeping of the current episodes of a batch: the accounting of transitions, and the history of observations."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import (
    BoolArray,
    EnvSettings,
    FinishedEpisodes,
    FloatArray,
    IntArray,
    Observation,
    Transition,
)
from recipes.embodied.envs.env_state import State
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, past_key
from recipes.embodied.interventions.intervention import Verdict

# How an episode ends, besides the failures that an environment names (`_failures`).
SUCCESS: Final = "success"
TIME_OUT: Final = "time out"
FAILED: Final = "failed"
ENDED: Final = "ended"  # success is unknown
ERROR: Final = "error"  # raised by the environment's code
# The attributes in a saved state, under these names.
_COUNTERS: Final = ("episode", "steps", "returns", "success_once", "success", "resting")

_SAVED_HISTORY: Final = "history/"
Observe: TypeAlias = Callable[[], Observation]


class RunningEpisodes:
    """Counters of a batch's episodes, apart from the environment's own state.

    Args:
        count: environments of the batch, B.

    Attributes:
        episode: int64 [B], number of the current episode since the reset, from 0.
        steps: int64 [B], steps of the current episode.
        returns: float32 [B], sum of its rewards.
        success_once: bool [B], solved in some state.
        success: bool [B], solved in the current state.
        resting: bool [B], ended and not restarted.
        discarded: bool [B], ended and discarded by a person.
        erred: bool [B], ended by an error of the environment.
        judged: whether success or failure was ever reported.
    """

    judged: bool = False

    def __init__(self, count: int) -> None:
        self.episode = np.zeros(count, np.int64)
        self.steps = np.zeros(count, np.int64)
        self.returns = np.zeros(count, np.float32)
        # One array, which a new episode clears at once.
        self._flags = np.zeros((4, count), np.bool_)
        self.success_once, self.success, self.discarded, self.erred = self._flags
        self.resting = np.zeros(count, np.bool_)

    def reset(self) -> None:
        """Restart the episode counts, and let every environment step."""
        self.episode[:] = 0
        self.resting[:] = False

    def begin(self, rows: IntArray) -> None:
        """Clear the counters of environments that start an episode."""
        self.steps[rows] = 0
        self.returns[rows] = 0
        self._flags[:, rows] = False

    def add(self, moved: Transition, rewards: FloatArray, active: BoolArray | Literal[True]) -> None:
        """Add a step of the active environments (True: all); `rewards` are 0 for the others."""
        self.returns += rewards
        self.steps += 1 if active is True else active
        if moved.successes is not None:
            self.judged = True
            np.copyto(self.success, moved.successes, where=active)
            self.success_once |= self.success

    def account(
        self,
        moved: Transition,
        active: BoolArray | Literal[True],
        rewards: FloatArray,
        terminations: BoolArray,
        truncations: BoolArray,
        settings: EnvSettings,
        limit: int | None,
    ) -> None:
        """Write a transition into the columns of the result, and add it to the episodes.

        Args:
            moved: the transition of the environments.
            active: environments that were stepped; True: all.
            rewards: column to write, [B], like the next two.
            terminations: whether the task ended the episode.
            truncations: whether a limit of steps ended it.
            settings: the settings of the environments.
            limit: steps after which an episode is truncated; None: never.
        """
        scaled = moved.rewards
        if settings.success_reward:
            solved = np.zeros(len(self.steps), np.bool_) if moved.successes is None else moved.successes
            scaled = (solved & ~self.success_once).astype(np.float32)
        if active is True and settings.reward_coef == 1:
            rewards[:] = scaled
        else:
            np.multiply(scaled, settings.reward_coef, out=rewards, where=active)
        self.add(moved, rewards, active)
        if limit is not None:
            np.greater_equal(self.steps, limit, out=truncations)
        if moved.truncations is not None:
            truncations |= moved.truncations
        if active is not True:
            truncations &= active
        if settings.ignore_terminations:
            return
        if active is True:
            terminations[:] = moved.terminations
        else:
            np.copyto(terminations, moved.terminations, where=active)

    def finished(self, rows: IntArray, *, knows_success: bool) -> FinishedEpisodes:
        """Return the records of the finished episodes of some environments."""
        return FinishedEpisodes(
            env=rows,
            number=self.episode[rows],
            returns=self.returns[rows],
            lengths=self.steps[rows],
            success_once=self.success_once[rows] if knows_success else None,
            success_at_end=self.success[rows] if knows_success else None,
            erred=self.erred[rows],
        )

    def outcomes(
        self, rows: IntArray, truncated: BoolArray, failures: NDArray[np.str_] | None, raised: Collection[int]
    ) -> list[str]:
        """Return how the episodes of `rows` ended.

        Args:
            rows: int64 [n].
            truncated: bool [n], the episode was truncated.
            failures: [B], the environment's own names of failures, empty without one; None: it has none.
            raised: rows of which the environment raised an error.
        """
        outcomes: list[str] = []
        for row, cut in zip(rows.tolist(), truncated.tolist(), strict=True):
            named = "" if failures is None else str(failures[row])
            if self.erred[row] or row in raised:
                outcomes.append(ERROR)
            elif not self.judged:
                outcomes.append(TIME_OUT if cut else ENDED)
            else:
                outcomes.append(SUCCESS if self.success[row] else named or (TIME_OUT if cut else FAILED))
        return outcomes

    def fail(self, rows: IntArray) -> None:
        """Count the current episodes of some environments as failed by an error of the environment."""
        self.erred[rows] = True
        self.success[rows] = self.success_once[rows] = False

    def save(self) -> State:
        """Return all counts, by name."""
        return {name: getattr(self, name).copy() for name in _COUNTERS}

    def load(self, state: State) -> None:
        """Take the counts that `save` returned."""
        for name in _COUNTERS:
            getattr(self, name)[:] = state[name]


def without_env_rewards(moved: Transition) -> Transition:
    """Return a transition without the environment's own rewards and successes; its failures still end an episode."""
    nothing = np.zeros(len(moved.rewards), np.bool_)
    failed = moved.terminations if moved.successes is None else moved.terminations & ~moved.successes
    return replace(moved, rewards=np.zeros_like(moved.rewards), terminations=failed, successes=nothing)


def apply_verdicts(moved: Transition, verdicts: dict[int, Verdict]) -> Transition:
    """Return a transition as judged by a person: episodes end; success has reward 1, and a discarded episode fails."""
    if not verdicts:
        return moved
    nothing = np.zeros(len(moved.rewards), np.bool_)
    rewards, terminations = moved.rewards.copy(), moved.terminations.copy()
    successes, truncations, failures = (
        nothing.copy() if flags is None else flags.copy()
        for flags in (moved.successes, moved.truncations, moved.failures)
    )
    for row, verdict in verdicts.items():
        rewards[row] += (verdict == "success") and not successes[row]
        successes[row] = verdict == "success"
        terminations[row] = verdict != "discard"
        truncations[row] |= verdict == "discard"
        failures[row] |= verdict == "discard"
    discards = "discard" in verdicts.values()
    return replace(
        moved,
        rewards=rewards,
        terminations=terminations,
        successes=successes,
        truncations=truncations if discards else moved.truncations,
        failures=failures if discards else moved.failures,
    )


def add_rewards(moved: Transition, rewards: dict[int, float]) -> Transition:
    """Return a transition with the rewards that a person adds, by row."""
    if not rewards:
        return moved
    total = moved.rewards.copy()
    for row, reward in rewards.items():
        total[row] += reward
    return replace(moved, rewards=total)


class ObservationHistory:
    """The last T - 1 observations of each environment, one per step, padded with the first one of the episode.

    Args:
        length: T, including the current one.

    Attributes:
        keeps: whether there is a history, T > 1.
    """

    def __init__(self, length: int) -> None:
        self.keeps = length > 1
        self._length = length - 1
        # Oldest first, [B, T - 1, ...].
        self._past: Observation = {}
        self._present: Observation = {}

    def begin(self, rows: IntArray, observe: Observe) -> None:
        """Start new episodes in some environments.

        Args:
            rows: int64 [n], the environments.
            observe: returns the current observations of all environments.
        """
        if not self.keeps:
            return
        self._present = _numbers(observe())
        for name, array in self._present.items():
            if name not in self._past:
                self._past[name] = np.repeat(array[:, None], self._length, axis=1)
            self._past[name][rows] = array[rows, None]

    def move(self, rows: IntArray | None, observe: Observe) -> None:
        """Record a step.

        Args:
            rows: int64 [n], environments that were stepped; None: all.
            observe: see `begin`.
        """
        if not self.keeps:
            return
        moved = slice(None) if rows is None else rows
        for name, array in self._present.items():
            past = self._past[name][moved]
            self._past[name][moved] = np.concatenate((past[:, 1:], array[moved, None]), axis=1)
        self._present = _numbers(observe())

    def extended(self, observations: Observation) -> Observation:
        """Return observations [B, ...] with the earlier ones, `past.NAME` [B, T - 1, ...], oldest first."""
        if not self.keeps:
            return observations
        return observations | {past_key(name): array.copy() for name, array in self._past.items()}

    def save(self) -> State:
        """Return the history as arrays [B, ...] by name."""
        return {f"{_SAVED_HISTORY}{name}": array for name, array in self._past.items()}

    def load(self, state: State, observations: Observation) -> None:
        """Continue with a saved history and the current observations."""
        if not self.keeps:
            return
        self._present = _numbers(observations)
        saved = {
            name.removeprefix(_SAVED_HISTORY): array for name, array in state.items() if name.startswith(_SAVED_HISTORY)
        }
        self._past = {name: array.copy() for name, array in saved.items()}


def _numbers(observations: Observation) -> Observation:
    """Return all observations except the instruction, which is constant in an episode."""
    return {name: array for name, array in observations.items() if name != INSTRUCTIONS}

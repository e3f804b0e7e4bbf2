"""Batched environments: the handling of episodes, common to all of them, on top of the methods of a task.

An environment holds `num_envs` copies of a task and steps them together. `VectorEnv` ends episodes, starts new ones,
and reports those that ended. A custom environment is a subclass with `spec` and three methods, `_start`, `_advance` and
`_observe`; `env_type: package.module:Class` names it. Two more, `_save` and `_load`, let a resumed run continue within
an episode. `TaskMethods` lists all methods that a subclass may implement.

Only the order of a step is decided here. Other modules hold what may change for other reasons: the counters and
outcomes of episodes, the accounting of transitions and the history of observations (`running`), what an environment
promises (`checks`), starts, interventions, and the replay of episodes after an error. Most of the rest is the interface
of a batch, with its docstrings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from recipes.embodied.envs.checks import (
    NonFiniteGuard,
    ObservationCheck,
    broken,
    check_actions,
    check_groups,
    check_rate,
)
from recipes.embodied.envs.env_spec import (
    BoolArray,
    EnvError,
    EnvSettings,
    FinishedEpisodes,
    FloatArray,
    IntArray,
    Observation,
    StepResult,
    Transition,
)
from recipes.embodied.envs.env_state import Starts, State, observation_digest
from recipes.embodied.envs.repeating_batch import Batch, RepeatingBatch
from recipes.embodied.envs.running import (
    ObservationHistory,
    RunningEpisodes,
    add_rewards,
    apply_verdicts,
    without_env_rewards,
)
from recipes.embodied.interventions.intervention import (
    STILL,
    EnvProgress,
    ExecutedActions,
    HandMotion,
    InterventionSource,
    SuccessJudge,
    Verdict,
    check_verdicts,
)
from recipes.training.arrays import Array

# Called after every step, before any reset, with masks bool [B]: stepped, terminated, truncated.
Watcher: TypeAlias = Callable[[BoolArray, BoolArray, BoolArray], None]


class VectorEnv(Batch):
    """A batch of environments with the same task.

    An episode ends when the task does (unless `ignore_terminations`) or after `max_episode_steps`. With `auto_reset` a
    new one starts in place; without, the environment rests until `reset`. Members of a group (`group_size` neighbors)
    begin their n-th episode after a reset from equal starts.

    Attributes:
        numbers: int64 [B], the numbers of the environments within the job.
        watcher: called after every action; None: no call.
        intervention: the source that takes over from the policy; None: no interventions.
        judge: decides which episodes are solved, which alone is rewarded; None: the environment decides and rewards.
    """

    def __init__(self, settings: EnvSettings) -> None:
        earlier = frozenset(vars(self))
        count = settings.num_envs
        super().__init__(settings)
        self.num_envs = count
        self.numbers = settings.first_env + np.arange(count)
        self._starts = Starts(settings.seed, self.numbers // settings.group_size)
        # The number of the last reset; -1 before the first.
        self._reset = -1
        # Whether `_observe` follows the action that is passed to `_advance`.
        self._observed_next = False
        self._observation_check = ObservationCheck(count, lambda: self.spec)
        self._episodes = RunningEpisodes(count)
        self._guard = NonFiniteGuard(settings.on_nonfinite, self.numbers, self._episodes)
        self._history = ObservationHistory(settings.observed_steps)
        self.watcher: Watcher | None = None
        self.intervention: InterventionSource | None = None
        self.judge: SuccessJudge | None = None
        self._executed_actions: FloatArray | None = None
        # Errors of running episodes, by row, whose failures follow with the steps. Row -1: of an unknown episode.
        self._raised: dict[int, EnvError] = {}
        self._simulator = RepeatingBatch(self)
        self._kept = frozenset(vars(self)) - earlier

    @property
    def progress(self) -> EnvProgress:
        """The step that is about to be taken."""
        return EnvProgress(self.numbers, self._reset, self._episodes.episode, self._episodes.steps)

    @property
    def reports_actions(self) -> bool:
        """Whether step results report executed actions, which may differ from the requested ones."""
        return self.alters_actions or self.intervention is not None

    @property
    def executed_actions(self) -> FloatArray:
        """float32 [B, A], the last executed actions of the current episodes, if actions are reported; before the first
        action zero motion and an open gripper.
        """
        if self._executed_actions is None:
            self._executed_actions = np.empty((self.num_envs, self.action_size), np.float32)
            self._forget_actions(np.arange(self.num_envs))
        return self._executed_actions

    def hold_actions(self, rows: IntArray) -> FloatArray:
        """Return the actions [n, A] that hold the environments of `rows` still, as for a person who does not move;
        discrete actions are 0.
        """
        if self.spec.num_choices is not None:
            return np.zeros((len(rows), self.action_size), np.float32)
        motions = [HandMotion(STILL, STILL, self.gripper_is_closed(row), moves_gripper=False) for row in rows.tolist()]
        held = np.stack([self.steer(motion, row) for motion, row in zip(motions, rows.tolist(), strict=True)])
        if held.shape[1:] != (self.action_size,):
            said = f"`steer` returns {list(held.shape[1:])}; an action is {[self.action_size]}"
            raise broken(said, "return float32 [A], a number for each of an action")
        return held

    def outcomes(self, rows: IntArray, truncated: BoolArray) -> list[str]:
        """Return how the episodes of `rows` ended; the current states are their last ones.

        Args:
            rows: int64 [n].
            truncated: bool [n], the episode was truncated.
        """
        return self._episodes.outcomes(rows, truncated, self._failures(), self._raised)

    def first_starts(self) -> list[dict[str, int]]:
        """Return the start of each environment's first episode after the last reset: `seed`, and `number` of a fixed
        start.
        """
        self._starts.begin(self._reset)
        rows = np.arange(self.num_envs)
        return [{"seed": seed} for seed in self._starts.of(rows, np.zeros(self.num_envs, np.int64)).seeds()]

    @property
    def started(self) -> bool:
        """Whether episodes are in progress, after `reset` or `load`."""
        return self._reset >= 0

    @property
    def knows_success(self) -> bool:
        """Whether success or failure was ever reported, by the environment or in its place by a judge."""
        return self._episodes.judged

    @property
    def solved(self) -> BoolArray:
        """bool [B], whether the task is solved in the current state, or in the last state of a finished episode."""
        return self._episodes.success.copy()

    @property
    def discarded(self) -> BoolArray:
        """bool [B], whether a person has discarded the current or finished episode."""
        return self._episodes.discarded.copy()

    def reset(self, number: int | None = None) -> Observation:
        """Start new episodes everywhere.

        Args:
            number: the number of the reset. The same number gives the same starts, so that a resumed run sees the same
                episodes. Default: one more than the last, from 0.

        Returns:
            The first observations.

        Raises:
            EnvContractError: the first observations do not match `spec`, or differ within a group.
            NonFiniteError: an observation holds a NaN or an infinity.
        """
        self._reset = self._reset + 1 if number is None else number
        self._starts.begin(self._reset)
        self._episodes.reset()
        self._raised.clear()
        self._begin(np.arange(self.num_envs))
        is_first = not self._observation_check.began
        if is_first:
            check_rate(self.control_hz)
        observations = self.observe()
        if is_first and not self.paces_itself:
            check_groups(self.settings.group_size, self.numbers, observations)
        return observations

    def observe(self) -> Observation:
        """Return the current observations of unfinished episodes.

        Raises:
            EnvContractError: an observation does not match `spec`.
            NonFiniteError: an observation holds a NaN or an infinity.
        """
        observations = self._observation_check.checked(self._simulator.observe())
        self._observation_check.keep(observations)
        self._guard.check_observations(observations)
        return self._history.extended(observations)

    def step(self, actions: Array) -> StepResult:
        """Execute a chunk of actions.

        Args:
            actions: float32 [B, C, A], clipped to -1 to 1; or int64 [B, C, 1], discrete.

        Raises:
            ConfigError: the actions have another shape or type, or a choice does not exist.
            EnvContractError: an observation does not match `spec`, or changed after it was returned; or the result of a
                step has not one value for each environment.
            NonFiniteError: an action is not finite, or a reward or an observation is not and `on_nonfinite` is `stop`.
        """
        spec = self._observation_check.spec
        check_actions(spec, self.num_envs, actions)
        self._guard.check_actions(actions)
        chunk = actions.shape[1]
        rewards = np.zeros((self.num_envs, chunk), np.float32)
        failed: BoolArray | None = None
        flags = np.zeros((3, self.num_envs, chunk), np.bool_)
        terminations, truncations, valid = flags[0], flags[1], flags[2]
        resting = self._episodes.resting.copy()
        # Few array operations: in a small batch of a fast simulator each one matters.
        some_rest = np.count_nonzero(resting) > 0
        executed = None
        if self.reports_actions:
            how = self.hold_actions, spec.carried_out, spec.num_choices
            executed = ExecutedActions(actions, self.intervention, *how)
        looks = self.judge is not None or self._history.keeps
        if executed is None and not looks and self.watcher is None:
            self._foresee(actions)
        for index in range(chunk):
            active = ~resting if some_rest else True
            rows = np.flatnonzero(active) if some_rest else None
            if rows is not None and not len(rows):
                break
            valid[:, index] = active
            self._observed_next = index == chunk - 1 or looks
            if executed is None:
                moved = self._simulator.advance(actions[:, index], rows)
            else:
                moved = self._obey(executed, index, rows)
            if self.judge is not None:
                verdicts = self.judge.judge(self._simulator.observe())
                check_verdicts(self.judge, self.num_envs, verdicts)
                verdicts |= {} if executed is None else executed.verdicts
                moved = self._judged(without_env_rewards(moved), verdicts)
            if executed is not None:
                moved = add_rewards(moved, executed.rewards)
            if moved.failures is not None and np.count_nonzero(moved.failures):
                failed = moved.failures.copy() if failed is None else failed | moved.failures
            moved = self._guard.finite_rewards(moved, valid[:, index])
            columns = rewards[:, index], terminations[:, index], truncations[:, index]
            self._episodes.account(moved, active, *columns, self.settings, self.max_episode_steps)
            self._history.move(rows, self._simulator.observe)
            if self.watcher is not None:
                self.watcher(~resting, terminations[:, index], truncations[:, index])
            resting |= terminations[:, index]
            resting |= truncations[:, index]
            some_rest = np.count_nonzero(resting) > 0
        observations = self._observation_check.checked(self._simulator.observe())
        self._observation_check.check_kept()
        lost = self._simulator.take_lost()
        if lost is not None:
            failed = lost if failed is None else failed | lost
            truncations[:, -1] |= lost & ~resting
            resting |= lost
        finite = self._guard.finite_observations(observations, resting, truncations, valid)
        observations = self._history.extended(finite)
        fresh = resting > self._episodes.resting
        errors = self._take_errors(failed, terminations, truncations, valid) if self._raised else ()
        if failed is not None:
            valid[failed] = False
            failed = failed if failed.any() else None
        carried_out = (None, None) if executed is None else (executed.actions, executed.taken)
        outcome = rewards, terminations, truncations, valid
        if not np.count_nonzero(fresh):
            return StepResult(observations, *outcome, None, None, *carried_out, None, errors)
        episodes = self._end(np.flatnonzero(fresh), failed)
        new = self.observe() if self.settings.auto_reset else observations
        return StepResult(new, *outcome, observations, episodes, *carried_out, failed, errors)

    def _end(self, ended: IntArray, failed: BoolArray | None) -> FinishedEpisodes:
        """Return the records of episodes that ended and have not `failed`; begin new ones, or let them rest."""
        whole = ended if failed is None else ended[~failed[ended]]
        episodes = self._episodes.finished(whole, knows_success=self.knows_success)
        if self.settings.auto_reset:
            self._episodes.episode[ended] += 1
            self._begin(ended)
        else:
            self._episodes.resting[ended] = True
        return episodes

    def _take_errors(
        self, failed: BoolArray | None, terminations: BoolArray, truncations: BoolArray, valid: BoolArray
    ) -> list[EnvError]:
        """Return the errors of the episodes that end here by an error; they count as failures and leave `failed`.

        Args:
            failed: bool [B], whether the episode ended by a failure; changed, like the others, [B, C].
            terminations: set, since no value estimates the rest of such an episode.
            truncations: unset, since such an episode is not truncated.
            valid: unset for an episode that has not begun: none of its steps counts.
        """
        rows = [] if failed is None else [row for row in np.flatnonzero(failed).tolist() if row in self._raised]
        for row in rows:
            at = int(truncations[row].argmax())
            terminations[row, at], truncations[row, at] = True, False
            valid[row] &= self._raised[row].began
        if failed is not None:
            failed[rows] = False
        self._episodes.fail(np.array(rows, np.int64))
        return [self._raised.pop(row) for row in (*rows, -1) if row in self._raised]

    def _obey(self, executed: ExecutedActions, index: int, rows: IntArray | None) -> Transition:
        """Execute the policy's or an intervention's action, and record which."""
        moved = self._simulator.advance(executed.take(index), rows)
        if moved.actions is not None:
            self._guard.check_executed(moved.actions, rows)
            executed.replace(index, moved.actions)
        self.executed_actions[:] = executed.actions[:, index]
        return moved if self.judge is not None else self._judged(moved, executed.verdicts)

    def _judged(self, moved: Transition, verdicts: dict[int, Verdict]) -> Transition:
        for row, verdict in verdicts.items():
            self._episodes.discarded[row] |= verdict == "discard"
        return apply_verdicts(moved, verdicts)

    def save(self) -> State | None:
        """Return the state of all episodes, as arrays [B, ...] by name; None if `_save` returns None."""
        own = self._save()
        if own is None:
            return None
        return {
            "number": self.numbers,
            "reset": np.full(self.num_envs, self._reset),
            **self._episodes.save(),
            "digest": observation_digest(self._observe()),
            **({"executed_actions": self.executed_actions.copy()} if self.reports_actions else {}),
            **{f"own/{name}": array for name, array in own.items()},
            **self._history.save(),
        }

    def load(self, state: State) -> bool:
        """Continue the episodes of a `state` that `save` returned.

        Args:
            state: the rows of these environments.

        Returns:
            Whether the environments observe the same as when their state was saved. If not, the episodes cannot be
            continued, and `reset` must follow.
        """
        self._reset = int(state["reset"][0])
        self._starts.begin(self._reset)
        self._episodes.load(state)
        if "executed_actions" in state:
            self.executed_actions[:] = state["executed_actions"]
        self._load({name.removeprefix("own/"): array for name, array in state.items() if name.startswith("own/")})
        observations = self._observe()
        self._history.load(state, observations)
        return np.array_equal(observation_digest(observations), state["digest"])

    def _forget_actions(self, rows: IntArray) -> None:
        if self._executed_actions is not None:
            self._executed_actions[rows] = 0
            self._executed_actions[rows, -1] = -1 if self.action_size > 3 else 0

    def _begin(self, rows: IntArray) -> None:
        self._forget_actions(rows)
        self._episodes.begin(rows)
        self._simulator.start(rows)
        self._history.begin(rows, self._simulator.observe)

"""Batched environments: episodes, which are the same for all of them, over the methods of a task.

An environment holds `num_envs` copies of a task and steps them together. `VectorEnv` ends episodes, starts new ones,
and reports those that ended. An environment of your own is a subclass with `spec` and three methods, `_start`,
`_advance` and `_observe`; `env_type: package.module:Class` names it. Two more, `_save` and `_load`, let a resumed run
continue in the middle of an episode. `TaskMethods` has all that a subclass may implement.

Its one reason to change is how an episode goes. Counters of episodes, how a transition counts and observations of steps
before (`running`), starts, values that are not finite, and repeating where one raises are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from recipes.embodied.envs.checks import NonFiniteGuard, broken, check_observations
from recipes.embodied.envs.env_spec import (
    BoolArray,
    EnvError,
    EnvSettings,
    FloatArray,
    IntArray,
    Observation,
    StepResult,
    Transition,
)
from recipes.embodied.envs.env_state import State, observation_digest
from recipes.embodied.envs.faults.repeating_batch import RepeatingBatch
from recipes.embodied.envs.running import (
    ObservationHistory,
    RunningEpisodes,
    add_rewards,
    apply_verdicts,
    without_env_rewards,
)
from recipes.embodied.envs.starts import Starts
from recipes.embodied.envs.task_methods import TaskMethods
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
# How an episode ends, besides the names that an environment gives to its failures (`_failures`).
SUCCESS: Final = "success"
TIME_OUT: Final = "time out"
FAILED: Final = "failed"
ENDED: Final = "ended"  # success is not known
ERROR: Final = "error"  # of the environment's own code


class VectorEnv(TaskMethods):
    """A batch of environments with the same task.

    An episode ends when the task does (unless `ignore_terminations`) or after `max_episode_steps`. With `auto_reset` a
    new one starts in place; without, the environment rests until `reset`. Members of a group (`group_size` neighbours)
    begin their n-th episode after a reset from equal starts.

    Attributes:
        numbers: int64 [B], those of the environments among all of the job.
        watcher: called after every step of an action; None: no call.
        intervention: the source that takes over from the policy; None: no interventions.
        judge: says which episodes are solved, and nothing else is rewarded; None: the environment does.
    """

    def __init__(self, settings: EnvSettings) -> None:
        earlier = frozenset(vars(self))
        count = settings.num_envs
        self.settings = settings
        self.num_envs = count
        self.numbers = settings.first_env + np.arange(count)
        self._starts = Starts(settings.seed, self.numbers // settings.group_size)
        # The number of the last reset; -1 before the first.
        self._reset = -1
        # Whether `_observe` follows the action that `_advance` is given.
        self._observed_next = False
        # Whether the first observations were held against `spec`.
        self._observation_checked = False
        self._episodes = RunningEpisodes(count)
        self._guard = NonFiniteGuard(settings.on_nonfinite, self.numbers, self._episodes)
        self._history = ObservationHistory(settings.observed_steps)
        self.watcher: Watcher | None = None
        self.intervention: InterventionSource | None = None
        self.judge: SuccessJudge | None = None
        self._executed_actions: FloatArray | None = None
        # Errors of running episodes, by row; their failures come with the steps. -1: of an unknown one.
        self._raised: dict[int, EnvError] = {}
        self._simulator = RepeatingBatch(self)
        # The attributes that are not the subclass's own, and stay where its simulator is made again.
        self._kept = frozenset(vars(self)) - earlier

    @property
    def progress(self) -> EnvProgress:
        """The step that is about to be taken."""
        return EnvProgress(self.numbers, self._reset, self._episodes.episode, self._episodes.steps)

    @property
    def replaceable(self) -> bool:
        """Whether the batch is made again where it raises, and repeats its episodes. What moves a real arm is not."""
        return self.settings.repeats and not self.paces_itself

    @property
    def reports_actions(self) -> bool:
        """Whether step results report executed actions, which may differ from the requested ones."""
        return self.alters_actions or self.intervention is not None

    @property
    def executed_actions(self) -> FloatArray:
        """float32 [B, A], the actions last carried out in the present episodes, where actions are reported; before the
        first one no motion, and the number that opens a gripper.
        """
        if self._executed_actions is None:
            self._executed_actions = np.empty((self.num_envs, self.action_size), np.float32)
            self._forget_actions(np.arange(self.num_envs))
        return self._executed_actions

    def hold_actions(self, rows: IntArray) -> FloatArray:
        """Return the actions [n, A] that hold the environments of `rows` as they are: those of a person who does not
        move; choices are 0.
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
        """Return how the episodes of `rows` ended; their last states are the current ones.

        Args:
            rows: int64 [n].
            truncated: bool [n], the episode was cut off.
        """
        solved, failures = self._episodes.success, self._failures()
        outcomes: list[str] = []
        for row, cut in zip(rows.tolist(), truncated.tolist(), strict=True):
            named = "" if failures is None else str(failures[row])
            if self._episodes.erred[row] or row in self._raised:
                outcomes.append(ERROR)
            elif not (self.knows_success or self.judge is not None):
                outcomes.append(TIME_OUT if cut else ENDED)
            else:
                outcomes.append(SUCCESS if solved[row] else named or (TIME_OUT if cut else FAILED))
        return outcomes

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated; None: never."""
        return self.settings.max_episode_steps or self.default_max_episode_steps

    def first_starts(self) -> list[dict[str, int]]:
        """Return the start of each environment's first episode after the last reset: the `seed` of all draws, and with
        fixed starts the `number` of one."""
        self._starts.begin(self._reset)
        rows = np.arange(self.num_envs)
        return [{"seed": seed} for seed in self._starts.of(rows, np.zeros(self.num_envs, np.int64)).seeds()]

    @property
    def started(self) -> bool:
        """Whether episodes are in progress, after `reset` or `load`."""
        return self._reset >= 0

    @property
    def solved(self) -> BoolArray:
        """bool [B], whether the task is solved in the current state, or was in the last state of a finished episode."""
        return self._episodes.success.copy()

    @property
    def discarded(self) -> BoolArray:
        """bool [B], whether a person has discarded the present episode, or the finished one."""
        return self._episodes.discarded.copy()

    def reset(self, number: int | None = None) -> Observation:
        """Start new episodes everywhere.

        Args:
            number: the number of the reset. The same number gives the same starts, and so a run that is continued sees
                what it would have seen. Default: one more than the last, from 0.

        Returns:
            The first observations.

        Raises:
            EnvContractError: the first observations are not as `spec` says.
            NonFiniteError: an observation holds a NaN or an infinity.
        """
        self._reset = self._reset + 1 if number is None else number
        self._starts.begin(self._reset)
        self._episodes.reset()
        self._raised.clear()
        self._begin(np.arange(self.num_envs))
        return self.observe()

    def observe(self) -> Observation:
        """Return the current observations of unfinished episodes.

        Raises:
            NonFiniteError: one of them holds a NaN or an infinity.
        """
        observations = self._simulator.observe()
        if not self._observation_checked:
            check_observations(self.spec, self.num_envs, observations)
            self._observation_checked = True
        self._guard.check_observations(observations)
        return self._history.extended(observations)

    def step(self, actions: Array) -> StepResult:
        """Carry out a chunk of actions.

        Args:
            actions: float32 [B, C, A], numbers beyond -1 and 1 count as those; or int64 [B, C, 1], choices.

        Raises:
            NonFiniteError: an action is not finite, or a reward or an observation is not and `on_nonfinite` is `stop`.
        """
        self._guard.check_actions(actions)
        chunk = actions.shape[1]
        rewards = np.zeros((self.num_envs, chunk), np.float32)
        failed: BoolArray | None = None
        flags = np.zeros((3, self.num_envs, chunk), np.bool_)
        terminations, truncations, valid = flags[0], flags[1], flags[2]
        resting = self._episodes.resting.copy()
        # Few operations on arrays: in a small batch of a fast simulator each of them is felt.
        some_rest = np.count_nonzero(resting) > 0
        executed = ExecutedActions(actions, self.intervention, self.hold_actions) if self.reports_actions else None
        looks = self.judge is not None or self._history.keeps
        if executed is None and not looks and self.watcher is None:
            self._foresee(actions)
        for index in range(chunk):
            active = ~resting if some_rest else True
            rows = np.flatnonzero(active) if some_rest else None
            if rows is not None and not len(rows):
                break
            valid[:, index] = active
            if self.settings.mask_after_success:  # steps that are carried out and not trained on
                valid[:, index] &= ~self._episodes.success_once
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
            if moved.failures is not None and moved.failures.any():
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
        observations = self._simulator.observe()
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
        ends = np.count_nonzero(fresh) > 0
        outcome = observations, rewards, terminations, truncations, valid
        result = StepResult(*outcome, None, None, *carried_out, failed if ends else None, errors)
        return self._begun_again(result, fresh) if ends else result

    def _begun_again(self, result: StepResult, fresh: BoolArray) -> StepResult:
        """Return the result of a chunk with the episodes that ended in it, which begin again or rest.

        Args:
            result: the result; its observations are the last ones of these episodes.
            fresh: bool [B], where one ended.
        """
        ended, failed = np.flatnonzero(fresh), result.failed
        observations = result.observations
        knows_success = self.knows_success or self.judge is not None
        whole = ended if failed is None else ended[~failed[ended]]
        episodes = self._episodes.finished(whole, knows_success=knows_success)
        if self.settings.auto_reset:
            self._episodes.episode[ended] += 1
            self._begin(ended)
            observations = self.observe()
        else:
            self._episodes.resting[:] |= fresh
        return replace(result, observations=observations, final_observations=result.observations, episodes=episodes)

    def _take_errors(
        self, failed: BoolArray | None, terminations: BoolArray, truncations: BoolArray, valid: BoolArray
    ) -> list[EnvError]:
        """Return the errors of the episodes that end here by one, which are failures and no longer `failed`.

        Args:
            failed: bool [B], whose episodes ended by a failure; changed, as are the others, [B, C].
            terminations: the task ended there: no value stands for what would have come.
            truncations: and so they are not cut off.
            valid: no step counts of an episode that has not begun.
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
        """Execute the policy's action or that of an intervention, and record which one it was."""
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
        """Return the state of all episodes, as arrays [B, ...] by name; None if `_save` returns none."""
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
        """Continue the episodes of a `state` of `save`.

        Args:
            state: rows of these environments, by their numbers among all.

        Returns:
            Whether the environments observe the same as when their state was saved. Where they do not, their
            episodes cannot be continued, and `reset` has to follow.
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

    def _rebuild(self) -> None:
        """Replace what the constructor of the subclass has made by what it makes now.

        This object stays, which interventions, judge and watcher hold on to; so do its episodes.
        """
        with suppress(Exception):
            self.close()
        fresh = type(self)(self.settings)
        # One dictionary for both: what `fresh` has handed out of itself works on. It must not be collected before.
        vars(fresh).update({name: vars(self)[name] for name in self._kept}, _rebuilt=fresh)
        object.__setattr__(self, "__dict__", vars(fresh))

"""A batch of environments that is replaced when it raises, and whose episodes are then replayed.

A batch that raises does not tell which environment is at fault. All running episodes are replayed on a new batch. If
that raises as well, its environments are stepped one at a time: the episodes of those that raise have failed, and the
others continue. If they cannot be stepped one at a time, as in a simulator that steps all at once, all episodes are
dropped.
"""

# Part of `VectorEnv`, which calls the methods that its subclasses implement.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from recipes.embodied.envs.checks import check_transition, form_of
from recipes.embodied.envs.env_spec import (
    BoolArray,
    EnvError,
    EnvSettings,
    FloatArray,
    IntArray,
    Observation,
    Transition,
)
from recipes.embodied.envs.env_state import Starts, observation_digest
from recipes.embodied.envs.repeating import (
    MOST_REPEATED,
    MOST_STARTS,
    FaultLog,
    RaisedTwiceError,
    RepeatingSimulator,
    SimulatorError,
    env_error,
)
from recipes.embodied.envs.running import RunningEpisodes
from recipes.embodied.envs.task_methods import TaskMethods
from recipes.training.arrays import Array

# The most consecutive actions that may raise on two batches each; a further replacement would be useless.
_MOST_IN_A_ROW: Final = 3
# In `_shown_at`: nothing of the current episode has been observed yet.
_NOTHING: Final = -1
# The row, in the errors of a batch, of an error that cannot be attributed.
_NOBODYS: Final = -1
# The distance between the numbers of an episode and of its replacement.
_APART: Final = 2**32


class Batch(TaskMethods):
    """The part of a `VectorEnv` that replays need besides the methods of its task."""

    settings: EnvSettings
    num_envs: int
    numbers: IntArray
    _episodes: RunningEpisodes
    _starts: Starts
    _raised: dict[int, EnvError]
    # The attributes of `VectorEnv`, which stay when the simulator is replaced.
    _kept: frozenset[str]

    def __init__(self, settings: EnvSettings) -> None:
        self.settings = settings

    @property
    def replaceable(self) -> bool:
        """Whether the batch is replaced after an error and replays its episodes; false for real arms."""
        return self.settings.repeats and not self.paces_itself

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated; None: never."""
        return self.settings.max_episode_steps or self.default_max_episode_steps

    def _rebuild(self) -> None:
        """Replace the attributes that the constructor of the subclass has made by new ones.

        This object stays, since interventions, judge and watcher refer to it; so do its episodes.
        """
        with suppress(Exception):
            self.close()
        fresh = type(self)(self.settings)
        # One dictionary for both, since the objects that `fresh` has passed itself to work on it. `fresh` must stay
        # alive.
        vars(fresh).update({name: vars(self)[name] for name in self._kept}, _rebuilt=fresh)
        object.__setattr__(self, "__dict__", vars(fresh))


class _Step(NamedTuple):
    """An action of the batch and its outcome; `stepped` is bool [B], None: all."""

    actions: Array
    rewards: FloatArray
    terminations: BoolArray
    stepped: BoolArray | None


class RepeatingBatch(RepeatingSimulator):
    """The operations of a batch, with the record for replaying its running episodes.

    Args:
        env: the batch.
    """

    def __init__(self, env: Batch) -> None:
        super().__init__(FaultLog())
        self._env = env
        count = env.num_envs
        # The form of the last result that was checked.
        self._form: object = None
        self._past: deque[_Step] = deque()
        self._shown: Observation = {}
        # int64 [B], steps of the running episode after which `_shown` was observed.
        self._shown_at = np.full(count, _NOTHING)
        # bool [B], running episodes whose replay differed or was impossible, and those that replaced an episode whose
        # start raises.
        self._lost = np.zeros(count, np.bool_)
        # int64 [B], the starts skipped for the current episode.
        self._skips = np.zeros(count, np.int64)
        self._raised_in_a_row = 0

    def start(self, rows: IntArray) -> None:
        """Begin the current episodes of some environments."""
        env = self._env
        self._skips[rows] = 0
        if not env.replaceable:
            self._begin(rows)
            return
        self._shown_at[rows] = _NOTHING
        self._lost[rows] = False
        if len(rows) == env.num_envs:
            # Besides the longest episode, the rest of the action chunk in which it ended.
            limit = env.max_episode_steps or MOST_REPEATED
            self._past = deque(maxlen=min(2 * limit, MOST_REPEATED))
        for tries in range(1 + MOST_STARTS):
            try:
                self._attempt(partial(self._begin_with_others if tries else self._begin, rows), "a reset")
            except SimulatorError as error:
                broken = [] if tries == MOST_STARTS else self._broken_starts(rows)
                if not broken and isinstance(error, RaisedTwiceError):
                    self._begin_anew(error)
                    self._lost |= self._under_way
                    return
                if not broken:
                    raise
                for row in broken:
                    self._raised_in(row, error, began=False)
                # These environments begin from the next start, so that the batch can continue; their first step fails.
                self._lost[broken] = True
                self._skips[broken] += 1
            else:
                return

    def _begin(self, rows: IntArray) -> None:
        """Begin the current episodes of some environments in the current batch."""
        env = self._env
        env._start(rows, env._starts.of(rows, env._episodes.episode[rows] + _APART * self._skips[rows]))

    def _begin_with_others(self, rows: IntArray) -> None:
        """Begin the current episodes of some environments in a new batch, which replays the others."""
        self._renew()
        self._replay()

    def _broken_starts(self, rows: IntArray) -> list[int]:
        """Return the rows whose current start raises when they begin alone in a new batch."""
        self._env._rebuild()
        return [row for row in rows.tolist() if self._raises(lambda row=row: self._begin(np.array([row])))]

    def _raises(self, operation: Callable[[], object]) -> bool:
        """Return whether an operation raises; raise our own errors and those with a known remedy."""
        try:
            operation()
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            self._raise_known(error)
            return True
        return False

    def _raised_in(self, row: int, error: SimulatorError, *, began: bool = True) -> None:
        """Note the error of an episode, or of the whole batch, under the start of the episode or first environment."""
        env = self._env
        at = np.array([max(row, 0)])
        (seed,) = env._starts.of(at, env._episodes.episode[at]).seeds()
        env._raised.setdefault(row, env_error(f"{seed}", error, began=began))

    def advance(self, actions: Array, rows: IntArray | None) -> Transition:
        """Execute one action [B, A] in the environments of `rows` (None: all).

        Returns:
            The result; dropped episodes are truncated, and are among its `failures`.

        Raises:
            EnvContractError: the result does not have one value for each environment.
            SimulatorError: new batches raised three times in a row.
        """
        env = self._env
        if not env.replaceable:
            return self._held(self._moved(actions, rows))
        stepped = np.ones(env.num_envs, np.bool_)
        if rows is not None:
            stepped[:] = False
            stepped[rows] = True
        try:
            moved = self._held(self._attempt(lambda: self._moved(actions, rows), "the actions", actions))
        except RaisedTwiceError as error:
            moved = self._without_broken(actions, stepped, error)
        else:
            self._raised_in_a_row = 0
        step = _Step(actions.copy(), moved.rewards.copy(), moved.terminations.copy(), None)
        self._past.append(step if stepped.all() else step._replace(stepped=stepped & ~self._lost))
        if not self._lost.any():
            return moved
        failures = self._lost & stepped
        self._lost &= ~stepped
        return _without(moved, failures)

    def _moved(self, actions: Array, rows: IntArray | None) -> Transition:
        """Return the result of `_advance`, which may modify its actions: the others are recorded and repeated."""
        return self._env._advance(actions.copy(), rows)

    def _without_broken(self, actions: Array, stepped: BoolArray, error: RaisedTwiceError) -> Transition:
        """Return the result of an action that raised twice, in the environments that do not raise alone.

        The episodes of the others are noted as failed; all episodes are dropped if the fault cannot be attributed.

        Raises:
            SimulatorError: the fault could not be attributed for three actions in a row.
        """
        env, rows = self._env, np.flatnonzero(stepped)
        nothing = Transition(np.zeros(env.num_envs, np.float32), np.zeros(env.num_envs, np.bool_))
        try:
            self._replay()
            broken = [
                row for row in rows.tolist() if self._raises(lambda row=row: self._moved(actions, np.array([row])))
            ]
            self._begin_anew(error)
            if broken and (len(broken) < len(rows) or len(rows) == 1):
                self._replay()
                others = np.setdiff1d(rows, broken)
                moved = self._held(self._moved(actions, others)) if len(others) else nothing
                for row in broken:
                    self._raised_in(row, error)
                self._lost[broken] = True
                self._raised_in_a_row = 0
                return moved
        except Exception as raised:  # noqa: BLE001 - whatever a simulator raises
            self._raise_known(raised)
            self._begin_anew(raised)
        self._raised_in_a_row += 1
        if self._raised_in_a_row == _MOST_IN_A_ROW:
            raise error
        self._raised_in(_NOBODYS, error)
        self._lost |= self._under_way | stepped
        return nothing

    def observe(self) -> Observation:
        """Return the current observations."""
        env = self._env
        if not env.replaceable:
            return env._observe()
        try:
            seen = self._attempt(lambda: env._observe(), "an observation")
        except RaisedTwiceError as error:
            self._raised_in(_NOBODYS, error)
            self._lost |= self._under_way
            seen = env._observe()
        self._shown, self._shown_at = seen, env._episodes.steps.copy()
        return seen

    def take_lost(self) -> BoolArray | None:
        """Return, once, the running episodes to drop, bool [B]; None if there are none."""
        if not self._lost.any():
            return None
        lost, self._lost = self._lost, np.zeros_like(self._lost)
        return lost

    @property
    def _under_way(self) -> BoolArray:
        """bool [B], episodes that have made a step, and had not ended before this action chunk."""
        episodes = self._env._episodes
        return ~episodes.resting & (episodes.steps > 0)

    def _held(self, moved: Transition) -> Transition:
        form = form_of(moved)
        if form != self._form:
            env = self._env
            check_transition(env.num_envs, moved, env.action_size if env.alters_actions else None)
            self._form = form
        return moved

    def _renew(self) -> None:
        env = self._env
        env._rebuild()
        self._begin(np.arange(env.num_envs))
        env._observe()

    def _replay(self) -> None:
        """Replay the last actions so that every episode ends in its current state.

        Episodes with fewer steps begin later: a waiting environment may be stepped with the others.
        """
        env = self._env
        steps = env._episodes.steps
        length = len(self._past)
        active = np.ones((length, env.num_envs), np.bool_)
        for tick, step in enumerate(self._past):
            if step.stepped is not None:
                active[tick] = step.stepped
        # The actions of the current episodes: as many of the last ones as the episodes have steps.
        active &= np.cumsum(active[::-1], axis=0)[::-1] <= steps
        same = active.sum(axis=0) == steps
        begins = np.where(steps > 0, active.argmax(axis=0), length) if length else np.zeros_like(steps)
        compared = np.where(same & (self._shown_at >= 0), begins + self._shown_at, _NOTHING)
        for tick in range(int(begins.min()), length + 1):
            begun = np.flatnonzero(begins == tick)
            if len(begun):
                self._begin(begun)
            if (compared == tick).any():
                same &= (compared != tick) | self._as_shown()
            if tick < length:
                same &= self._again(self._past[tick], active[tick])
        self._lost |= ~same & self._under_way

    def _again(self, step: _Step, active: BoolArray) -> BoolArray:
        """Replay an action in some environments; return where the result is as before, or nothing was replayed."""
        moved = self._moved(step.actions, None if active.all() else np.flatnonzero(active))
        return ~active | ((moved.rewards == step.rewards) & (moved.terminations == step.terminations))

    def _as_shown(self) -> BoolArray:
        """Return which environments observe the same as last time, bool [B]."""
        return (observation_digest(self._env._observe()) == observation_digest(self._shown)).all(axis=1)

    def _names(self) -> tuple[str, str]:
        env = self._env
        first, last = env.numbers[0], env.numbers[-1]
        return env.settings.task or type(env).__name__, (
            f"environments {first} to {last} of the job, {env._episodes.steps.max()} steps after a start at most"
        )


def _without(moved: Transition, failures: BoolArray) -> Transition:
    """Return a transition in which dropped episodes are truncated, without reward or success."""
    return replace(
        moved,
        rewards=np.where(failures, np.float32(0), moved.rewards),
        terminations=moved.terminations & ~failures,
        truncations=failures if moved.truncations is None else moved.truncations | failures,
        successes=None if moved.successes is None else moved.successes & ~failures,
        failures=failures if moved.failures is None else moved.failures | failures,
    )

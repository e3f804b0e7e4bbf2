"""A batch of environments that is replaced where it raises, and whose episodes are then repeated.

A batch that raises does not say which environment it was. All running episodes are repeated on a new batch. Where that
raises as well, its environments are asked one after the other: episodes of those that raise have failed, and the others
continue. Where that cannot be told, as of a simulator that steps all of them at once, all episodes are left out.
"""

# It is a part of `VectorEnv`, and calls the methods that its subclasses implement.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final, NamedTuple, Protocol

import numpy as np

from recipes.embodied.envs.checks import check_transition
from recipes.embodied.envs.env_spec import (
    BoolArray,
    EnvError,
    EnvSettings,
    FloatArray,
    IntArray,
    Observation,
    Transition,
)
from recipes.embodied.envs.env_state import observation_digest
from recipes.embodied.envs.faults.repeating import (
    MOST_REPEATED,
    MOST_STARTS,
    FaultLog,
    RaisedTwiceError,
    RepeatingSimulator,
    SimulatorError,
    env_error,
)
from recipes.embodied.envs.running import RunningEpisodes
from recipes.embodied.envs.starts import Starts
from recipes.training.arrays import Array

# Actions in a row that raised on two batches each, after which there is no use in a further one.
_MOST_IN_A_ROW: Final = 3
# In `_shown_at`: of the present episode nothing was observed yet.
_NOTHING: Final = -1
# In the errors of a batch, by row: nobody can say of which.
_NOBODYS: Final = -1
# Between the numbers of an episode and of the one that begins in its place.
_APART: Final = 2**32


class Batch(Protocol):
    """The part of a `VectorEnv` that repeating needs."""

    alters_actions: ClassVar[bool]
    settings: EnvSettings
    num_envs: int
    numbers: IntArray
    _episodes: RunningEpisodes
    _starts: Starts
    _raised: dict[int, EnvError]

    @property
    def action_size(self) -> int:
        """See `VectorEnv`."""
        ...

    @property
    def replaceable(self) -> bool:
        """See `VectorEnv`."""
        ...

    @property
    def max_episode_steps(self) -> int | None:
        """See `VectorEnv`."""
        ...

    def _start(self, rows: IntArray, starts: Starts) -> None: ...

    def _advance(self, actions: Array, rows: IntArray | None) -> Transition: ...

    def _observe(self) -> Observation: ...

    def _rebuild(self) -> None: ...


class _Step(NamedTuple):
    """An action of the batch and its outcome; `stepped` bool [B], None: all."""

    actions: Array
    rewards: FloatArray
    terminations: BoolArray
    stepped: BoolArray | None


class RepeatingBatch(RepeatingSimulator):
    """The operations of a batch, with the record that repeats its running episodes.

    Args:
        env: the batch.
    """

    def __init__(self, env: Batch) -> None:
        super().__init__(FaultLog())
        self._env = env
        count = env.num_envs
        self._checked = False
        self._past: deque[_Step] = deque()
        self._shown: Observation = {}
        # int64 [B], steps of the running episode after which `_shown` was observed.
        self._shown_at = np.full(count, _NOTHING)
        # bool [B], running episodes that were repeated and did not come out as before, or could not be repeated; and
        # those that began in the place of one whose start raises.
        self._lost = np.zeros(count, np.bool_)
        # int64 [B], starts that were passed over for the present episode.
        self._skips = np.zeros(count, np.int64)
        self._raised_in_a_row = 0

    def start(self, rows: IntArray) -> None:
        """Begin the present episodes of some environments."""
        env = self._env
        self._skips[rows] = 0
        if not env.replaceable:
            self._begin(rows)
            return
        self._shown_at[rows] = _NOTHING
        self._lost[rows] = False
        if len(rows) == env.num_envs:
            # Beside the longest episode, the rest of the chunk of actions in which it ended.
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
                # They begin from the next start, so that the batch can go on; their first step fails.
                self._lost[broken] = True
                self._skips[broken] += 1
            else:
                return

    def _begin(self, rows: IntArray) -> None:
        """Begin the present episodes of some environments in the present batch."""
        env = self._env
        env._start(rows, env._starts.of(rows, env._episodes.episode[rows] + _APART * self._skips[rows]))

    def _begin_with_others(self, rows: IntArray) -> None:
        """Begin the present episodes of some environments in a new batch, which repeats the others."""
        self._renew()
        self._replay()

    def _broken_starts(self, rows: IntArray) -> list[int]:
        """Return the rows whose present start raises when they begin alone, in a new batch."""
        self._env._rebuild()
        return [row for row in rows.tolist() if self._raises(lambda row=row: self._begin(np.array([row])))]

    def _raises(self, operation: Callable[[], object]) -> bool:
        """Perform an operation; return whether it raises, but for our own errors and those with a remedy."""
        try:
            operation()
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            self._raise_known(error)
            return True
        return False

    def _raised_in(self, row: int, error: SimulatorError, *, began: bool = True) -> None:
        """Note the error of an episode, by the seed of its start; of a batch, by that of its first environment."""
        env = self._env
        at = np.array([max(row, 0)])
        (seed,) = env._starts.of(at, env._episodes.episode[at]).seeds()
        env._raised.setdefault(row, env_error(f"{seed}", error, began=began))

    def advance(self, actions: Array, rows: IntArray | None) -> Transition:
        """Execute one action [B, A] in the environments of `rows` (None: all).

        Returns:
            The result; episodes that are left out are truncated, and are among its `failures`.

        Raises:
            EnvContractError: the first result is not one value for each environment.
            SimulatorError: new batches raised three times in a row.
        """
        env = self._env
        if not env.replaceable:
            return self._held(env._advance(actions, rows))
        stepped = np.ones(env.num_envs, np.bool_)
        if rows is not None:
            stepped[:] = False
            stepped[rows] = True
        try:
            moved = self._held(self._attempt(lambda: env._advance(actions, rows), "the actions", actions))
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

    def _without_broken(self, actions: Array, stepped: BoolArray, error: RaisedTwiceError) -> Transition:
        """Return the result of an action that raised twice, in the environments that do not raise alone.

        The episodes of the others are lost, and noted as failed; all of them are left out where that cannot be told.

        Raises:
            SimulatorError: that could not be told of three actions in a row.
        """
        env, rows = self._env, np.flatnonzero(stepped)
        nothing = Transition(np.zeros(env.num_envs, np.float32), np.zeros(env.num_envs, np.bool_))
        try:
            self._replay()
            broken = [
                row for row in rows.tolist() if self._raises(lambda row=row: env._advance(actions, np.array([row])))
            ]
            self._begin_anew(error)
            if broken and (len(broken) < len(rows) or len(rows) == 1):
                self._replay()
                others = np.setdiff1d(rows, broken)
                moved = self._held(env._advance(actions, others)) if len(others) else nothing
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
        """Return the running episodes that are to be left out, bool [B], once; None: there are none."""
        if not self._lost.any():
            return None
        lost, self._lost = self._lost, np.zeros_like(self._lost)
        return lost

    @property
    def _under_way(self) -> BoolArray:
        """bool [B], episodes that have made a step, and have not ended before this chunk of actions."""
        episodes = self._env._episodes
        return ~episodes.resting & (episodes.steps > 0)

    def _held(self, moved: Transition) -> Transition:
        if not self._checked:
            env = self._env
            check_transition(env.num_envs, moved, env.action_size if env.alters_actions else None)
            self._checked = True
        return moved

    def _renew(self) -> None:
        env = self._env
        env._rebuild()
        self._begin(np.arange(env.num_envs))
        env._observe()

    def _replay(self) -> None:
        """Repeat the last actions so that every episode is in its present state at the end.

        Episodes of fewer steps begin later: an environment that waits may be stepped with the others.
        """
        env = self._env
        steps = env._episodes.steps
        length = len(self._past)
        active = np.ones((length, env.num_envs), np.bool_)
        for tick, step in enumerate(self._past):
            if step.stepped is not None:
                active[tick] = step.stepped
        # The actions of the present episodes: as many of the last ones as they have made.
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
        """Repeat an action in some environments; return where it came out as before, or was not repeated."""
        moved = self._env._advance(step.actions, None if active.all() else np.flatnonzero(active))
        return ~active | ((moved.rewards == step.rewards) & (moved.terminations == step.terminations))

    def _as_shown(self) -> BoolArray:
        """Return which environments observe now what was observed last, bool [B]."""
        return (observation_digest(self._env._observe()) == observation_digest(self._shown)).all(axis=1)

    def _names(self) -> tuple[str, str]:
        env = self._env
        first, last = env.numbers[0], env.numbers[-1]
        return env.settings.task or type(env).__name__, (
            f"environments {first} to {last} of the job, {env._episodes.steps.max()} steps after a start at most"
        )


def _without(moved: Transition, failures: BoolArray) -> Transition:
    """Return a transition in which episodes that are left out are truncated, without reward or success."""
    return replace(
        moved,
        rewards=np.where(failures, np.float32(0), moved.rewards),
        terminations=moved.terminations & ~failures,
        truncations=failures if moved.truncations is None else moved.truncations | failures,
        successes=None if moved.successes is None else moved.successes & ~failures,
        failures=failures if moved.failures is None else moved.failures | failures,
    )

"""A batch of simulations in one process, stepped one after another; each is replaced when it raises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvError, IntArray, Observation
from recipes.embodied.envs.faults.repeating import (
    MOST_REPEATED,
    MOST_STARTS,
    FaultLog,
    RaisedTwiceError,
    RepeatingSimulator,
    SimulatorError,
    env_error,
    known_fault,
)
from recipes.embodied.envs.processes.simulator import (
    BatchFacts,
    BatchRequest,
    CheapSimulation,
    Outcome,
    Outcomes,
    Row,
    Simulation,
    Start,
    common_spec,
    options_of,
    simulation_class,
)
from recipes.training.arrays import Array

_FAILED: Final = Outcome(0.0, truncated=True, failed=True)


class RepeatingSimulation(RepeatingSimulator):
    """One simulation, with a record for replaying its episode: its start, and each action with its outcome.

    Args:
        make: returns a new simulation.
        task: the name of its task.
        row: the row of its environment in the batch, for messages.
        alive: is called with the name of each operation before it starts.
        faults: log of faults.

    Attributes:
        simulation: the current simulation.
        past: each action of the current episode, with the outcome's reward, termination, truncation and success. If it
            holds `MOST_REPEATED` + 1 actions, earlier ones may have been dropped.
        error: the error that the environment's code raised in the episode, until it is taken; None: none.
    """

    def __init__(
        self, make: Callable[[], Simulation], task: str, row: int, alive: Callable[[str], None], faults: FaultLog
    ) -> None:
        super().__init__(faults)
        self._make, self._task, self._row, self._alive = make, task, row, alive
        self._alive("making")
        self.simulation = make()
        self._start = Start(0, 0)
        self.past: deque[tuple[Any, float, bool, bool, bool | None]] = deque(maxlen=MOST_REPEATED + 1)
        self.error: EnvError | None = None
        # The episode was replayed with another result, or its code raised outside of a step.
        self._lost = False

    def reset(self, start: Start) -> None:
        """Begin an episode; if its reset raises, begin one from the next start, whose first step fails."""
        self._lost, self.error = False, None
        self.past.clear()
        for tries in range(1 + MOST_STARTS):
            self._start = Start((start.seed + tries) % 2**31, start.number + tries)
            self._alive("resetting")
            try:
                self._attempt(lambda: self.simulation.reset(self._start), "its reset")
            except SimulatorError as error:
                self.error = self.error or env_error(start.name, error, began=False)
                self._lost = True
                if tries == MOST_STARTS:
                    raise
            else:
                return

    def step(self, action: Any) -> Outcome:
        """Execute an action; the outcome is a failure if the episode is dropped, or has an `error`."""
        if self._lost:
            return _FAILED
        self._alive("stepping")
        kept: Any = copy(action)  # an environment may modify its action
        # Inlined, without a wrapper until a simulation raises: cheap simulators are slowed down by each call.
        try:
            outcome = self.simulation.step(action)
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            return self.step_again(error, kept)
        return self.record(kept, outcome)

    def step_again(self, error: Exception, action: Any) -> Outcome:
        """Retry an action at which the simulation raised; see `step`."""
        try:
            outcome = self._attempt_again(error, lambda: self._again(action), "its action", action)
        except RaisedTwiceError as twice:
            self.error = self.error or env_error(self._start.name, twice)
            return _FAILED
        return self.record(action, outcome)

    def record(self, action: Any, outcome: Outcome) -> Outcome:
        """Add an action to the record; return its outcome, a failure if the episode is dropped."""
        if self._lost:
            return _FAILED
        self.past.append((action, *outcome[:4]))
        return outcome

    def observe(self) -> Row:
        """Return the current observation."""
        self._alive("observing")
        try:
            seen = self.simulation.observe()
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            try:
                seen = self._attempt_again(error, lambda: self.simulation.observe(), "its observation")
            except RaisedTwiceError as twice:
                self.error, self._lost = self.error or env_error(self._start.name, twice), True
                # The first observation of the new simulation; the next step fails.
                seen = self.simulation.observe()
        return seen

    def _renew(self) -> None:
        self._alive("making")
        with suppress(Exception):
            self.simulation.close()
        self.simulation = self._make()
        self._alive("resetting")
        self.simulation.reset(self._start)

    def _replay(self) -> None:
        # A longer episode was not recorded completely.
        self._lost = len(self.past) > MOST_REPEATED or not all(
            self._again(action)[:4] == tuple(outcome) for action, *outcome in self.past
        )

    def _again(self, action: Any) -> Outcome:
        self._alive("stepping")
        return self.simulation.step(copy(action))

    @property
    def _step(self) -> str:
        """The step that is about to be taken, from 1."""
        return f"{len(self.past) + 1}" if len(self.past) <= MOST_REPEATED else f"{MOST_REPEATED + 1} or later"

    def _names(self) -> tuple[str, str]:
        start = f"seed {self._start.seed}, start {self._start.number}"
        return self._task, (
            f"environment {self._row} of its batch, step {self._step} of an episode that began with {start}"
        )


def _ignore(row: int, operation: str) -> None:
    """Report nothing."""


class SimulationBatch:
    """Simulations of one process, one after another.

    Args:
        request: the description of the batch.
        alive: is called with an environment and the name of each operation before it starts; None in the worker's own
            process, which needs no sign of life.

    Raises:
        ConfigError: the simulator or the task is not available, or an option is wrong.
    """

    def __init__(self, request: BatchRequest, alive: Callable[[int, str], None] | None = None) -> None:
        kind = simulation_class(request.simulation)
        options = options_of(kind, request.options)
        names = kind.tasks(request.task, options)
        tasks = [names[group % len(names)] for group in request.groups]
        make: Any = kind
        self._faults = faults = FaultLog()
        # The class whose results are checked together; None: they are checked one by one.
        self._cheap = kind if alive is None and issubclass(kind, CheapSimulation) and kind.together else None
        reports = alive or _ignore
        self._members: list[RepeatingSimulation] = []
        try:
            for row, task in enumerate(tasks):
                self._members.append(
                    RepeatingSimulation(partial(make, task, options), task, row, partial(reports, row), faults)
                )
            spec = common_spec([simulation.spec for simulation in self.simulations], request.task)
        except BaseException as error:
            self.close()
            known = known_fault(error)
            if known is None:
                raise
            raise known from error
        limits = [
            simulation.max_episode_steps for simulation in self.simulations if simulation.max_episode_steps is not None
        ]
        first = self.simulations[0]
        faulty = [
            f"`{task}`: {fault}"
            for task, one in zip(tasks, self.simulations, strict=True)
            for fault in one.faults_of_start()
        ]
        self.facts = BatchFacts(
            spec,
            min(limits, default=None),
            tasks,
            len(names),
            first.control_hz,
            list(dict.fromkeys(faulty)) if first.stored_starts else None,
            first.mapping,
        )
        self._rows: list[Row] = [{}] * len(tasks)
        # Observations of a class whose results are checked together.
        self._together: Observation = {}
        # Environments that have changed since they were observed.
        self._every = frozenset(range(len(tasks)))
        self._changed = set(self._every)
        # The simulations until the first fault, after which they are stepped one by one.
        self._first: list[Any] = self.simulations
        self._pasts = [member.past for member in self._members]

    @property
    def simulations(self) -> list[Simulation]:
        """The present simulation of each environment."""
        return [member.simulation for member in self._members]

    def reset(self, rows: Sequence[int], starts: Sequence[Start]) -> None:
        """Begin episodes."""
        self._changed.update(rows)
        for row, start in zip(rows, starts, strict=True):
            self._members[row].reset(start)

    def step(self, rows: Sequence[int] | None, actions: Array, *, observed: bool = False) -> Outcomes:
        """Execute actions [B, A].

        Args:
            rows: the rows of the environments that are stepped; None: all.
            actions: the actions of all environments.
            observed: whether `observe` is called next; unused here, where observing early saves nothing.
        """
        outcomes = Outcomes.empty(len(self._members))
        native = self._members[0].simulation.native(actions)
        self._changed.update(self._every if rows is None else rows)
        if rows is None and self._cheap is not None and not self._faults.any:
            self._step_together(self._cheap, native, outcomes)
        elif rows is None:
            outcomes.write_all([member.step(action) for member, action in zip(self._members, native, strict=True)])
        else:
            for row in rows:
                outcomes.write(row, self._members[row].step(native[row]))
        return outcomes

    def _step_together(self, kind: type[CheapSimulation], native: Any, outcomes: Outcomes) -> None:
        """Execute an action in all environments, none of which has had a fault, and check the results together."""
        members, simulations = self._members, self._first
        kept = native.copy()  # an environment may modify its action
        results: list[Any] = []
        try:
            for simulation, action in zip(simulations, native, strict=True):
                results.append(simulation.raw_step(action))
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            results.append(members[len(results)].step_again(error, kept[len(results)]))
        steps = kind.check_together(simulations, results) if len(results) == len(members) else None
        if steps is not None:
            outcomes.write_columns(steps)
            for past, step in zip(self._pasts, zip(kept, *steps, repeat(None), strict=False), strict=True):
                past.append(step)
            return
        written: list[Outcome] = []
        for member, simulation, action, result in zip(members, simulations, kept, results, strict=False):
            is_done = isinstance(result, Outcome)  # of the environment that raised
            written.append(result if is_done else member.record(action, simulation.checked(result)))
        rest = range(len(results), len(members))
        outcomes.write_all([*written, *(members[row].step(kept[row]) for row in rest)])

    def foresee(self, actions: Array, steps: IntArray, *, ends: bool) -> None:
        """Receive the actions of the next calls of `step` in advance; unused here, where a step costs no message.

        Args:
            actions: [B, C, A]; the next `step` gets `actions[:, 0]`, for the environments that have not ended.
            steps: int64 [B], the most actions that each environment executes; 0: it rests.
            ends: whether an environment stops after a termination; it always stops after a truncation.
        """

    def step_chunk(self, actions: Array, steps: Sequence[int], outcomes: Sequence[Outcomes], *, ends: bool) -> None:
        """Execute a chunk of actions, one environment after the other; see `foresee`.

        Args:
            actions: [C, B, A].
            steps: the most actions that each environment executes.
            outcomes: receive the results of each action.
            ends: whether an environment stops after a termination.
        """
        self._changed.update(row for row, count in enumerate(steps) if count)
        most, environments = max(steps), len(steps)
        # Converted all at once: for a cheap simulator, each conversion takes as long as a step.
        native = self._members[0].simulation.native(actions[:most].reshape(most * environments, -1))
        native = native.reshape(most, environments, *native.shape[1:])
        if most == 1 and all(steps):
            outcomes[0].write_all(
                [member.step(action) for member, action in zip(self._members, native[0], strict=True)]
            )
            return
        for row, (member, count) in enumerate(zip(self._members, steps, strict=True)):
            for action, written in zip(native[:count, row], outcomes, strict=False):
                outcome = member.step(action)
                written.write(row, outcome)
                if outcome.truncated or (ends and outcome.terminated):
                    break

    def take_errors(self) -> dict[int, EnvError]:
        """Return the errors of running episodes since the last call, by row; the failed steps may follow later."""
        if not self._faults.any:
            return {}
        errors = {row: member.error for row, member in enumerate(self._members) if member.error is not None}
        for row in errors:
            self._members[row].error = None
        return errors

    def refresh(self) -> list[int]:
        """Observe the environments that have changed, and return their rows."""
        changed = sorted(self._changed)
        for row in changed:
            self._rows[row] = self._members[row].observe()
        if changed:
            self._members[0].simulation.examine(_stacked([self._rows[row] for row in changed]))
        self._changed.clear()
        return changed

    def expert(self) -> Array | None:
        """Return actions [B, A] of a scripted expert in the current states; None: a task has none."""
        actions = [simulation.expert() for simulation in self.simulations]
        available = [action for action in actions if action is not None]
        return np.array(available, np.float32) if len(available) == len(actions) else None

    def row(self, number: int) -> Row:
        """Return the last observation of an environment."""
        return self._rows[number]

    def observe(self) -> Observation:
        """Return the present observations, new arrays."""
        if self._cheap is not None:
            seen = None if self._faults.any else self._refresh_together(self._cheap)
            if seen is not None:
                return seen
            # From here on observations are checked one by one; none has been yet.
            self._cheap = None
            self._changed.update(self._every)
        self.refresh()
        return _stacked(self._rows)

    def _refresh_together(self, kind: type[CheapSimulation]) -> Observation | None:
        """Return the present observations, new arrays; None if one must be checked by itself."""
        if not self._changed:
            return {name: array.copy() for name, array in self._together.items()}
        everything, simulations = len(self._changed) == len(self._first), self._first
        rows = [] if everything else sorted(self._changed)
        seen = kind.observe_together(simulations if everything else [simulations[row] for row in rows])
        if seen is None:
            return None
        self._members[0].simulation.examine(seen)
        self._changed.clear()
        if everything:
            self._together = seen
        else:
            for name, array in seen.items():
                self._together[name][rows] = array
        return {name: array.copy() for name, array in self._together.items()}

    def pictures(self, rows: Sequence[int]) -> NDArray[np.uint8] | None:
        """Return the views, uint8 [n, H, W, 3]; None if nothing is rendered."""
        views = (self._members[row].simulation.picture() for row in rows)
        pictures = [picture for picture in views if picture is not None]
        return np.stack(pictures) if pictures else None

    def close(self) -> None:
        """Release what the simulators hold. Idempotent."""
        while self._members:
            self._members.pop().simulation.close()


def _stacked(rows: Sequence[Row]) -> Observation:
    """Return observations [n, ...] of one each."""
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}

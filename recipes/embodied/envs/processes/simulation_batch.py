"""A batch of simulations in one process, one after another, each of which is replaced where it raises."""

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
    options_of,
    simulation_class,
)
from recipes.training.arrays import Array

_FAILED: Final = Outcome(0.0, truncated=True, failed=True)


class RepeatingSimulation(RepeatingSimulator):
    """One simulation, with the record that repeats its episode: its start, and each action with its outcome.

    Args:
        make: returns a new simulation.
        task: its task.
        row: the row of its environment in the batch, for messages.
        alive: is called with what is done before each operation.
        faults: log of faults.

    Attributes:
        simulation: the present one.
        past: each action of the present episode, with the outcome's reward, termination, truncation and success. It has
            one more than the most that are repeated where not all were kept.
        error: the error of the episode's code, until it is taken; None: none.
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
        # The episode was repeated, and did not come out as before; or its code raised outside of a step.
        self._lost = False

    def reset(self, start: Start) -> None:
        """Begin an episode; where its reset raises, one from the next start, whose first step fails."""
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
        """Carry out an action; a failed outcome where the episode is left out, or has an `error`."""
        if self._lost:
            return _FAILED
        self._alive("stepping")
        # Cheap simulators feel each call, so that nothing is wrapped before one raises.
        try:
            outcome = self.simulation.step(action)
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            return self.step_again(error, action)
        return self.record(action, outcome)

    def step_again(self, error: Exception, action: Any) -> Outcome:
        """Carry out an action at which the simulation raised; see `step`."""
        try:
            outcome = self._attempt_again(error, lambda: self.simulation.step(action), "its action", action)
        except RaisedTwiceError as twice:
            self.error = self.error or env_error(self._start.name, twice)
            return _FAILED
        return self.record(action, outcome)

    def record(self, action: Any, outcome: Outcome) -> Outcome:
        """Add an action to the record; return its outcome, a failed one where the episode is left out."""
        if self._lost:
            return _FAILED
        kept: Any = copy(action)
        self.past.append((kept, *outcome[:4]))
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
                # What a new one sees at the beginning: the next step fails.
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
        # Of an episode that is too long not every step was kept.
        self._lost = len(self.past) > MOST_REPEATED or not all(
            self._again(action)[:4] == tuple(outcome) for action, *outcome in self.past
        )

    def _again(self, action: Any) -> Outcome:
        self._alive("stepping")
        return self.simulation.step(action)

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
        request: what they are.
        alive: is called with an environment and what it does before each of its operations; None: the worker's own
            process needs no sign of life.

    Raises:
        ConfigError: the simulator or the task cannot be had, or an option is wrong.
    """

    def __init__(self, request: BatchRequest, alive: Callable[[int, str], None] | None = None) -> None:
        kind = simulation_class(request.simulation)
        options = options_of(kind, request.options)
        names = kind.tasks(request.task, options)
        tasks = [names[group % len(names)] for group in request.groups]
        make: Any = kind
        self._faults = faults = FaultLog()
        # The class whose results are checked together; None: one by one.
        self._cheap = kind if alive is None and issubclass(kind, CheapSimulation) and kind.together else None
        reports = alive or _ignore
        self._members: list[RepeatingSimulation] = []
        try:
            for row, task in enumerate(tasks):
                self._members.append(
                    RepeatingSimulation(partial(make, task, options), task, row, partial(reports, row), faults)
                )
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
            first.spec,
            min(limits, default=None),
            tasks,
            len(names),
            first.control_hz,
            list(dict.fromkeys(faulty)) if first.stored_starts else None,
            first.mapping,
        )
        self._rows: list[Row] = [{}] * len(tasks)
        # Observations of a class that is checked together.
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
        """Carry out actions [B, A].

        Args:
            rows: the rows of the environments that are stepped; None: all.
            actions: the actions of all environments.
            observed: `observe` is called next, so that it pays to look at the environments now; here nothing is gained.
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
        """Carry out an action in all environments, none of which has had a fault, and check the results together."""
        members, simulations = self._members, self._first
        kept = native.copy()  # an environment may write to its action
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
            is_done = isinstance(result, Outcome)  # of the one that raised
            written.append(result if is_done else member.record(action, simulation.checked(result)))
        rest = range(len(results), len(members))
        outcomes.write_all([*written, *(members[row].step(kept[row]) for row in rest)])

    def foresee(self, actions: Array, steps: IntArray, *, ends: bool) -> None:
        """Receive the actions of the next calls of `step` in advance; here, where a step costs no message, for nothing.

        Args:
            actions: [B, C, A]; `step` is given `actions[:, 0]` next, for those environments that have not ended.
            steps: int64 [B], how many of them an environment is stepped with at most; 0: it rests.
            ends: an environment that terminates is not stepped any further; one that is truncated never is.
        """

    def step_chunk(self, actions: Array, steps: Sequence[int], outcomes: Sequence[Outcomes], *, ends: bool) -> None:
        """Execute a chunk of actions, one environment after the other; see `foresee`.

        Args:
            actions: [C, B, A].
            steps: how many of them each environment carries out at most.
            outcomes: where the results of each action are written.
            ends: whether an environment that terminates is done.
        """
        self._changed.update(row for row, count in enumerate(steps) if count)
        most, environments = max(steps), len(steps)
        # All at once: for cheap simulators this takes as long as a step does.
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
        """Return the errors of running episodes since the last call, by row; their failures have come, or will."""
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
            # From here on one by one, of which none was observed so.
            self._cheap = None
            self._changed.update(self._every)
        self.refresh()
        return _stacked(self._rows)

    def _refresh_together(self, kind: type[CheapSimulation]) -> Observation | None:
        """Return the present observations, new arrays; None where one of them is to be looked at by itself."""
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

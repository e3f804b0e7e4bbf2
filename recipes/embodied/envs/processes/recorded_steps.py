"""Steps of simulations, recorded to repeat an episode: of each one by itself, or of many cheap ones together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from itertools import islice
from typing import Any, Final

from recipes.embodied.envs.env_spec import EnvError, Observation
from recipes.embodied.envs.processes.simulator import (
    CheapSimulation,
    Columns,
    Outcome,
    Outcomes,
    Row,
    Simulation,
    Start,
)
from recipes.embodied.envs.repeating import (
    MOST_REPEATED,
    MOST_STARTS,
    FaultLog,
    RaisedTwiceError,
    RepeatingSimulator,
    SimulatorError,
    env_error,
)

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


class StepsTogether:
    """The simulations of a `CheapSimulation` until the first fault.

    The actions are kept step by step for all simulations, and are added to the record of each one only when a
    simulation is to repeat them.

    Args:
        members: the simulations, with their records.
    """

    def __init__(self, members: Sequence[RepeatingSimulation]) -> None:
        self._members = members
        self._simulations: list[Any] = [member.simulation for member in members]
        self._kind: type[CheapSimulation] = type(self._simulations[0])
        self._raw_steps = [simulation.raw_step for simulation in self._simulations]
        # The last steps, each with the actions of all simulations.
        self._past: deque[tuple[Any, Columns]] = deque(maxlen=MOST_REPEATED + 1)
        self._count = 0
        # The steps before those that belong to the episode of each simulation and are not in its record.
        self._before = [0] * len(members)
        # The simulators' observations after the last step; None: the simulations have them.
        self._newest: list[Any] | None = None
        self._observed: Observation = {}

    def begin(self, rows: Sequence[int]) -> None:
        """Note that some simulations have begun episodes."""
        for row in rows:
            self._before[row] = self._count
            if self._newest is not None:
                self._newest[row] = self._simulations[row].current
        for _ in range(len(self._past) - (self._count - min(self._before))):  # no running episode has them
            self._past.popleft()

    def step(self, native: Any) -> Outcomes:
        """Execute a row of `native` in each simulation; if one raises or returns something unusual, one by one."""
        kept = native.copy()  # an environment may modify its action
        results: list[Any] = []
        raised: Exception | None = None
        try:
            for step, action in zip(self._raw_steps, native, strict=True):
                results.append(step(action))
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            raised = error
        checked = None if raised else self._kind.check_together(results)
        if checked is not None:
            self._newest, columns = checked
            self._past.append((kept, columns))
            self._count += 1
            return Outcomes.of(columns)
        self.settle()
        members, count = self._members, len(results)
        written = [
            member.record(action, simulation.checked(result))
            for member, simulation, action, result in zip(members, self._simulations, kept, results, strict=False)
        ]
        if raised is not None:
            written.append(members[count].step_again(raised, kept[count]))
        rest = range(len(written), len(members))
        outcomes = Outcomes.empty(len(members))
        outcomes.write_all([*written, *(members[row].step(kept[row]) for row in rest)])
        return outcomes

    def settle(self) -> None:
        """Give each simulation its observation, and add the steps of its running episode to its record."""
        for simulation, newest in zip(self._simulations, self._newest or (), strict=False):
            simulation.current = newest
        self._newest = None
        for row, member in enumerate(self._members):
            own = min(self._count - self._before[row], len(self._past))
            for actions, columns in islice(self._past, len(self._past) - own, None):
                reward, terminated, truncated = (column[row] for column in columns)
                member.past.append((actions[row], reward, terminated, truncated, None))
            self._before[row] = self._count
        self._past.clear()

    def observe(self, changed: frozenset[int]) -> Observation | None:
        """Return the present observations, new arrays; None if one must be checked by itself.

        Args:
            changed: the rows of the simulations that have changed since the last call.
        """
        if changed:
            every, first = len(changed) == len(self._members), self._simulations[0]
            newest = self._newest or [simulation.current for simulation in self._simulations]
            rows = [] if every else sorted(changed)
            seen = first.stacked(newest if every else [newest[row] for row in rows])
            if seen is None:
                return None
            first.examine(seen)
            if every:
                self._observed = seen
            else:
                for name, array in seen.items():
                    self._observed[name][rows] = array
        return {name: array.copy() for name, array in self._observed.items()}

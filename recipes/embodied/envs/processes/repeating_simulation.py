"""A simulation that is replaced where it raises, and whose episode is then repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, Final

from recipes.embodied.envs.env_spec import EnvError
from recipes.embodied.envs.faults.repeating import (
    MOST_REPEATED,
    MOST_STARTS,
    FaultLog,
    RaisedTwiceError,
    RepeatingSimulator,
    SimulatorError,
    env_error,
)
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start

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

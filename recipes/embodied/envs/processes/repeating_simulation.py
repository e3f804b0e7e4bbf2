"""A simulation that is replaced where it raises, and whose episode is then repeated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, Final

from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from recipes.embodied.envs.repeating import MOST_REPEATED, FaultLog, RaisedTwiceError, RepeatingSimulator

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
        stale: it has changed since it was observed.
    """

    def __init__(
        self, make: Callable[[], Simulation], task: str, row: int, alive: Callable[[str], None], faults: FaultLog
    ) -> None:
        super().__init__(faults)
        self._make, self._task, self._row, self._alive = make, task, row, alive
        self._alive("making")
        self.simulation = make()
        self.stale = True
        self._start = Start(0, 0)
        self._steps = 0
        self._past: list[tuple[Any, Outcome]] = []
        # The episode was repeated, and did not come out as before.
        self._lost = False

    def reset(self, start: Start) -> None:
        """Begin an episode."""
        self._start, self._steps, self._lost, self.stale = start, 0, False, True
        self._past.clear()
        self._alive("resetting")
        self._attempt(lambda: self.simulation.reset(start), "its reset")

    def step(self, action: Any) -> Outcome:
        """Carry out an action; a failed outcome where the episode is left out."""
        self._alive("stepping")
        self.stale = True
        # Cheap simulators feel each call, so that nothing is wrapped before one raises.
        try:
            outcome = self.simulation.step(action)
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            try:
                outcome = self._attempt_again(error, lambda: self.simulation.step(action), "its action", action)
            except RaisedTwiceError:
                return _FAILED
        if self._lost:
            return _FAILED
        self._steps += 1
        if self._steps <= MOST_REPEATED:
            self._past.append((action if type(action) is int else copy(action), outcome))
        return outcome

    def observe(self) -> Row:
        """Return the current observation."""
        self._alive("observing")
        try:
            seen = self.simulation.observe()
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            seen = self._attempt_again(error, lambda: self.simulation.observe(), "its observation")
        self.stale = False
        return seen

    def _renew(self) -> None:
        self._alive("making")
        with suppress(Exception):
            self.simulation.close()
        self.simulation = self._make()
        self._alive("resetting")
        self.simulation.reset(self._start)
        self.stale = True

    def _replay(self) -> None:
        # Of an episode that is too long not every step was kept.
        self._lost = self._steps > len(self._past) or not all(
            self._again(action) == outcome for action, outcome in self._past
        )

    def _again(self, action: Any) -> Outcome:
        self._alive("stepping")
        return self.simulation.step(action)

    def _names(self) -> tuple[str, str]:
        start = f"seed {self._start.seed}, start {self._start.number}"
        return self._task, (
            f"environment {self._row} of its batch, step {self._steps + 1} of an episode that began with {start}"
        )

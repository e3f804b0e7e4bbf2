"""A batch of simulations in one process, one after another.

A simulator whose code raises is machinery that failed, and no evidence about the policy: its episode is repeated once
on a new simulator. Where that raises again, or does not come out as before, the episode is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import IntArray, Observation
from recipes.embodied.envs.processes.fault_lines import known_fault
from recipes.embodied.envs.processes.simulator import (
    BatchFacts,
    BatchRequest,
    Outcome,
    Outcomes,
    Row,
    Simulation,
    Start,
    options_of,
    simulation_class,
)
from rlinf_core import ConfigError, RuntimeFailure

_LOGGER: Final = logging.getLogger("rlinf")
# Actions of an episode up to which it is repeated on a new simulator.
_MOST_REPEATED: Final = 2000
# Faults of a batch that are logged with a traceback; further ones are a line.
_MOST_TRACEBACKS: Final = 4


class SimulatorError(RuntimeFailure):
    """A simulator raised an exception, and a new one did so too."""


class _RunningEpisode:
    """The record that repeats the episode of one environment: its start, and each action with its outcome."""

    def __init__(self) -> None:
        self.begin(Start(0, 0))

    def begin(self, start: Start) -> None:
        """Forget the episode before."""
        self.start = start
        self.steps = 0
        self.past: list[tuple[Any, Outcome]] = []

    def add(self, action: Any, outcome: Outcome) -> None:
        """Keep a step."""
        self.steps += 1
        if self.steps <= _MOST_REPEATED:
            # A choice is a number, which nobody changes.
            is_number = isinstance(action, np.generic | int)
            self.past.append((action if is_number else np.copy(action), outcome))

    @property
    def is_whole(self) -> bool:
        """Whether every step was kept."""
        return self.steps == len(self.past)

    def __str__(self) -> str:
        return f"step {self.steps + 1} of an episode that began with seed {self.start.seed}, start {self.start.number}"


class SimulationBatch:
    """Simulations of one process, one after another.

    Args:
        request: what they are.
        alive: is called with an environment and what it does before each of its operations.

    Attributes:
        simulations: one for each environment.

    Raises:
        ConfigError: the simulator or the task cannot be had, or an option is wrong.
    """

    def __init__(self, request: BatchRequest, alive: Callable[[int, str], None] | None = None) -> None:
        kind = simulation_class(request.simulation)
        options = options_of(kind, request.options)
        names = kind.tasks(request.task, options)
        tasks = [names[group % len(names)] for group in request.groups]
        make: Any = kind
        self._make: Callable[[str], Simulation] = lambda task: make(task, options)
        self._alive = alive
        self.simulations: list[Simulation] = []
        try:
            for row, task in enumerate(tasks):
                self._tell(row, "making")
                self.simulations.append(self._make(task))
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
        self.facts = BatchFacts(first.spec, min(limits, default=None), tasks, len(names), first.control_hz)
        self._rows: list[Row] = [{}] * len(tasks)
        self._stale = [True] * len(tasks)
        self._running = [_RunningEpisode() for _ in tasks]
        self._faults = 0

    def reset(self, rows: Sequence[int], starts: Sequence[Start]) -> None:
        """Begin episodes."""
        for row, start in zip(rows, starts, strict=True):
            self._tell(row, "resetting")
            self._running[row].begin(start)
            try:
                self.simulations[row].reset(start)
            except Exception as error:  # noqa: BLE001 - whatever a simulator raises
                self._repeat(row, error, "its reset")
            self._stale[row] = True

    def step(
        self,
        rows: Sequence[int] | None,
        actions: NDArray[Any],
        *,
        observed: bool = False,
        outcomes: Outcomes | None = None,
    ) -> Outcomes:
        """Carry out actions; see `Simulators`.

        Args:
            rows: of the environments that are stepped; None: all.
            actions: of all environments, [B, A].
            observed: without effect; `observe` looks at those that have changed.
            outcomes: where results are written; None: into new arrays.
        """
        if outcomes is None:
            outcomes = Outcomes.empty(len(self.simulations))
        native = self.simulations[0].native(actions)
        for row in range(len(self.simulations)) if rows is None else rows:
            self._tell(row, "stepping")
            outcomes.write(row, self._carry_out(row, native[row]))
            self._stale[row] = True
        return outcomes

    def _tell(self, row: int, operation: str) -> None:
        if self._alive is not None:
            self._alive(row, operation)

    def _carry_out(self, row: int, action: Any) -> Outcome:
        """Carry out an action; where the simulator raises, after repeating the episode on a new one.

        Returns:
            What came of it; a failed outcome where the new one raises as well, or repeats the episode differently.
        """
        running = self._running[row]
        try:
            outcome = self.simulations[row].step(action)
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            where = f"action {np.array2string(np.asarray(action), precision=4, threshold=16)}"
            if not self._repeat(row, error, where):
                return Outcome(0.0, truncated=True, failed=True)
            try:
                outcome = self.simulations[row].step(action)
            except Exception as again:  # noqa: BLE001 - whatever a simulator raises
                self._warn(self._fault(row, again, where), "the episode is left out", again)
                self._renew(row, again)
                return Outcome(0.0, truncated=True, failed=True)
        running.add(action, outcome)
        return outcome

    def _repeat(self, row: int, error: Exception, where: str) -> bool:
        """Repeat an episode on a new simulator, in whatever state that leads to.

        Args:
            row: the environment.
            error: what the simulator raised.
            where: doing what, for messages.

        Returns:
            Whether all went as before.
        """
        known = error if isinstance(error, ConfigError) else known_fault(error)
        if known is not None:
            raise known from error
        running = self._running[row]
        self._warn(self._fault(row, error, where), "a new simulator repeats the episode", error)
        self._renew(row, error)
        if not running.is_whole:
            return False
        try:
            return all(self._again(row, action) == outcome for action, outcome in running.past)
        except Exception as again:  # noqa: BLE001 - whatever a simulator raises
            self._warn(self._fault(row, again, where), "the episode is left out", again)
            self._renew(row, again)
            return False

    def _again(self, row: int, action: Any) -> Outcome:
        self._tell(row, "stepping")
        return self.simulations[row].step(action)

    def _renew(self, row: int, cause: Exception) -> None:
        """Replace a simulator, and begin the running episode in the new one.

        Raises:
            SimulatorError: the new one cannot be made, or cannot begin.
        """
        self._tell(row, "making")
        with suppress(Exception):
            self.simulations[row].close()
        try:
            self.simulations[row] = self._make(self.facts.tasks[row])
            self._tell(row, "resetting")
            self.simulations[row].reset(self._running[row].start)
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            known = known_fault(error)
            raise known or self._error(row, error, "the beginning") from cause
        self._stale[row] = True

    def _warn(self, fault: str, what: str, error: Exception) -> None:
        """Log a fault, the first ones with a traceback."""
        self._faults += 1
        _LOGGER.warning("%s; %s", fault, what, exc_info=error if self._faults <= _MOST_TRACEBACKS else None)

    def _fault(self, row: int, error: Exception, where: str) -> str:
        """Return what a simulator raised, doing what, and where in its episode."""
        raised = f"the simulator of `{self.facts.tasks[row]}` raised {type(error).__name__}: {error}"
        return f"{raised} (environment {row} of its batch, {where}, {self._running[row]})"

    def _error(self, row: int, error: Exception, where: str) -> SimulatorError:
        return SimulatorError(
            self._fault(row, error, where),
            why="a new simulator that began the episode again raised as well",
            help="the log of the worker has its traceback",
        )

    def foresee(self, actions: NDArray[Any], steps: IntArray, *, ends: bool) -> None:
        """Do nothing: here a step costs no message."""

    def step_chunk(
        self, actions: NDArray[Any], steps: Sequence[int], outcomes: Sequence[Outcomes], *, ends: bool
    ) -> None:
        """Execute a chunk of actions, one environment after the other; see `Simulators.foresee`.

        Args:
            actions: [C, B, A].
            steps: how many of them each environment carries out at most.
            outcomes: where the results of each action are written.
            ends: whether an environment that terminates is done.
        """
        for row, count in enumerate(steps):
            native = self.simulations[row].native(actions[:count, row])
            for action, written in zip(native, outcomes, strict=False):
                self._tell(row, "stepping")
                outcome = self._carry_out(row, action)
                written.write(row, outcome)
                self._stale[row] = True
                if outcome.truncated or (ends and outcome.terminated):
                    break

    def refresh(self) -> list[int]:
        """Observe the environments that have changed, and return their rows."""
        changed = [row for row, stale in enumerate(self._stale) if stale]
        for row in changed:
            self._tell(row, "observing")
            try:
                self._rows[row] = self.simulations[row].observe()
            except Exception as error:  # noqa: BLE001 - whatever a simulator raises
                self._repeat(row, error, "its observation")
                try:
                    self._rows[row] = self.simulations[row].observe()
                except Exception as again:
                    raise self._error(row, again, "its observation") from again
            self._stale[row] = False
        return changed

    def expert(self) -> NDArray[Any] | None:
        """Return the actions of the experts; see `Simulators`."""
        actions = [simulation.expert() for simulation in self.simulations]
        available = [action for action in actions if action is not None]
        return np.array(available, np.float32) if len(available) == len(actions) else None

    def row(self, number: int) -> Row:
        """Return the last observation of an environment."""
        return self._rows[number]

    def observe(self) -> Observation:
        """Return the present observations, new arrays."""
        self.refresh()
        return {name: np.array([row[name] for row in self._rows]) for name in self._rows[0]}

    def pictures(self, rows: Sequence[int]) -> NDArray[np.uint8] | None:
        """Return the views, uint8 [n, H, W, 3]; None if nothing is rendered."""
        pictures = [picture for row in rows if (picture := self.simulations[row].picture()) is not None]
        return np.stack(pictures) if pictures else None

    def close(self) -> None:
        """Release what the simulators hold."""
        while self.simulations:
            self.simulations.pop().close()

"""A batch of simulations in one process, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import IntArray, Observation
from recipes.embodied.envs.fault_lines import known_fault
from recipes.embodied.envs.processes.repeating_simulation import RepeatingSimulation
from recipes.embodied.envs.processes.simulator import (
    BatchFacts,
    BatchRequest,
    Outcomes,
    Row,
    Simulation,
    Start,
    options_of,
    simulation_class,
)
from recipes.embodied.envs.repeating import FaultLog


def _ignore(row: int, operation: str) -> None:
    """Report nothing: the worker's own process needs no sign of life."""


class SimulationBatch:
    """Simulations of one process, one after another.

    Args:
        request: what they are.
        alive: is called with an environment and what it does before each of its operations.

    Raises:
        ConfigError: the simulator or the task cannot be had, or an option is wrong.
    """

    def __init__(self, request: BatchRequest, alive: Callable[[int, str], None] = _ignore) -> None:
        kind = simulation_class(request.simulation)
        options = options_of(kind, request.options)
        names = kind.tasks(request.task, options)
        tasks = [names[group % len(names)] for group in request.groups]
        make: Any = kind
        faults = FaultLog()
        self._members: list[RepeatingSimulation] = []
        try:
            for row, task in enumerate(tasks):
                self._members.append(
                    RepeatingSimulation(partial(make, task, options), task, row, partial(alive, row), faults)
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
        self.facts = BatchFacts(first.spec, min(limits, default=None), tasks, len(names), first.control_hz)
        self._rows: list[Row] = [{}] * len(tasks)

    @property
    def simulations(self) -> list[Simulation]:
        """The present simulation of each environment."""
        return [member.simulation for member in self._members]

    def reset(self, rows: Sequence[int], starts: Sequence[Start]) -> None:
        """Begin episodes."""
        for row, start in zip(rows, starts, strict=True):
            self._members[row].reset(start)

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
            rows: the rows of the environments that are stepped; None: all.
            actions: the actions of all environments, [B, A].
            observed: has no effect: `observe` looks at those that have changed.
            outcomes: where results are written; None: into new arrays.
        """
        if outcomes is None:
            outcomes = Outcomes.empty(len(self._members))
        native = self._members[0].simulation.native(actions)
        if rows is None:
            outcomes.write_all([member.step(action) for member, action in zip(self._members, native, strict=True)])
            return outcomes
        for row in rows:
            outcomes.write(row, self._members[row].step(native[row]))
        return outcomes

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
        for row, (member, count) in enumerate(zip(self._members, steps, strict=True)):
            native = member.simulation.native(actions[:count, row])
            for action, written in zip(native, outcomes, strict=False):
                outcome = member.step(action)
                written.write(row, outcome)
                if outcome.truncated or (ends and outcome.terminated):
                    break

    def refresh(self) -> list[int]:
        """Observe the environments that have changed, and return their rows."""
        changed = [row for row, member in enumerate(self._members) if member.stale]
        for row in changed:
            self._rows[row] = self._members[row].observe()
        if changed:
            self._members[0].simulation.examine([self._rows[row] for row in changed])
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
        views = (self._members[row].simulation.picture() for row in rows)
        pictures = [picture for picture in views if picture is not None]
        return np.stack(pictures) if pictures else None

    def close(self) -> None:
        """Release what the simulators hold."""
        while self._members:
            self._members.pop().simulation.close()

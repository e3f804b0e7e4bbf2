"""A batch of simulations in one process, stepped one after another; each is replaced when it raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvError, IntArray, Observation
from recipes.embodied.envs.processes.recorded_steps import RepeatingSimulation, StepsTogether
from recipes.embodied.envs.processes.simulator import (
    BatchFacts,
    BatchRequest,
    CheapSimulation,
    Outcomes,
    Row,
    Simulation,
    Start,
    common_spec,
    options_of,
    simulation_class,
)
from recipes.embodied.envs.repeating import FaultLog, known_fault
from recipes.training.arrays import Array


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
        # Environments that have changed since they were observed.
        self._every = frozenset(range(len(tasks)))
        self._changed: frozenset[int] = self._every
        # The steps of a class whose results are checked together; None: they are checked one by one.
        is_cheap = alive is None and issubclass(kind, CheapSimulation) and kind.together
        self._together = StepsTogether(self._members) if is_cheap else None

    @property
    def simulations(self) -> list[Simulation]:
        """The present simulation of each environment."""
        return [member.simulation for member in self._members]

    def reset(self, rows: Sequence[int], starts: Sequence[Start]) -> None:
        """Begin episodes."""
        self._changed = self._changed.union(rows)
        for row, start in zip(rows, starts, strict=True):
            self._members[row].reset(start)
        if self._together is not None:
            self._together.begin(rows)

    def step(self, rows: Sequence[int] | None, actions: Array, *, observed: bool = False) -> Outcomes:
        """Execute actions [B, A].

        Args:
            rows: the rows of the environments that are stepped; None: all.
            actions: the actions of all environments.
            observed: whether `observe` is called next; unused here, where observing early saves nothing.
        """
        native = self._members[0].simulation.native(actions)
        self._changed = self._every if rows is None else self._changed.union(rows)
        if rows is None and self._together is not None and not self._faults.any:
            return self._together.step(native)
        if self._together is not None:
            self._together.settle()
        outcomes = Outcomes.empty(len(self._members))
        if rows is None:
            outcomes.write_all([member.step(action) for member, action in zip(self._members, native, strict=True)])
        else:
            for row in rows:
                outcomes.write(row, self._members[row].step(native[row]))
        return outcomes

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
        self._changed = self._changed.union(row for row, count in enumerate(steps) if count)
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
        self._changed = frozenset()
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
        if self._together is not None:
            seen = None if self._faults.any else self._together.observe(self._changed)
            if seen is not None:
                self._changed = frozenset()
                return seen
            # From here on results are checked one by one; no observation has been yet.
            self._together.settle()
            self._together = None
            self._changed = self._every
        self.refresh()
        return _stacked(self._rows)

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

"""The interface of simulators with one copy of a task each, and batches of them in one process.

An adapter to a simulator is a `Simulation`; `SimulatedEnv` makes a batch of environments of it. No adapter imports its
simulator before it is constructed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from recipes.embodied.envs.env_spec import BoolArray, EnvSpec, FloatArray, IntArray, Observation
from recipes.embodied.envs.processes.fault_lines import known_fault
from rlinf_core import ConfigError, Registry

# One row of an observation, by name: `states` float32 [S], `images.CAMERA` uint8 [H, W, 3], `instructions` a text.
Row: TypeAlias = dict[str, Any]
OptionsT = TypeVar("OptionsT", bound=BaseModel)


class Start(NamedTuple):
    """The start of an episode.

    Attributes:
        seed: from 0 to below 2^31, for simulators that draw their starts.
        number: position in a task's list of fixed starts, for those that have one; counted modulo its length.
    """

    seed: int
    number: int


class Outcome(NamedTuple):
    """Result of one action.

    Attributes:
        reward: of this action.
        terminated: the task ended.
        truncated: the simulator itself cut the episode off.
        success: the task is solved in this state; None: the simulator does not say.
    """

    reward: float
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None


class Simulation(ABC):
    """One copy of a task in a simulator.

    The constructor takes a task and `options`: an instance of `options_model`, or a dictionary where there is none.

    Attributes:
        options_model: pydantic model of `env.train.options`; None: they are checked by the simulator.
        max_episode_steps: the task's own limit; None: it has none.
        control_hz: actions in a simulated second; None: not known.
    """

    options_model: ClassVar[type[BaseModel] | None] = None
    max_episode_steps: int | None = None
    control_hz: float | None = None

    @classmethod
    def tasks(cls, task: str, options: Any) -> list[str]:
        """Return the tasks of a task name or a task-set name; by default the name itself."""
        return [task]

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """The sizes of observations and actions."""

    @abstractmethod
    def reset(self, start: Start) -> None:
        """Start an episode; all randomness comes from `start`."""

    @abstractmethod
    def step(self, action: Any) -> Outcome:
        """Carry out one action, a row of `native`."""

    @abstractmethod
    def observe(self) -> Row:
        """Return the current observation in new arrays. Images are rendered here, once per chunk of actions."""

    def picture(self) -> NDArray[np.uint8] | None:
        """Return the view of a simulation without cameras, uint8 [H, W, 3]; None: it renders nothing."""
        return None

    def native(self, actions: NDArray[Any]) -> Any:
        """Return actions [n, A] as `step` takes them, row by row; by default numbers from -1 to 1."""
        return np.clip(actions, -1, 1)

    def expert(self) -> NDArray[Any] | None:
        """Return the action [A] of a scripted expert in the current state; None: this task has none."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release what the simulator holds."""


class BatchRequest(NamedTuple):
    """Description of a batch of simulations; plain values that can be sent to another process.

    Attributes:
        simulation: the class, as `package.module:Class`.
        task: name of a task or a set of tasks.
        options: `env.train.options`.
        groups: the group of each environment: groups get the tasks of a set in turn.
    """

    simulation: str
    task: str
    options: Mapping[str, Any]
    groups: Sequence[int]


class BatchFacts(NamedTuple):
    """Facts about a batch of simulations.

    Attributes:
        spec: of all of them.
        max_episode_steps: the shortest of the tasks' own limits; None: there is none.
        tasks: the task of each environment.
        num_tasks: tasks of the set; 1 where the name was that of a task.
        control_hz: of all of them; None: not known.
    """

    spec: EnvSpec
    max_episode_steps: int | None
    tasks: list[str]
    num_tasks: int
    control_hz: float | None = None


class Outcomes(NamedTuple):
    """Results of one action each; rows that were not stepped are 0.

    Attributes:
        rewards: float32 [B].
        terminations, truncations, successes: bool [B].
        judged: bool [B], where `successes` says anything.
    """

    rewards: FloatArray
    terminations: BoolArray
    truncations: BoolArray
    successes: BoolArray
    judged: BoolArray

    @classmethod
    def empty(cls, count: int) -> Outcomes:
        """Return results of nothing."""
        return cls(np.zeros(count, np.float32), *np.zeros((4, count), np.bool_))

    def write(self, row: int, outcome: Outcome) -> None:
        """Write the result of one environment."""
        self.rewards[row] = outcome.reward
        self.terminations[row] = outcome.terminated
        self.truncations[row] = outcome.truncated
        self.judged[row] = outcome.success is not None
        self.successes[row] = bool(outcome.success)


class Simulators(Protocol):
    """Simulations behind a batch of environments, in this process or in others."""

    facts: BatchFacts

    def reset(self, rows: Sequence[int], starts: Sequence[Start]) -> None:
        """Begin episodes."""
        ...

    def step(self, rows: Sequence[int] | None, actions: NDArray[Any], *, observed: bool = False) -> Outcomes:
        """Carry out actions [B, A].

        Args:
            rows: of the environments that are stepped; None: all.
            actions: of all environments.
            observed: `observe` is called next, so that it pays to look at the environments now.
        """
        ...

    def foresee(self, actions: NDArray[Any], steps: IntArray, *, ends: bool) -> None:
        """Receive the actions of the next calls of `step` in advance.

        Args:
            actions: [B, C, A]; `step` is given `actions[:, 0]` next, for those environments that have not ended.
            steps: int64 [B], how many of them an environment is stepped with at most; 0: it rests.
            ends: an environment that terminates is not stepped any further; one that is truncated never is.
        """
        ...

    def observe(self) -> Observation:
        """Return the present observations, new arrays."""
        ...

    def expert(self) -> NDArray[Any] | None:
        """Return actions [B, A] of a scripted expert in the current states; None: a task has none."""
        ...

    def pictures(self, rows: Sequence[int]) -> NDArray[np.uint8] | None:
        """Return the views, uint8 [n, H, W, 3]; None if nothing is rendered."""
        ...

    def close(self) -> None:
        """Release the resources of the simulators. Idempotent."""
        ...


def simulation_class(name: str) -> type[Simulation]:
    """Import a class by its name, `package.module:Class`."""
    return Registry[type[Simulation]]("simulation", {}).get(name)


def options_of(kind: type[Simulation], written: Mapping[str, Any]) -> Any:
    """Return configured options in the form that the simulation takes.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    model = kind.options_model
    return dict(written) if model is None else checked_options(model, written)


def checked_options(model: type[OptionsT], written: Mapping[str, Any]) -> OptionsT:
    """Return configured options, validated by their model.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    try:
        return model.model_validate(dict(written))
    except ValidationError as error:
        reason = "; ".join(f"`{'.'.join(map(str, detail['loc']))}`: {detail['msg']}" for detail in error.errors())
        known = ", ".join(f"`{name}`" for name in model.model_fields)
        raise ConfigError("wrong options", where="env.options", why=reason, help=f"known: {known}") from error


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
        self._alive = alive
        self.simulations: list[Simulation] = []
        try:
            make: Any = kind
            for row, task in enumerate(tasks):
                if alive is not None:
                    alive(row, "making")
                self.simulations.append(make(task, options))
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

    def reset(self, rows: Sequence[int], starts: Sequence[Start]) -> None:
        """Begin episodes."""
        for row, start in zip(rows, starts, strict=True):
            if self._alive is not None:
                self._alive(row, "resetting")
            self.simulations[row].reset(start)
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
            if self._alive is not None:
                self._alive(row, "stepping")
            outcomes.write(row, self.simulations[row].step(native[row]))
            self._stale[row] = True
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
        for row, count in enumerate(steps):
            simulation = self.simulations[row]
            for action, written in zip(simulation.native(actions[:count, row]), outcomes, strict=False):
                if self._alive is not None:
                    self._alive(row, "stepping")
                outcome = simulation.step(action)
                written.write(row, outcome)
                self._stale[row] = True
                if outcome.truncated or (ends and outcome.terminated):
                    break

    def refresh(self) -> list[int]:
        """Observe the environments that have changed, and return their rows."""
        changed = [row for row, stale in enumerate(self._stale) if stale]
        for row in changed:
            if self._alive is not None:
                self._alive(row, "observing")
            try:
                self._rows[row] = self.simulations[row].observe()
            except Exception as error:
                known = known_fault(error)
                if known is None:
                    raise
                raise known from error
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

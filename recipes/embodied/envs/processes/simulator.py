"""The interface of simulators that hold one copy of a task each, and of batches of them.

An adapter to a simulator is a `Simulation`; `SimulatedEnv` batches simulations. No adapter imports its simulator before
it is constructed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.embodied.envs.env_spec import BoolArray, EnvSpec, FloatArray, Observation
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.config.validating.validation_messages import refusals
from rlinf_core.registry import Registry

# One row of an observation, by name: `states` float32 [S], `images.CAMERA` uint8 [H, W, 3], `instructions` a text.
Row: TypeAlias = dict[str, Any]
# Rewards, terminations and truncations of one action in n environments, none of which reports success.
Columns: TypeAlias = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]
OptionsT = TypeVar("OptionsT", bound=BaseModel)


class Start(NamedTuple):
    """The start of an episode.

    Attributes:
        seed: a seed from 0 to below 2^31, for simulators that draw their starts.
        number: position in the task's list of fixed starts, if it has one; taken modulo its length.
    """

    seed: int
    number: int

    @property
    def name(self) -> str:
        """The name of the start, the same in every environment of a group, as in `1834123-17`."""
        return f"{self.seed}-{self.number}"


class Outcome(NamedTuple):
    """Result of one action.

    Attributes:
        reward: the reward of this action.
        terminated: the task ended.
        truncated: the simulator itself truncated the episode.
        success: the task is solved in this state; None: not reported.
        failed: the simulator raised, and the episode ends here: it is dropped, or counts as failed if it has an
            `EnvError`.
    """

    reward: float
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    failed: bool = False


class Simulation(ABC):
    """One copy of a task in a simulator.

    The constructor takes a task and `options`: an instance of `options_model`, or a dictionary without one.

    Attributes:
        options_model: pydantic model of `env.train.options`; None: the simulator checks them.
        max_episode_steps: the task's own limit; None: it has none.
        control_hz: actions per simulated second; None: unknown.
        mapping: how the simulator's observations and actions are converted, in words; None: they are not.
        stored_starts: the number of starts that are states stored by the task's authors, which may be unstable under
            other physics; the constructor begins the first. 0: the simulator draws its starts.
    """

    options_model: ClassVar[type[BaseModel] | None] = None
    max_episode_steps: int | None = None
    control_hz: float | None = None
    mapping: str | None = None
    stored_starts: int = 0

    @classmethod
    def tasks(cls, task: str, options: Any) -> list[str]:
        """Return the tasks of a task or task-set name; by default the name itself."""
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

    def faults_of_start(self) -> list[str]:
        """Return how the start of the constructor or the last reset differs from the task's own description; empty if
        it
        agrees, or no start is stored.
        """
        return []

    @abstractmethod
    def observe(self) -> Row:
        """Return the current observation in new arrays. Images are rendered here, once per chunk of actions."""

    def examine(self, observations: Observation) -> None:  # noqa: B027 - most have nothing to say
        """Check new observations [n, ...] of several environments together, which is faster than one by one."""

    def picture(self) -> NDArray[np.uint8] | None:
        """Return the view of a simulation without cameras, uint8 [H, W, 3]; None: it renders nothing."""
        return None

    def native(self, actions: Array) -> Any:
        """Return actions [n, A] as `step` takes them, row by row; by default numbers from -1 to 1."""
        return np.clip(actions, -1, 1)

    def expert(self) -> Array | None:
        """Return the action [A] of a scripted expert in the current state; None: this task has none."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release what the simulator holds."""


class CheapSimulation(Simulation):
    """A simulation whose steps are so cheap that checking each one slows it down.

    A batch in one process calls `raw_step` in all of its environments, and checks the results together. If that finds a
    fault, or `raw_step` raises, results are checked one by one.

    Attributes:
        raw_step: the simulator's own method that takes a step.
        current: the current observation, as the simulator returned it.
        together: whether results may be checked together; a subclass with other results or observations sets False.
    """

    raw_step: Callable[[Any], Any]
    current: Any = None
    together: ClassVar[bool] = True

    def step(self, action: Any) -> Outcome:
        return self.checked(self.raw_step(action))

    @abstractmethod
    def checked(self, result: Any) -> Outcome:
        """Check a result of `raw_step`, and keep its observation."""

    @classmethod
    @abstractmethod
    def check_together(cls, results: Sequence[Any]) -> tuple[list[Any], Columns] | None:
        """Return the observations and the outcomes in results of `raw_step` of some simulations.

        Returns:
            None if a result must be checked by itself.
        """

    @abstractmethod
    def stacked(self, observations: Sequence[Any]) -> Observation | None:
        """Return the simulators' observations of some simulations as arrays [n, ...], new ones.

        Returns:
            None if an observation must be checked by itself.
        """


class BatchRequest(NamedTuple):
    """The description of a batch of simulations, in plain values that can be sent to another process.

    Attributes:
        simulation: the class, as `package.module:Class`.
        task: name of a task or a set of tasks.
        options: `env.train.options`.
        groups: the group of each environment; groups get the tasks of a set in turn.
    """

    simulation: str
    task: str
    options: Mapping[str, Any]
    groups: Sequence[int]


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class EpisodeAtDeath(BaseModel):
    """The episode that a simulator process was running when it died, with all data to replay it; stored in
    `quarantine/`.

    Attributes:
        environment, group: the numbers of its environment and of the environment's group within the job.
        seed, number: its start.
        actions: the executed actions, as far as they are kept, and the current chunk.
    """

    model_config = ConfigDict(extra="ignore")

    environment: _Count
    group: _Count
    seed: _Count
    number: _Count
    actions: list[list[Annotated[float, Field(allow_inf_nan=False)]]]

    @property
    def start(self) -> Start:
        """The start of the episode."""
        return Start(self.seed, self.number)


class BatchFacts(NamedTuple):
    """Facts about a batch of simulations.

    Attributes:
        spec: the common spec.
        max_episode_steps: the shortest of the tasks' own limits; None: no limit.
        tasks: the task of each environment.
        num_tasks: the number of tasks in the set; 1 for a single task.
        control_hz: the common control rate; None: unknown.
        start_faults: differences of the tasks' first stored starts from their descriptions; None: no start is stored.
        mapping: see `Simulation`.
    """

    spec: EnvSpec
    max_episode_steps: int | None
    tasks: list[str]
    num_tasks: int
    control_hz: float | None = None
    start_faults: list[str] | None = None
    mapping: str | None = None


def common_spec(specs: Sequence[EnvSpec], task: str) -> EnvSpec:
    """Return the spec that all simulations of a batch have.

    Raises:
        ConfigError: two of them differ.
    """
    other = next((spec for spec in specs if spec != specs[0]), None)
    if other is not None:
        raise ConfigError(
            f"environments of `{task}` differ in their observations or actions",
            where="env.task",
            why=f"one has {specs[0]}, another one {other}",
            help="give all environments the same spaces: one policy acts in them",
        )
    return specs[0]


class Outcomes(NamedTuple):
    """The results of one action in each environment; rows that were not stepped are 0.

    Attributes:
        rewards: float32 [B].
        terminations, truncations, successes: bool [B].
        judged: bool [B], whether success was reported.
        failures: bool [B], whether the simulator raised: see `Outcome.failed`.
    """

    rewards: FloatArray
    terminations: BoolArray
    truncations: BoolArray
    successes: BoolArray
    judged: BoolArray
    failures: BoolArray

    @classmethod
    def empty(cls, count: int) -> Outcomes:
        """Return all-zero results."""
        return cls(np.zeros(count, np.float32), *np.zeros((5, count), np.bool_))

    @classmethod
    def of(cls, columns: Columns) -> Outcomes:
        """Return the results of all environments."""
        rewards, terminations, truncations = columns
        nothing = np.zeros((3, len(rewards)), np.bool_)
        ends = np.array((terminations, truncations), np.bool_)
        return cls(np.array(rewards, np.float32), ends[0], ends[1], nothing[0], nothing[1], nothing[2])

    def write(self, row: int, outcome: Outcome) -> None:
        """Write the result of one environment."""
        self.rewards[row] = outcome.reward
        self.terminations[row] = outcome.terminated
        self.truncations[row] = outcome.truncated
        self.judged[row] = outcome.success is not None
        self.successes[row] = bool(outcome.success)
        self.failures[row] = outcome.failed

    def write_all(self, outcomes: Sequence[Outcome]) -> None:
        """Write the results of all environments; by columns, which is much faster than single numbers."""
        rewards, terminations, truncations, successes, failures = zip(*outcomes, strict=True)
        self.rewards[:] = rewards
        self.terminations[:] = terminations
        self.truncations[:] = truncations
        self.judged[:] = [success is not None for success in successes]
        self.successes[:] = [bool(success) for success in successes]
        self.failures[:] = failures


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
        known = ", ".join(f"`{name}`" for name in model.model_fields)
        raise ConfigError(
            "wrong options", where="env.options", why="; ".join(refusals(error)), help=f"known: {known}"
        ) from error

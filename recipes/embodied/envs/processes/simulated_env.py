"""A batch of environments made of simulations, in the worker process or in simulator processes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts, State
from recipes.embodied.envs.processes.process_pool import SimulatorDiedError, SimulatorProcesses
from recipes.embodied.envs.processes.simulation_batch import SimulationBatch
from recipes.embodied.envs.processes.simulator import BatchRequest, EpisodeAtDeath, Start
from recipes.embodied.envs.repeating import MOST_REPEATED
from recipes.training.arrays import Array
from rlinf_core.errors import RuntimeFailure


class SimulatedEnv(VectorEnv):
    """A batch of environments, each of which is a `Simulation`.

    Groups of environments get the tasks of a set in turn. The n-th episode of a group after a reset begins with the
    seed of its start, or with the next fixed start of the task: the groups of a task divide the list of fixed starts
    among themselves, so that no start repeats before all have been used.

    Simulators have no common call for their state. A resumed run therefore replays the actions of each running episode
    from its start; `load` checks by the observations whether the state is the same.

    Attributes:
        simulation: the class of simulations, as `package.module:Class`.
        processes: the default number of simulator processes; 0: the worker's own process.
        default_task: the task if the settings name none.
    """

    simulation: ClassVar[str]
    processes: ClassVar[int] = 1
    default_task: ClassVar[str] = ""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        groups = (self.numbers // settings.group_size).tolist()
        request = BatchRequest(self.simulation, settings.task or self.default_task, settings.options, groups)
        processes = self.processes if settings.num_processes is None else settings.num_processes
        self._simulators: SimulationBatch | SimulatorProcesses = (
            SimulatorProcesses(request, processes, settings.simulator_timeout, settings.owner)
            if processes
            else SimulationBatch(request)
        )
        facts = self._simulators.facts
        self.default_max_episode_steps, self.control_hz = facts.max_episode_steps, facts.control_hz
        self.mapping, self.start_faults = facts.mapping, facts.start_faults
        self._groups = np.array(groups)
        # Whether a simulator has ever reported success or failure.
        self._reports_success = False
        # The start of each running episode, and its actions so far.
        self._begun = np.zeros((settings.num_envs, 2), np.int64)
        self._actions: list[list[Array]] = [[] for _ in range(settings.num_envs)]

    @property
    def spec(self) -> EnvSpec:
        """The spec of the simulations."""
        return self._simulators.facts.spec

    @property
    def tasks(self) -> list[str]:
        """The task of each environment."""
        return self._simulators.facts.tasks

    @property
    def replaceable(self) -> bool:
        """See `VectorEnv`: not the batch, but each simulation of it."""
        return False

    def first_starts(self) -> list[dict[str, int]]:
        """See `VectorEnv`; `number` counts modulo the length of the task's list."""
        numbers = self._begun[:, 1].tolist()
        return [{**start, "number": number} for start, number in zip(super().first_starts(), numbers, strict=True)]

    def look(self, rows: IntArray) -> State | None:
        """See `VectorEnv`: camera images, or else what the simulator renders for a viewer."""
        seen = super().look(rows)
        if seen is not None:
            return seen
        pictures = self._simulators.pictures(rows.tolist())
        return None if pictures is None else {"picture": pictures}

    def close(self) -> None:
        """Close every simulation."""
        if hasattr(self, "_simulators"):
            self._simulators.close()

    def _start(self, rows: IntArray, starts: Starts) -> None:
        tasks = self._simulators.facts.num_tasks
        # The number of groups in the whole job that share a task, and the position of this group among them.
        sharing = max(1, (self.settings.total_envs or self.num_envs) // self.settings.group_size // tasks)
        rounds = self._reset + self._episodes.episode[rows]
        numbers = self._groups[rows] // tasks + rounds * sharing
        begun = [self._allowed(Start(*start)) for start in zip(starts.seeds(), numbers.tolist(), strict=True)]
        self._begun[rows] = begun
        for row in rows.tolist() if self.settings.keeps_actions else ():
            self._actions[row].clear()
        try:
            self._simulators.reset(rows.tolist(), begun)
        except SimulatorDiedError as error:
            raise self._with_episode(error) from None

    def _allowed(self, start: Start) -> Start:
        """Return the start, or the next one that is not quarantined."""
        while self.settings.set_aside and start.name in self.settings.set_aside:
            start = Start((start.seed + 1) % 2**31, start.number + 1)
        return start

    def _with_episode(self, error: SimulatorDiedError, ahead: Array | None = None) -> SimulatorDiedError:
        """Return the death of a simulator process, with its current episode.

        Args:
            error: the death.
            ahead: the current action chunk, [B, C, A].
        """
        row = error.row
        if row is not None and row < self.num_envs:
            actions = [*self._actions[row], *(() if ahead is None else ahead[row])]
            seed, number = self._begun[row].tolist()
            error.episode = EpisodeAtDeath(
                environment=int(self.numbers[row]),
                group=int(self._groups[row]),
                seed=seed,
                number=number,
                actions=[list(map(float, action)) for action in actions[:MOST_REPEATED]],
            )
        return error

    def _foresee(self, actions: Array) -> None:
        chunk, limit = actions.shape[1], self.max_episode_steps
        # If non-finite numbers end an episode, only the next step shows whether there is another.
        if chunk == 1 or self.settings.on_nonfinite == "skip":
            return
        steps = np.full(self.num_envs, chunk) if limit is None else np.minimum(limit - self._episodes.steps, chunk)
        steps[self._episodes.resting] = 0
        try:
            self._simulators.foresee(actions, steps, ends=not self.settings.ignore_terminations)
        except SimulatorDiedError as error:
            raise self._with_episode(error, actions) from None

    def _advance(self, actions: Array, rows: IntArray | None) -> Transition:
        stepped: list[int] | None = None if rows is None else rows.tolist()
        if self.settings.keeps_actions:
            kept = actions.copy()
            for row in range(self.num_envs) if stepped is None else stepped:
                self._actions[row].append(kept[row])
        try:
            result = self._simulators.step(stepped, actions, observed=self._observed_next)
        except SimulatorDiedError as error:
            raise self._with_episode(error, None if self.settings.keeps_actions else actions[:, None]) from None
        self._raised |= self._simulators.take_errors()
        self._reports_success = self._reports_success or np.count_nonzero(result.judged) > 0
        successes = result.successes if self._reports_success else None
        return Transition(result.rewards, result.terminations, result.truncations, successes, failures=result.failures)

    def _observe(self) -> Observation:
        try:
            return self._simulators.observe()
        except SimulatorDiedError as error:
            raise self._with_episode(error) from None

    def expert(self) -> FloatArray | None:
        return self._simulators.expert()

    def _save(self) -> State:
        counts = np.array([len(taken) for taken in self._actions])
        spec = self.spec
        actions = np.zeros((self.num_envs, counts.max(), spec.action_size), spec.action_dtype)
        for row, taken in enumerate(self._actions):
            if taken:
                actions[row, : len(taken)] = taken
        return {"begun": self._begun.copy(), "counts": counts, "actions": actions}

    def _load(self, state: State) -> None:
        for start in state["begun"].tolist():
            if (name := Start(*start).name) in self.settings.set_aside:
                raise RuntimeFailure(f"the start {name}, which is quarantined, is among them")
        self._begun = state["begun"].copy()
        counts, actions = state["counts"], state["actions"]
        self._actions = [list(actions[row, :count]) for row, count in enumerate(counts.tolist())]
        self._simulators.reset(range(self.num_envs), [Start(*start) for start in self._begun.tolist()])
        for step in range(actions.shape[1]):
            rows = np.flatnonzero(counts > step).tolist()
            if rows:
                self._simulators.step(rows, actions[:, step])

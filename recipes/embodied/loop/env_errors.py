"""Errors of the environments' own code, episodes in which simulator processes died, and the recovery of a rollout.

Each line of code that raises is reported once, and ends the run unless errors are only counted. An episode in which
processes died three times is quarantined; `rlinf why --replay` calls `replay`, which runs it again alone. After
other deaths only the env and rollout workers that died are restarted, and the rollout is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import numpy as np
from pydantic import ValidationError

from recipes.embodied.config import EmbodiedConfig, PolicyJob, resets_each_pass
from recipes.embodied.config.env_config import stepping
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.intervention_types import ENVIRONMENT, NONE
from recipes.embodied.envs.env_spec import EnvError
from recipes.embodied.envs.processes.process_pool import SimulatorDiedError, SimulatorProcesses
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import BatchRequest, EpisodeAtDeath
from recipes.embodied.envs.registry import env_class
from recipes.embodied.envs.repeating import SimulatorError
from recipes.embodied.loop.protocols import ALL_ERRORS, EmbodiedEnv, EmbodiedRollout, EpisodeSums, Layout
from rlinf_core import Job, Relaunching, RLinfError, WorkerDiedError, WorkerGroup, WorkerGroupError, WorkerGroupHandle
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import Suspects, all_deaths
from rlinf_core.runners.run_program import Dead
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.run_events import QuarantinedItem
from rlinf_core.worker.handle import wait_together

OnEnvError: TypeAlias = Literal["stop", "count"]
# The number of different episodes after which the code is at fault, rather than an unusual state.
MOST_EPISODES: Final = 3
_AGAIN: Final = "it raised again from the same seed and the same actions"
_LOGGER = logging.getLogger("rlinf")


class EnvironmentRaisedError(SimulatorError):
    """The code of an environment raises reproducibly, from the same seed and the same actions."""


class EnvErrors:
    """The errors of a run's environments.

    Args:
        on_error: `runner.on_env_error`.
        folder: the run folder, whose events record each error; None: no folder.
        warn: reports the first error of each line of code.
    """

    def __init__(
        self, on_error: OnEnvError, folder: Path | None = None, warn: Callable[[str], None] = _LOGGER.warning
    ) -> None:
        self._on_error, self._folder, self._warn = on_error, folder, warn
        self._places: set[str] = set()
        self._episodes: set[str] = set()

    def take_from(self, env: WorkerGroup[EmbodiedEnv], sums: Iterable[EpisodeSums], where: str, step: int) -> None:
        """Take the errors of the env workers if the sums of a rollout count any; see `take`."""
        if any(ALL_ERRORS in of_rank for of_rank in sums):
            by_rank: list[Sequence[EnvError]] = env.take_errors().wait()
            self.take([error for errors in by_rank for error in errors], where, step, first=step == 0)

    def take(self, errors: Sequence[EnvError], where: str, step: int, *, first: bool) -> None:
        """Count the errors of a rollout.

        Args:
            errors: the errors of all env workers.
            where: the section of the environments.
            step: the last finished step.
            first: whether this is the first rollout of the run.

        Raises:
            EnvironmentRaisedError: `on_env_error` is `stop`, and this is the first rollout or the third episode.
        """
        for error in errors:
            self._episodes.add(error.episode)
            if error.place not in self._places:
                self._places.add(error.place)
                self._tell(error, step)
        if not errors or self._on_error == "count" or (not first and len(self._episodes) < MOST_EPISODES):
            return
        episodes = len({error.episode for error in errors} if first else self._episodes)
        raise EnvironmentRaisedError(
            errors[0].text,
            where=where,
            why=f"{_AGAIN}, in {episodes} episode{'s'[: episodes > 1]}{' of the first pass' if first else ''}",
            help="mend that line; with `runner.on_env_error: count` such episodes only count as failed",
        )

    def _tell(self, error: EnvError, step: int) -> None:
        self._warn(f"{error.text}; {_AGAIN}: such episodes count as failed")
        if self._folder is not None:
            with suppress(OSError):
                run_events.append_event(self._folder, run_events.ENVIRONMENT, step, error.text, [_AGAIN])


class SuspectedEpisodes:
    """The episodes of a run in which simulator processes died, over all its attempts.

    A simulator process reports its current environment. An env worker that steps environments itself does not, so that
    its death is attributed to no episode.

    Args:
        record: the record of the run, which stores the episodes.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._suspects: Suspects[EpisodeAtDeath] = record.suspects
        self._died = False

    @property
    def count(self) -> int:
        """The number of quarantined starts."""
        return len(self._suspects.set_aside)

    def known_in(self, layout: Layout) -> Layout:
        """Return a layout with the starts that env workers skip."""
        return layout._replace(suspects=self._died or bool(self.count), set_aside=self._suspects.set_aside)

    def died(self, error: BaseException, step: int) -> None:
        """Count the deaths in a failed step, and quarantine an episode at its third death."""
        for cause in all_deaths(error).values():
            episode = cause.episode if isinstance(cause, SimulatorDiedError) else None
            if episode is None:
                continue
            self._died = True
            deaths = self._suspects.died_of_one(episode.start.name, episode, f"{cause.cause}".partition("\n")[0])
            if deaths:
                self._record.set_aside("episode", episode.start.name, step, deaths, episode.model_dump())


def replay(job: Job, item: QuarantinedItem, *, emit: Callable[[str], None] = lambda text: None) -> str:
    """Replay an episode in a separate simulator process.

    Returns:
        How the process died; empty if it survived.

    Raises:
        RLinfError: the item is not an episode of such an environment.
    """
    config = cast("PolicyJob", job.config)
    environments = config.env.train if item.step else config.env.eval
    kind: Any = env_class(environments.env_type)
    try:
        kept = EpisodeAtDeath.model_validate(item.replay)
    except ValidationError as error:
        raise RLinfError(f"episode {item.item} was not kept as a whole", why=str(error).splitlines()[0]) from None
    if not (isinstance(kind, type) and issubclass(kind, SimulatedEnv)):
        raise RLinfError(f"`{environments.env_type}` has no simulators", help="was the run's file changed?")
    task = environments.task or kind.default_task
    request = BatchRequest(kind.simulation, task, environments.options, [kept.group])
    emit(f"`{task}`, seed {kept.seed}, start {kept.number}, {len(kept.actions)} actions")
    processes: SimulatorProcesses | None = None
    try:
        processes = SimulatorProcesses(request, 1, stepping(environments).simulator_timeout, "the replay")
        processes.reset([0], [kept.start])
        for action in kept.actions:
            processes.step(None, np.array([action]))
        processes.observe()
    except SimulatorDiedError as error:
        return str(error.cause)
    finally:
        if processes is not None:
            processes.close()
    return ""


T = TypeVar("T")


class RolloutRecovery(Relaunching):
    """The recovery of rollouts and evaluations of a synchronous run.

    A rollout is a function of weights, step and the running episodes. The episodes are saved after each rollout, and
    loaded before a repetition.

    Args:
        config: the configuration of the job.
        actor, rollout, env: the workers.
        record: the record of the run.
        forget: forgets an attempt in the loop; called with whether the rollout workers need weights again.
        syncing: whether weights are being sent.

    Attributes:
        starts: the layout of the job and the spec of its environments, with which workers are prepared.
        episodes: the running episodes after the last rollout, see `EnvWorker.save_state`.
        suspects: the episodes in which simulator processes died.
    """

    def __init__(
        self,
        config: EmbodiedConfig,
        actor: WorkerGroup[Any],
        rollout: WorkerGroup[EmbodiedRollout],
        env: WorkerGroup[EmbodiedEnv],
        record: RunRecord,
        forget: Callable[[bool], None],
        syncing: Callable[[], bool],
    ) -> None:
        super().__init__({"rollout": rollout, "env": env}, record)
        self._synchronous = not config.runner.staleness
        # Robots and people cannot return to an earlier state: with them, the whole run restarts instead.
        sections = (config.env.train, config.env.eval)
        self._simulates = config.env.train.intervention.source == NONE and all(
            section.judge.source == ENVIRONMENT and not is_robot(section.env_type) for section in sections
        )
        self._resets = resets_each_pass(config)
        self._actor, self._rollout, self._env = actor, rollout, env
        self._forget, self._syncing = forget, syncing
        self.starts: tuple[Layout, Any] | None = None
        self._calls: list[WorkerGroupHandle[Any]] = []
        self._what, self._trains = "", False
        self._attempt = 0
        self.episodes: Sequence[bytes | None] = [b""]
        self.suspects = SuspectedEpisodes(record)

    @property
    def attempt(self) -> tuple[int, ...]:
        """The argument that distinguishes the calls of an attempt from earlier ones; the first attempt has none."""
        return (self._attempt,) if self._attempt else ()

    def rollouts(self, step: int, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, which sends weights and runs a step's rollout; repeat it after deaths."""
        self._what, self._trains = f"the rollout of step {step}", True
        return self.repeat(attempt)

    def evaluation(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, which sends weights and runs an evaluation; repeat it after deaths."""
        self._what, self._trains = "the evaluation", False
        return self.repeat(attempt)

    def watched(self, *calls: WorkerGroupHandle[Any]) -> tuple[WorkerGroupHandle[Any], ...]:
        """Return calls of an attempt, to be abandoned if it fails."""
        self._calls = [call for call in self._calls if not call.done()] + list(calls)
        return calls

    def saving(self) -> tuple[WorkerGroupHandle[Any], ...]:
        """Return the calls that save the running episodes after a rollout; none if each rollout resets."""
        return (self._env.save_state(),) if self._synchronous and not self._resets else ()

    # Recovery

    def relaunch(self, error: WorkerGroupError | WorkerDiedError) -> bool:
        """See `Relaunching`; the episode is recorded even if all workers restart instead."""
        self.suspects.died(error, self._record.step + 1 if self._trains else 0)
        return super().relaunch(error)

    def may_relaunch(self, dead: Dead) -> bool:
        return (
            self._synchronous
            and self.starts is not None
            and (self._simulates or "env" not in dead)
            # Sending gathers shards, so that an actor may still wait for one whose peer died.
            and not (self._syncing() and self._actor.world_size > 1)
        )

    def prepare(self, dead: Dead) -> str:
        if self.starts is None:
            raise RuntimeError("called before the workers were prepared")
        calls, self._calls = self._calls, []
        for call in calls:
            call.abandon()
        layout, spec = self.starts = self.suspects.known_in(self.starts[0]), self.starts[1]
        environments, acting = dead.get("env", ()), dead.get("rollout", ())
        made: list[WorkerGroupHandle[Any]] = []
        if environments:
            made.append(self._env.execute_on(*environments).init_worker(layout))
        if acting:
            made.append(self._rollout.execute_on(*acting).init_worker(layout, spec))
        wait_together(*made)
        self._rollout.drop_messages(self._env)
        self._rollout.drop_messages(self._actor)
        lost = self._load(environments)
        self._forget(bool(acting))
        self._attempt += 1
        return f"{self._what}; {lost}" if lost else self._what

    def _load(self, environments: Sequence[int]) -> str:
        """Restore the episodes after the last rollout; return which of them are lost, in words."""
        if self._resets:
            return ""
        packs = self.episodes
        whole = [pack for pack in packs if pack is not None]
        again = range(self._env.world_size) if self._trains else environments
        if len(whole) < len(packs):
            return f"unfinished episodes of {len(environments)} env workers are left out" if environments else ""
        if not again:
            return ""
        reasons = {reason for reason in self._env.execute_on(*again).load_state(whole).wait() if reason}
        return f"episodes start over: {'; '.join(sorted(reasons))}" if reasons else ""

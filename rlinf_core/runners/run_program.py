"""The shared part of a recipe's program: the run's record, its cluster, and recovery after deaths.

Either all workers are started again from the last checkpoint (`with_recovery`), or only the dead (`Relaunching`).
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from rlinf_core.cluster import driver_job
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.config.sections.runner import RestartLimit
from rlinf_core.errors import RayStartError, RLinfError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.job.recipe import Job, Program
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.runners import events
from rlinf_core.runners.events import Listener
from rlinf_core.runners.evidence import evidence_line
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import NodesReturned, Restarts, all_deaths, death
from rlinf_core.runners.runner import Runner
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.suggest import quoted
from rlinf_core.supervision.deaths import took_its_node
from rlinf_core.worker.handle import fallen_watcher
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup

LOGGER = logging.getLogger("rlinf")
T = TypeVar("T")


class JobLoop(Protocol):
    """A loop over the worker groups of a job: a `Runner`, or a service."""

    def init_workers(self) -> None: ...
    def run(self) -> None: ...


Launch: TypeAlias = Callable[[Any, Cluster, RunRecord], JobLoop]
"""Called with the configuration, the cluster and the record; launches the worker groups and returns their loop."""


def run_job(
    job: Job, folder: RunFolder, listener: Listener, launch: Launch, components: Sequence[str] | None = None
) -> None:
    """Run a job to its end, and record it in `folder`.

    If a worker dies, all are ended, and the run resumes from its last checkpoint with new ones, up to
    `runner.max_restarts` times, by calling `launch` again. The job's configuration must have a section `runner`.

    Args:
        job: the job.
        folder: the run folder.
        listener: called with the events of the run.
        launch: the recipe's own part, which launches the workers and returns their loop.
        components: the components that it launches, whose devices are claimed first; by default all placed ones.

    Raises:
        WorkerGroupError: a worker failed, or died once more than `runner.max_restarts` allows.
        ClusterError: the cluster is not available.
        CheckpointError: the checkpoint to resume from does not match, or one cannot be written.
    """
    config: Any = job.config
    with RunRecord.open(job, folder, listener) as record, driver_job.kept_claims(str(folder.path)):
        attempt = partial(_attempt, config, record, launch, components)
        with_recovery(attempt, record, config.runner.max_restarts)
        record.finished()


def runner_program(runner: Callable[..., Runner], workers: Mapping[str, type[Worker]]) -> Program:
    """Return a recipe's program that places each component, launches its workers, and runs a loop over them.

    Args:
        runner: a subclass of `Runner`, called with the configuration, the groups by component, and the record.
        workers: the class of each component's workers. Its constructor, if defined, takes the configuration. A
            component that the file does not place has no group.
    """

    def launch(config: Any, cluster: Cluster, record: RunRecord) -> Runner:
        placement = ComponentPlacement(config, cluster)
        groups = {
            name: kind.create_group(*(() if kind.__init__ is object.__init__ else (config,)))
            for name, kind in workers.items()
            if name in placement.components
        }
        for group_name, name in _components(config).items():
            if name in groups:
                groups[name].launch(cluster, placement.get_strategy(name), group_name)
        return runner(config, groups, record)

    def program(job: Job, folder: RunFolder, listener: Listener) -> None:
        run_job(job, folder, listener, launch, tuple(workers))

    return program


def _attempt(config: Any, record: RunRecord, launch: Launch, components: Sequence[str] | None) -> None:
    record.emit(events.Waiting("the cluster"))
    with Cluster(cluster_cfg=config.cluster) as cluster:
        record.watch(cluster, _components(config))
        # Claim all devices of the job at once, before anything starts.
        claim_components(cluster, config, components)
        try:
            runner = launch(config, cluster, record)
            runner.init_workers()
            runner.run()
        except NodesReturned:
            driver_job.leave_claims(cluster)
            raise
        except Exception as error:
            # Workers fail or die with a process that they depend on, and their failure may be noticed first.
            watcher = fallen_watcher()
            # Keep evidence before the processes end.
            record.keep_evidence(watcher or error)
            if _restart_follows(record, watcher or error):
                driver_job.leave_claims(cluster)
            if watcher is None or error is watcher:
                raise
            raise watcher from None


def _restart_follows(record: RunRecord, error: Exception) -> bool:
    """Return whether `with_recovery` starts another attempt after this failure."""
    cause = death(error) if isinstance(error, WorkerGroupError | WorkerDiedError) else None
    return cause is not None and record.restarts.remain(record.component_of(cause.address))


def claim_components(cluster: Cluster, config: Any, components: Sequence[str] | None = None) -> None:
    """Claim the devices of the placed ones of these components of a job; by default of all placed components.

    Raises:
        DeviceHeldError: another job holds a device, and `RLINF_CLAIMS` says not to wait.
        PlacementError: the cluster cannot hold the processes as asked.
    """
    # With the topology instead of the cluster, it does not repeat the warnings of the recipe's placement.
    placement = ComponentPlacement(config, cluster.topology)
    placed = list(placement.components)
    names = placed if components is None else [name for name in components if name in placed]
    cluster.claim([one for name in names for one in placement.get_strategy(name).get_placement(cluster.topology)])


def _components(config: Any) -> dict[str, str]:
    """Return the placed components by group name, which is `group_name` of their section, if set."""
    placed: list[str] = list(config.cluster.component_placement)
    return {getattr(getattr(config, name, None), "group_name", name): name for name in placed}


def with_recovery(attempt: Callable[[], T], record: RunRecord, limit: RestartLimit) -> T:
    """Return the result of `attempt`. It is called again, with the record rewound, after a worker's death, and when
    lost nodes have joined again, which does not count as a restart.

    An exception raised by a worker is not a death: it would recur. An embedded Ray that does not start counts as a
    death, except in the first attempt.

    Args:
        attempt: launches all workers and runs from `record.step` to the end. It must end its workers before raising.
        record: the record of the run.
        limit: the limit of restarts.

    Raises:
        WorkerGroupError: a worker failed, or died beyond the limit.
        WorkerDiedError: a process that workers depend on died beyond the limit.
        RayStartError: Ray did not start in the first attempt, or beyond the limit.
    """
    record.restarts = Restarts(limit)
    # The component whose death caused the last restart.
    died: str | None = None
    while True:
        try:
            return attempt()
        except NodesReturned:
            record.go_back()
        except (WorkerGroupError, WorkerDiedError, RayStartError) as error:
            # A new Ray that does not start in time, for example on a busy machine, counts as another such death.
            cause = error if isinstance(error, RayStartError) else death(error)
            died = record.component_of(cause.address) if isinstance(cause, WorkerDiedError) else died
            evidence = record.keep_evidence(error)
            restart = None if cause is None or died is None else record.restarts.allow(died)
            if cause is None or restart is None:
                raise
            step = record.go_back()
            reason, *details = str(cause).splitlines()
            details += evidence_line(evidence)
            record.emit(events.RunRestarted(step, *restart, reason, tuple(details)))


Dead: TypeAlias = Mapping[str, tuple[int, ...]]
"""The ranks that died, by component."""


class Relaunching(ABC):
    """The relaunch of only the dead workers of a running loop, and the repetition of the failed attempt.

    Args:
        groups: the worker groups whose dead workers may be started again alone, by component.
        record: the record of the run; its limit of restarts also counts relaunches.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup[Any]], record: RunRecord) -> None:
        self._groups = groups
        self._record = record

    @abstractmethod
    def may_relaunch(self, dead: Dead) -> bool:
        """Return whether these workers may be started again alone; else the failure is raised, and the run restarts."""

    @abstractmethod
    def prepare(self, dead: Dead) -> str:
        """Undo the failed attempt, and prepare the relaunched workers; return a description of the repeated work."""

    def repeat(self, attempt: Callable[[], T]) -> T:
        """Call `attempt`, and call it again after each death of workers; return its result.

        Args:
            attempt: a function whose changes `prepare` undoes after it has raised.

        Raises:
            Exception: the error of `attempt`, if it is no death, there are more deaths than `runner.max_restarts`, or
                a worker cannot be started again alone.
        """
        while True:
            try:
                return attempt()
            except (WorkerGroupError, WorkerDiedError) as error:
                if not self.relaunch(error):
                    raise

    def relaunch(self, error: WorkerGroupError | WorkerDiedError) -> bool:
        """Relaunch the workers whose deaths an error reports; return False if they cannot be relaunched, or not
        again."""
        dead = self._dead(error)
        # The death of a process on which all depend may have ended them.
        if not dead or not self.may_relaunch(dead) or fallen_watcher() is not None:
            return False
        cause, record, began = death(error), self._record, time.monotonic()
        restart = None if cause is None else record.restarts.allow(record.component_of(cause.address))
        if cause is None or restart is None:
            return False
        with ThreadPoolExecutor(1, "rlinf-evidence") as background:
            # Evidence is collected while the new processes import their packages.
            evidence = background.submit(record.keep_evidence, error)
            try:
                for component, ranks in dead.items():
                    self._groups[component].relaunch(*ranks)
                repeated = self.prepare(dead)
            except RLinfError as failure:
                names = quoted(f"{component}:{rank}" for component, ranks in dead.items() for rank in ranks)
                LOGGER.warning("%s could not be started again alone: %s", names, failure)
                return False
        reason, *details = str(cause).splitlines()
        if cause.end is not None and cause.end.signal is not None:
            reason = f"{reason} ({cause.end.signal})"
        lines = (*details, *evidence_line(evidence.result()))
        seconds = time.monotonic() - began
        record.emit(events.WorkersRelaunched(record.step, *restart, reason, seconds, repeated, lines))
        return True

    def _dead(self, error: BaseException) -> Dead | None:
        """Return the dead ranks by component; None if a dead process is no worker of these groups, or lost its node."""
        names = {group.worker_group_name: component for component, group in self._groups.items()}
        dead: dict[str, list[int]] = {}
        for address, cause in all_deaths(error).items():
            group, _, rank = address.rpartition(":")
            if group not in names or not rank.isdigit() or took_its_node(cause):
                return None
            dead.setdefault(names[group], []).append(int(rank))
        return {component: tuple(sorted(ranks)) for component, ranks in dead.items()}

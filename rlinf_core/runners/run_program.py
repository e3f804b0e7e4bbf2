"""The shared part of a recipe's program: the run's record, its cluster, and recovery after a death."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.config.sections.runner import RestartLimit
from rlinf_core.errors import RayStartError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.job.recipe import Job, Program
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.runners import events
from rlinf_core.runners.events import Listener
from rlinf_core.runners.evidence.keeping import evidence_line
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery.restarts import NodesReturned, Restarts, death
from rlinf_core.runners.runner import Runner
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.group.watchers import fallen_watcher
from rlinf_core.worker.worker import Worker

T = TypeVar("T")


class JobLoop(Protocol):
    """A loop over the worker groups of a job: a `Runner`, or a service."""

    def init_workers(self) -> None: ...
    def run(self) -> None: ...


Launch: TypeAlias = Callable[[Any, Cluster, RunRecord], JobLoop]
"""Called with the configuration, the cluster and the record; launches the worker groups and returns their loop."""


def run_job(job: Job, folder: RunFolder, listener: Listener, launch: Launch) -> None:
    """Run a job to its end, and record it in `folder`.

    If a worker dies, all are ended, and the run resumes from its last checkpoint with new ones, up to
    `runner.max_restarts` times: `launch`, the recipe's own part, is called again. The job's configuration must have a
    section `runner`.

    Raises:
        WorkerGroupError: a worker failed, or died once more than `runner.max_restarts` allows.
        ClusterError: the cluster is not available.
        CheckpointError: the checkpoint to resume from does not match, or one cannot be written.
    """
    config: Any = job.config
    with RunRecord.open(job, folder, listener) as record:
        with_recovery(lambda: _attempt(config, record, launch), record, config.runner.max_restarts)
        record.finished()


def loop_program(runner: Callable[..., Runner], workers: Mapping[str, type[Worker]]) -> Program:
    """Return the program of a recipe that places each component, launches its workers, and runs a loop over them.

    Args:
        runner: called with the configuration, the groups by component and the record; a subclass of `Runner`.
        workers: the class of each component's workers. Its constructor, if it has one, takes the configuration. A
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
        run_job(job, folder, listener, launch)

    return program


def _attempt(config: Any, record: RunRecord, launch: Launch) -> None:
    record.emit(events.Waiting("the cluster"))
    with Cluster(cluster_cfg=config.cluster) as cluster:
        record.watch(cluster, _components(config))
        try:
            runner = launch(config, cluster, record)
            runner.init_workers()
            runner.run()
        except NodesReturned:
            raise
        except Exception as error:
            # Workers fail or die with a process that they depend on, and may be heard of first.
            watcher = fallen_watcher()
            # Before the processes end that show why.
            record.keep_evidence(watcher or error)
            if watcher is None or error is watcher:
                raise
            raise watcher from None


def _components(config: Any) -> dict[str, str]:
    """Return the placed components by group name: `group_name` of their section, if set."""
    placed: list[str] = list(config.cluster.component_placement)
    return {getattr(getattr(config, name, None), "group_name", name): name for name in placed}


def with_recovery(attempt: Callable[[], T], record: RunRecord, limit: RestartLimit) -> T:
    """Return the result of `attempt`. It is called again after a worker's death, once the record was rewound, and when
    nodes have joined again that elastic components do without, which is no restart that counts.

    An exception raised by a worker is not a death: it would recur. A Ray of its own that does not start is one, but for
    the first attempt.

    Args:
        attempt: launches all workers and runs to the end, from `record.step` on. It must end its workers before
            raising.
        record: the record of the run.
        limit: how often it is called again.

    Raises:
        WorkerGroupError: as raised, or the death of a worker after the last restart.
        WorkerDiedError: the same, of a process that workers depend on.
        RayStartError: as raised by the first attempt, or by the last one.
    """
    record.restarts = Restarts(limit)
    # The component whose death the last restart followed.
    died: str | None = None
    while True:
        try:
            return attempt()
        except NodesReturned:
            record.go_back()
        except (WorkerGroupError, WorkerDiedError, RayStartError) as error:
            # A new Ray that does not start in time, as on a busy machine, counts as one more death of the same.
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

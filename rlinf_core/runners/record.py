"""The record of a running job: metrics, checkpoints, state and events."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from rlinf_core.cluster import driver_job, engine
from rlinf_core.config.secrets import mask
from rlinf_core.config.sections.runner import RestartLimit
from rlinf_core.config.tree import to_data
from rlinf_core.errors import CheckpointError, CommunicationTimeoutError, RLinfError, RunError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.foreign.files import lacks_room, write_fault
from rlinf_core.runners import events
from rlinf_core.runners.events import ItemFates, Listener
from rlinf_core.runners.evidence import keep_evidence
from rlinf_core.runners.exporters import BackendSettings, PrometheusExporter, open_backends
from rlinf_core.runners.metrics import MetricsWriter, read_metrics, write_profile
from rlinf_core.runners.recovery import Restarts, Suspects
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import Checkpoint, Manifest, open_checkpoint
from rlinf_core.runners.storage.run_events import quarantine
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.trace import TraceWriter
from rlinf_core.waiting import Deadline
from rlinf_core.worker.timer import forget_calls

T = TypeVar("T")
LOGGER = logging.getLogger("rlinf")
# The time limit for answers of all processes: one that runs no method answers within milliseconds.
_BUSY_SECONDS = 2.0

if TYPE_CHECKING:
    from rlinf_core.cluster.cluster import Cluster
    from rlinf_core.cluster.membership import NodeChange
    from rlinf_core.config.sections.runner import RunnerConfig
    from rlinf_core.job.load import Job
    from rlinf_core.job.recipe import Fact, Recipe
    from rlinf_core.process.proc import Peak
    from rlinf_core.worker.handle import WorkerGroupHandle
    from rlinf_core.worker.worker_group import WorkerGroup


class RunConfig(Protocol):
    """The part of a job's configuration that the record needs."""

    @property
    def recipe(self) -> str: ...
    @property
    def runner(self) -> RunnerConfig: ...


class RunRecord:
    """The record of one run, over all its attempts.

    Args:
        folder: the run folder.
        metrics: the writer of `metrics.jsonl`, with its services.
        listener: called with each event.
        config_hash: the hash of the resolved configuration.
        facts: the values that a run must share to resume from a checkpoint of this one (`Manifest.facts`).
        trace: the writer of `trace.json`, if the run is traced. Closed with this record, like `metrics`.

    Attributes:
        step: the last finished step.
        first_step: the first step of the current attempt.
        newest: the newest value of every metric.
        source: the checkpoint to resume from, or None for the start.
        restarts: the restarts after deaths so far; by default no restart is allowed.
        suspects: the items suspected of causing deaths, over all attempts.
        keeps_steps: whether finished steps stay valid after a death, because their results are stored elsewhere.
    """

    def __init__(
        self,
        folder: RunFolder,
        metrics: MetricsWriter,
        listener: Listener,
        *,
        config_hash: str = "",
        facts: Mapping[str, Fact] | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        self.folder = folder
        self.emit = listener if trace is None else trace.listening(listener)
        self._trace = trace
        self._metrics = metrics
        # The driver records calls, too, perhaps of an earlier run in this process.
        forget_calls()
        self._config_hash = config_hash
        self._facts = dict(facts or {})
        self._began: float | None = None
        # The seconds from the beginning to the last finished work.
        self._seconds = 0.0
        self._last_step: int | None = None
        # The time when the attempt's first step, which may compile, ended; None before.
        self._first_ended: float | None = None
        # The component of each worker group.
        self._components: Mapping[str, str] = {}
        self._changes: tuple[NodeChange, ...] = ()
        self._cluster: Cluster | None = None
        self.restarts = Restarts(RestartLimit(max=0))
        self.suspects: Suspects[Any] = Suspects()
        self.keeps_steps = False
        self.source: Checkpoint | None = None
        if folder.resumed_from is not None:
            self.source = open_checkpoint(folder.resumed_from)
            self.source.check(self._facts)
        self.step = 0
        self._saved: int | None = None
        self._begin_after(self.source)

    @classmethod
    def open(cls, job: Job, folder: RunFolder, listener: Listener) -> Self:
        """Return the record for the run of a validated job, with the services of its `runner.logger`.

        Raises:
            CheckpointError: the checkpoint to resume from does not match.
            RunError: the folder cannot be written, or a service cannot be started.
            ConfigError: a service needs a package that is not installed.
        """
        config: Any = job.config
        digest, plain = "", dict[str, Any]()
        if job.tree is not None:
            digest = folder.write_config(job)
            plain = cast("dict[str, Any]", to_data(mask(job.tree, job.secret)))
        return cls._opened(folder, listener, config, job.recipe, digest, plain)

    @classmethod
    def _opened(
        cls,
        folder: RunFolder,
        listener: Listener,
        config: RunConfig,
        recipe: Recipe | None,
        digest: str,
        plain: Mapping[str, Any],
    ) -> Self:
        """Return a record with the services of `runner.logger`, which receive the configuration `plain`."""
        runner = config.runner
        resumed = folder.resumed_from is not None
        # Metrics after the checkpoint are still in the file: they are cut off later, once the services know this step.
        newest_step = max((line.step for line in read_metrics(folder.metrics_file)), default=-1)
        project = runner.logger.project_name
        settings = BackendSettings(folder.path, project, folder.path.name, plain, resumed, newest_step)
        services = open_backends(runner.logger.logger_backends, settings)
        if runner.metrics_port is not None:
            services.append(PrometheusExporter(settings, runner.metrics_port))
        metrics = MetricsWriter(folder.metrics_file, services)
        try:
            trace = TraceWriter(folder.trace_file) if runner.trace else None
            return cls(folder, metrics, listener, config_hash=digest, facts=facts_of(recipe, config), trace=trace)
        except BaseException:
            metrics.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._trace is not None:
                self._trace.close()
        finally:
            self._metrics.close()

    def watch(self, cluster: Cluster, components: Mapping[str, str]) -> None:
        """Make groups launched from now on write their logs and traces into the run folder.

        The listener is notified of each launch. `components` maps the groups' names to the names of their log folders.
        """
        self._components, self._cluster = components, cluster
        running = engine.current()
        try:
            self.folder.update(address=running.address if running is not None else "")
        except RunError as error:
            LOGGER.warning("the address of the cluster cannot be written to %s: %s", error.where, error.why)
        self.emit(events.ClusterReady(cluster.topology))
        self._emit_node_changes(cluster.changes)

        def launching(group: str, workers: int, started: int) -> None:
            count_text = f"{started} of {workers}" if started else str(workers)
            waiting = f"{components.get(group, group)}: {count_text} process{'es' if workers > 1 else ''}"
            self.emit(events.Waiting(waiting))

        def waits(what: str, again: bool, instead: str) -> None:
            self.emit(events.Waiting(what, again=again, instead=instead))

        traced = self._trace is not None
        cluster.record(self.folder.logs, log_names=components, trace=traced, on_launch=launching, on_wait=waits)
        if self._trace is not None:
            self._trace.forget()

    @property
    def nodes_returned(self) -> bool:
        """Whether a lost node, without which elastic components run, has joined again."""
        return self._cluster is not None and self._cluster.has_returned()

    def _emit_node_changes(self, changes: tuple[NodeChange, ...]) -> None:
        """Emit the differences from the nodes of the previous attempt."""
        before, self._changes = self._changes, changes
        texts = [change.text for change in changes if change not in before]
        now = {change.rank for change in changes}
        texts += [f"node {change.rank} is back" for change in before if change.rank not in now]
        if texts:
            reasons = tuple(change.reason for change in changes if change not in before)
            self.emit(events.NodesChanged(self.step, "; ".join(texts), reasons))

    def collect_trace(self, *groups: WorkerGroup[Any], last: bool = False) -> None:
        """Collect the spans of these groups, if the run is traced; with `last`, wait for busy ones."""
        if self._trace is not None:
            self._trace.collect(groups, last=last)

    def keep_memory(self, groups: Mapping[str, WorkerGroup[Any]]) -> None:
        """Write the peak memory of each process so far, by phase, and the durations of its calls.

        Components with a process in an endless method, such as asynchronous generation, are omitted.
        """
        try:
            peaks = _answers({component: group.memory_peaks() for component, group in groups.items()})
            # A component that has answered one question answers the other at once.
            calls = _answers({component: groups[component].call_records() for component in peaks})
        except RLinfError as error:
            # The run can do without these data.
            LOGGER.warning("memory and durations of the run's processes were not saved: %s", error)
            return
        for what, write in (
            ("memory", partial(self._write_memory, peaks)),
            ("durations", partial(write_profile, self.folder.profile_file, calls)),
        ):
            try:
                write()
            except OSError as error:
                LOGGER.warning("%s of the run's processes were not saved: %s", what, error)

    def _write_memory(self, peaks_of: Mapping[str, Sequence[Mapping[str, Peak]]]) -> None:
        processes = [
            {"component": component, "rank": rank, "phases": {phase: peak._asdict() for phase, peak in peaks.items()}}
            for component, by_rank in peaks_of.items()
            for rank, peaks in enumerate(by_rank)
        ]
        record = {"schema": "rlinf.memory/1", "processes": processes}
        durable.write_whole(self.folder.memory_file, json.dumps(record, indent=1) + "\n")

    def component_of(self, address: str) -> str:
        """Return the component of a worker; without one, the name of its group or of the process."""
        group = address.partition(":")[0]
        return self._components.get(group, group)

    def keep_evidence(self, error: BaseException) -> Path | None:
        """Keep evidence of a failure while processes still live; return its folder, also if it was kept before."""
        return keep_evidence(self.folder.path, error, self.step, self._components)

    def set_aside(
        self, kind: str, item: str, step: int, deaths: Sequence[str], replay: Mapping[str, Any] | None = None
    ) -> None:
        """Record in the run folder that an item is quarantined, since the processes that processed it died.

        Args:
            kind: the kind of the item, for example `task`.
            item: the name of the item.
            step: the step for which it was processed; 0 for an evaluation.
            deaths: the descriptions of the deaths, one line each.
            replay: see `QuarantinedItem`.
        """
        place = ""
        try:
            place = f"; see {quarantine(self.folder.path, kind, item, step, deaths, replay)}"
        except OSError as error:
            LOGGER.warning("what is known of %s %s could not be kept: %s", kind, item, error)
        LOGGER.warning("%s %s is quarantined: %d processes died of it%s", kind, item, len(deaths), place)

    def _begin_after(self, source: Checkpoint | None) -> None:
        """Resume from the step of `source`, or from the start; before the first start, later metrics are kept."""
        self.source = source
        self.step = source.step if source else 0
        self.first_step = self.step + 1
        if self._began is not None:
            self._metrics.rewind(self.step)
        self.newest = dict(self._metrics.newest_up_to(self.step))

    def go_back(self) -> int:
        """Rewind to the newest checkpoint, or to the start, after a death; return the last valid step."""
        if self._trace is not None:
            self._trace.forget()
        if not self.keeps_steps:
            self._begin_after(self.folder.checkpoints.latest_sound() or self.source)
        return self.step

    def started(self, last_step: int | None, components: Mapping[str, int]) -> None:
        """Emit once that the workers have started, and drop data after the checkpoint of a resumed run."""
        self._last_step, self._first_ended = last_step, None
        # Replace the progress of the previous attempt.
        driver_job.describe_claims(step=self.step or None, total=last_step, left=None)
        if self._began is None:
            self._began = time.monotonic()
            self.folder.started()
            self.folder.checkpoints.recover()
            self._metrics.rewind(self.step)
            resumed = self.source.path if self.source else None
            self.emit(events.RunStarted(self.folder.path, self.step + 1, last_step, components, resumed))

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a finished training step."""
        self._metrics.log(step, metrics)
        self.newest.update(metrics)
        self.step = step
        self._worked()
        self._tell_others()
        self.emit(events.StepFinished(step, metrics))

    def _tell_others(self) -> None:
        """Update the progress that jobs waiting for this one's devices see."""
        done, left, now = self.step - self.first_step, None, time.monotonic()
        if self._first_ended is None:
            self._first_ended = now
        elif self._last_step is not None and done > 0:
            left = (now - self._first_ended) / done * max(0, self._last_step - self.step)
        driver_job.describe_claims(often=True, step=self.step, total=self._last_step, left=left)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of the evaluation after `step`."""
        self._metrics.log(step, metrics)
        self.newest.update(metrics)
        self._worked()
        self.emit(events.Evaluated(step, metrics))

    def save(
        self,
        step: int,
        write: Callable[[Path], Any],
        *,
        weight_version: int,
        world_sizes: Mapping[str, int],
        snapshot: bool = False,
        in_flight: Callable[[], ItemFates] = dict[str, Sequence[str]],
    ) -> None:
        """Make a checkpoint from the files that `write` writes into the folder that it gets.

        Args:
            step: the last finished step.
            write: writes the files.
            weight_version: see `Manifest`.
            world_sizes: see `Manifest`.
            snapshot: whether it lasts only until the next checkpoint.
            in_flight: returns the items that were in flight when `write` was called; called after `write`.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        self.emit(events.PhaseStarted(step, events.SAVE_CHECKPOINT))
        store = self.folder.checkpoints
        # Without validation, which would turn whole numbers into floats.
        manifest = Manifest.model_construct(
            step=step,
            config_hash=self._config_hash,
            facts=self._facts,
            metrics=self.newest,
            weight_version=weight_version,
            world_sizes=world_sizes,
            snapshot=snapshot,
        )
        work = store.begin(step)
        try:
            write(work)
            path = store.commit(step, manifest.model_copy(update={"in_flight": in_flight()}))
        except Exception as error:
            singles: Sequence[BaseException] = getattr(error, "exceptions", (error,))
            worded = any(isinstance(single, CheckpointError) for single in singles)
            unwritten = not worded and (isinstance(error, OSError) or lacks_room(error))
            # Determine the cause before `abandon`: the written files fill the disk until they are removed.
            why = write_fault(work, error) if unwritten else None
            store.abandon(step)
            if not unwritten:
                raise
            raise CheckpointError("the checkpoint cannot be written", where=str(work.parent), why=why) from error
        self._saved = step
        self._worked()
        self.emit(events.CheckpointSaved(step, path, snapshot))

    def has_unsaved(self, step: int) -> bool:
        """Return whether `step` is the last finished step and has no checkpoint."""
        return self.step == step != self._saved

    def finished(self) -> None:
        """Emit that the run has finished."""
        self.emit(events.RunFinished(self.step, self.newest, self._seconds))

    def _worked(self) -> None:
        if self._began is not None:
            self._seconds = time.monotonic() - self._began


def facts_of(recipe: Recipe | None, config: object) -> Mapping[str, Fact]:
    """Return the values that a run must share to resume from a checkpoint; empty if the recipe defines none."""
    facts = recipe.load(recipe.facts) if recipe is not None else None
    return facts(config) if facts is not None else {}


def _answers(asked: Mapping[str, WorkerGroupHandle[T]]) -> dict[str, list[T]]:
    """Return the answers of all processes, by component, without components with busy or dead processes."""
    answers: dict[str, list[T]] = {}
    deadline = Deadline.after(_BUSY_SECONDS)
    for component, handle in asked.items():
        with suppress(CommunicationTimeoutError, WorkerGroupError):
            answers[component] = handle.wait(timeout=deadline.remaining())
    return answers

"""The base of training loops: steps and phases, evaluations, checkpoints, and the record of the run.

A custom loop is a subclass with a `train_step`: docs/extend.md builds one.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

from rlinf_core.config.sections.runner import ProfilerConfig
from rlinf_core.errors import CheckpointError, ConfigError, RuntimeFailure
from rlinf_core.runners import events
from rlinf_core.runners.events import ItemFates
from rlinf_core.runners.metrics import EVALUATION_TIME, numbers_of
from rlinf_core.runners.record import RunConfig, RunRecord
from rlinf_core.runners.recovery import NodesReturned, SnapshotSchedule
from rlinf_core.runners.standalone import StandaloneRecord
from rlinf_core.runners.step_clock import HangWatch, StepClock
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.worker.handle import WorkerGroupHandle, wait_together
from rlinf_core.worker.worker_group import WorkerGroup

LOGGER = logging.getLogger("rlinf")
NEVER: Final = -1


class Runner(ABC):
    """The base of loops that run the worker groups of a job, step by step, to the end.

    A subclass implements `train_step`, `write_checkpoint` and `read_checkpoint`, and overrides `start_workers` and
    `evaluate_policy` if needed.

    Args:
        cfg: the configuration of the job.
        groups: the worker groups, by component.
        record: the run's record; training begins after its step. Without it the runner makes a run folder with its own
            record, and closes it when the run has finished or failed.

    Attributes:
        cfg: the configuration of the job.
        config: the section `runner` of the configuration.
        weight_version: the number of weight updates, one in each training step.
    """

    def __init__(self, cfg: RunConfig, groups: Mapping[str, WorkerGroup[Any]], record: RunRecord | None = None) -> None:
        self._own_record = StandaloneRecord.create(cfg) if record is None else None
        self.cfg: Any = cfg
        self.config = cfg.runner
        self.groups = dict(groups)
        self.record: RunRecord = record or cast("RunRecord", self._own_record)
        self.weight_version = 0
        self._initialized = False
        self._times: defaultdict[str, float] = defaultdict(float)
        self._snapshots = SnapshotSchedule(None)
        self._steps = StepClock()

    # To be implemented by loops

    @abstractmethod
    def train_step(self, step: int) -> dict[str, float]:
        """Run one training step, and return its metrics by full name; the caller adds the times of phases."""

    def start_workers(self) -> None:  # noqa: B027 - workers may be ready after launch
        """Prepare the workers: create environments and models."""

    def evaluate_policy(self, step: int) -> dict[str, float] | None:
        """Evaluate the policy after a step, and return metrics under `eval/`; None if the loop does not evaluate."""
        return None

    @abstractmethod
    def write_checkpoint(self, folder: Path) -> None:
        """Write everything needed to resume training into a folder that all workers see."""

    @abstractmethod
    def read_checkpoint(self, folder: Path) -> None:
        """Restore the state from `write_checkpoint`."""

    def items_in_flight(self) -> ItemFates:
        """Return the items that were buffered or in flight at the last `write_checkpoint`, by their fates."""
        return {}

    def items_resumed(self, in_flight: ItemFates) -> ItemFates:
        """Return the actual fates of the items in flight at the checkpoint that `read_checkpoint` has read, given the
        fates in its manifest."""
        return in_flight

    @property
    def keeps_state(self) -> bool:
        """Whether training can be resumed from the files of `write_checkpoint`."""
        return True

    def finish(self) -> None:  # noqa: B027 - the last checkpoint may suffice
        """Save further results besides the checkpoints, after the last step."""

    # Common to all loops

    @property
    def world_sizes(self) -> dict[str, int]:
        """The number of processes of each component."""
        return {name: group.world_size for name, group in self.groups.items()}

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends; None for no end."""
        return self.config.last_step

    @property
    def next_step(self) -> int:
        """The step after the last finished one."""
        return self.record.step + 1

    def init_workers(self) -> None:
        """Prepare the workers, and load the checkpoint to resume from."""
        with self._closing_after_failure():
            self.start_workers()
            source = self.record.source
            if source is not None:
                self.weight_version = source.manifest.weight_version
                self.read_checkpoint(source.path)
                fates = self.items_resumed(source.manifest.in_flight)
                if fates:
                    self.record.emit(events.ItemsResumed(source.step, fates))
        self._initialized = True

    def run(self) -> None:
        """Train to the end, or evaluate once with `only_eval`.

        Raises:
            RuntimeFailure: `init_workers` was not called, and has workers to prepare or a checkpoint to load.
        """
        with self._closing_after_failure(), HangWatch(self.config.on_hang, self.groups, self.record, self._steps):
            prepares = type(self).start_workers is not Runner.start_workers or self.record.source is not None
            if prepares and not self._initialized:
                raise RuntimeFailure("the workers are not prepared", help="call `init_workers()` before `run()`")
            self._run()
        self._close_record()

    def _run(self) -> None:
        record, last = self.record, self.last_step
        if self.config.save_interval != NEVER and self.keeps_state:
            self._snapshots = SnapshotSchedule(self.config.snapshot_seconds)
        record.started(record.step if self.config.only_eval else last, self.world_sizes)
        if self.config.only_eval:
            self.evaluate(record.step)
            return
        if self.config.val_before_train and self.config.val_check_interval != NEVER and record.step == 0:
            self.evaluate(0)
        profiles = ProfiledSteps(self.config.profiler, record.folder.path / "profiles", self.groups)
        for step in itertools.count(record.step + 1):
            if last is not None and step > last:
                break
            profiles.begin(step)
            try:
                self.train(step)
                if self._is_due(self.config.val_check_interval, step):
                    self.evaluate(step)
                if self._is_due(self.config.save_interval, step):
                    self.save_checkpoint(step)
                elif self._snapshots.due:
                    self._save_snapshot(step)
            except (KeyboardInterrupt, SystemExit):
                # Until the training of the next step, the actor has the state after this step.
                if self.config.save_on_interrupt and record.has_unsaved(step):
                    self.save_checkpoint(step)
                raise
            self._steps.finished()
            if step != last and record.nodes_returned:
                self._take_nodes_back(step)
            if step == record.first_step:
                record.keep_memory(self.groups)
            record.collect_trace(*self.groups.values(), last=step == last)
            profiles.end(step, last=step == last)
        self.finish()
        record.keep_memory(self.groups)

    def train(self, step: int | None = None) -> None:
        """Train one step, by default the next one, and record its metrics and times."""
        step = self.next_step if step is None else step
        began = time.perf_counter()
        metrics = self.train_step(step)
        metrics = numbers_of(metrics, f"{type(self).__name__}.train_step", {*self._times, "time/step"})
        self.weight_version += 1
        self._times["time/step"] = time.perf_counter() - began
        # The times include those of weights sent for an evaluation since the last step.
        times, self._times = self._times, defaultdict(float)
        self.record.step_finished(step, {**metrics, **times})

    def evaluate(self, step: int | None = None) -> None:
        """Evaluate the policy, by default after the last step, and record the metrics."""
        step = self.record.step if step is None else step
        began = time.perf_counter()
        with self._steps.evaluation():
            metrics = self.evaluate_policy(step)
        if metrics is not None:
            numbers = numbers_of(metrics, f"{type(self).__name__}.evaluate_policy")
            self.record.evaluated(step, {**numbers, EVALUATION_TIME: time.perf_counter() - began})

    def save_checkpoint(self, step: int | None = None, *, snapshot: bool = False) -> None:
        """Save the state after `step`, by default the last step; a `snapshot` lasts only until the next checkpoint."""
        step = self.record.step if step is None else step
        with self._snapshots.saving():
            self.record.save(
                step,
                self.write_checkpoint,
                weight_version=self.weight_version,
                world_sizes=self.world_sizes,
                snapshot=snapshot,
                in_flight=self.items_in_flight,
            )

    def _save_snapshot(self, step: int) -> None:
        try:
            self.save_checkpoint(step, snapshot=True)
        except CheckpointError as error:
            self._snapshots.stop()
            LOGGER.warning("no snapshots are saved from now on: %s", str(error).replace("\n", " "))

    def _take_nodes_back(self, step: int) -> None:
        """Save the state after this step if needed, and leave the attempt, so that the next one uses returned nodes.

        Raises:
            NodesReturned: the state is saved.
        """
        if self.config.save_interval == NEVER or not self.keeps_state:
            return
        if self.record.has_unsaved(step):
            self._save_snapshot(step)
        if not self.record.has_unsaved(step):
            raise NodesReturned

    @contextmanager
    def phase(self, step: int, name: str) -> Generator[None, None, None]:
        """Emit the start of a phase, and record its duration as `time/NAME`, the sum of those of a step."""
        self.record.emit(events.PhaseStarted(step, name))
        began = time.perf_counter()
        yield
        self._times[f"time/{name}"] += time.perf_counter() - began

    def add_durations(self, *handles: WorkerGroupHandle[Any]) -> None:
        """Record the workers' timers in these calls, maximum over ranks, as `time/TAG`; calls of a step add up."""
        for handle in handles:
            for tag, seconds in handle.consume_durations().items():
                self._times[f"time/{tag}"] += seconds

    def shutdown(self) -> None:
        """End the workers, as leaving the cluster does; while an exception is handled, it is recorded as the run's end.

        Raises:
            WorkerGroupError: a call whose result was never read had failed; all groups are ended nevertheless.
        """
        self._close_record(sys.exception())
        with ExitStack() as ends:
            for group in self.groups.values():
                ends.callback(group.shutdown)

    def _is_due(self, interval: int, step: int) -> bool:
        return interval != NEVER and (step % interval == 0 or step == self.last_step)

    @contextmanager
    def _closing_after_failure(self) -> Generator[None, None, None]:
        """Close the runner's own record if the block raises."""
        try:
            yield
        except BaseException as error:
            self._close_record(error)
            raise

    def _close_record(self, error: BaseException | None = None) -> None:
        if self._own_record is not None:
            self._own_record.close(error)


def mean_over_ranks(by_rank: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the ranks that have it, with equal sample counts."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for metrics in by_rank:
        for name, value in metrics.items():
            values[name].append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}


class RolloutRunner(Runner):
    """A loop that syncs the actor's weights to rollout workers; their rollouts may run ahead of the training steps."""

    def __init__(self, cfg: RunConfig, groups: Mapping[str, WorkerGroup[Any]], record: RunRecord | None = None) -> None:
        super().__init__(cfg, groups, record)
        # The weight version of the rollout workers after all syncs issued so far.
        self._synced: int | None = None
        self._syncing: tuple[WorkerGroupHandle[Any], ...] = ()

    @abstractmethod
    def send_weights(self) -> tuple[WorkerGroupHandle[Any], ...]:
        """Start sending the actor's weights to the rollout workers."""

    @property
    @abstractmethod
    def runs_ahead(self) -> bool:
        """Whether rollouts of later steps are running, so that weight syncs are not awaited."""

    def update_rollout_weights(self, step: int | None = None) -> None:
        """Sync the actor's weights to the rollout workers, if outdated. Does not wait if rollouts run ahead."""
        if self._synced == self.weight_version:
            return
        step = self.next_step if step is None else step
        with self.phase(step, events.SYNC_WEIGHTS):
            self._finish_sync()
            self._syncing = self.send_weights()
            if not self.runs_ahead:
                self._finish_sync()
        self._synced = self.weight_version

    def _finish_sync(self) -> None:
        wait_together(*self._syncing)
        self._syncing = ()

    def steps_ahead(self, step: int) -> range:
        """Return the steps whose rollouts may run before `step` is trained: `step`, and `max_staleness` more."""
        newest = step + self.config.staleness
        return range(step, 1 + (newest if self.last_step is None else min(newest, self.last_step)))


class ProfiledSteps:
    """The profiled steps of a run.

    Args:
        config: `runner.profiler`, or None.
        folder: the folder of the profiles, on the node of each worker.
        groups: the worker groups by component.

    Raises:
        ConfigError: a component to be profiled has no group.
    """

    def __init__(self, config: ProfilerConfig | None, folder: Path, groups: Mapping[str, WorkerGroup[Any]]) -> None:
        self._config, self._folder = config, folder
        chosen = config.components if config is not None else ()
        self._groups = {name: group for name, group in groups.items() if not chosen or name in chosen}
        self._running = False
        for name in chosen:
            if name not in groups:
                raise ConfigError(
                    f"`runner.profiler.components` names `{name}`, which this run does not have",
                    help=did_you_mean(name, groups) or f"its components are {quoted(list(groups))}",
                )

    def begin(self, step: int) -> None:
        """Start the profilers before the first of the profiled steps, or after a restart before the next of them."""
        config = self._config
        if config is not None and not self._running and config.first_step <= step <= config.last_step:
            self._running = True
            kind, folder = config.kind, str(self._folder)
            wait_together(*(group.start_profile(kind, folder, name) for name, group in self._groups.items()))

    def end(self, step: int, *, last: bool) -> None:
        """Write the profiles after the last of the profiled steps, or the last step of the run."""
        if self._config is not None and self._running and (last or step >= self._config.last_step):
            self._running = False
            wait_together(*(group.stop_profile() for group in self._groups.values()))
            LOGGER.info("profiles of workers are in %s, on the node of each", self._folder)

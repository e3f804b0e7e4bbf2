"""The base of training loops: steps and their phases, evaluations, checkpoints, and the record of the run.

A loop of your own is a subclass with a `train_step`: docs/write-a-recipe.md builds one.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

from rlinf_core.runners import events
from rlinf_core.runners.record import RunConfig, RunRecord
from rlinf_core.runners.standalone import StandaloneRecord
from rlinf_core.worker.handle import WorkerGroupHandle, wait_together
from rlinf_core.worker.worker_group import WorkerGroup

NEVER: Final = -1


class Runner(ABC):
    """Runs the worker groups of a job, step by step, until the run is over.

    A subclass implements `train_step`, `write_checkpoint` and `read_checkpoint`, and overrides `start_workers` and
    `evaluate_policy` where its loop has something to do there.

    Args:
        cfg: the configuration of the job.
        groups: the worker groups, by component.
        record: keeps what happens; training begins after its step. Without one the runner makes a run folder with a
            record of its own, and closes it when the run is over or has failed.

    Attributes:
        config: the section `runner`.
        weight_version: how often the weights have changed; a subclass counts.
    """

    def __init__(self, cfg: RunConfig, groups: Mapping[str, WorkerGroup[Any]], record: RunRecord | None = None) -> None:
        self.config = cfg.runner
        self.groups = dict(groups)
        self._own_record = StandaloneRecord.create(cfg) if record is None else None
        self.record: RunRecord = record or cast("RunRecord", self._own_record)
        self.weight_version = 0
        self._times: dict[str, float] = {}

    # What a loop implements

    @abstractmethod
    def train_step(self, step: int) -> dict[str, float]:
        """Carry out one training step, and return its metrics by their full names. Times of phases are added."""

    def start_workers(self) -> None:  # noqa: B027 - workers may be ready when they are launched
        """Prepare the workers: create environments and models."""

    def evaluate_policy(self, step: int) -> dict[str, float] | None:
        """Evaluate the policy after a step, and return metrics under `eval/`; None: this loop has no evaluations."""
        return None

    @abstractmethod
    def write_checkpoint(self, folder: Path) -> None:
        """Write everything that training goes on from into a folder that all workers see."""

    @abstractmethod
    def read_checkpoint(self, folder: Path) -> None:
        """Read what `write_checkpoint` wrote."""

    def finish(self) -> None:  # noqa: B027 - the last checkpoint may be all there is to keep
        """Keep what the run leaves behind besides its checkpoints, after the last step."""

    # What every loop has

    @property
    def world_sizes(self) -> dict[str, int]:
        """Number of processes of each component."""
        return {name: group.world_size for name, group in self.groups.items()}

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends; None: it has no end."""
        return self.config.last_step

    @property
    def next_step(self) -> int:
        """The step after the last one that is done."""
        return self.record.step + 1

    def init_workers(self) -> None:
        """Prepare the workers, and load the checkpoint that the run continues from."""
        with self._closing_after_failure():
            self.start_workers()
            source = self.record.source
            if source is not None:
                self.weight_version = source.manifest.weight_version
                self.read_checkpoint(source.path)

    def run(self) -> None:
        """Train to the end, or evaluate once with `only_eval`."""
        with self._closing_after_failure():
            self._run()
        self._close_record()

    def _run(self) -> None:
        record, last = self.record, self.last_step
        record.started(record.step if self.config.only_eval else last, self.world_sizes)
        if self.config.only_eval:
            self.evaluate(record.step)
            return
        if self.config.val_before_train and self.config.val_check_interval != NEVER and record.step == 0:
            self.evaluate(0)
        for step in itertools.count(record.step + 1):
            if last is not None and step > last:
                break
            try:
                self.train(step)
                if self._is_due(self.config.val_check_interval, step):
                    self.evaluate(step)
                if self._is_due(self.config.save_interval, step):
                    self.save_checkpoint(step)
            except (KeyboardInterrupt, SystemExit):
                # Between its training and the next step's the actor is as the step has left it.
                if self.config.save_on_interrupt and record.has_unsaved(step):
                    self.save_checkpoint(step)
                raise
            if step == record.first_step:
                record.keep_memory(self.groups)
            record.collect_trace(*self.groups.values(), last=step == last)
        self.finish()
        record.keep_memory(self.groups)

    def train(self, step: int | None = None) -> None:
        """Train for one step, by default the next one, and record its metrics and times."""
        step = self.next_step if step is None else step
        began = time.perf_counter()
        metrics = self.train_step(step)
        self._times["time/step"] = time.perf_counter() - began
        # With the weights that an evaluation since the last step has sent.
        times, self._times = self._times, {}
        self.record.step_finished(step, {**metrics, **times})

    def evaluate(self, step: int | None = None) -> None:
        """Evaluate the policy, by default after the last step, and record the metrics."""
        step = self.record.step if step is None else step
        began = time.perf_counter()
        metrics = self.evaluate_policy(step)
        if metrics is not None:
            self.record.evaluated(step, {**metrics, "time/evaluate": time.perf_counter() - began})

    def save_checkpoint(self, step: int | None = None) -> None:
        """Keep everything that training after `step`, by default the last one, depends on."""
        step = self.record.step if step is None else step
        self.record.save(step, self.write_checkpoint, weight_version=self.weight_version, world_sizes=self.world_sizes)

    @contextmanager
    def phase(self, step: int, name: str) -> Generator[None, None, None]:
        """Tell that a phase begins, and record its time as `time/NAME`."""
        self.record.tell(events.PhaseStarted(step, name))
        began = time.perf_counter()
        yield
        self._times[f"time/{name}"] = time.perf_counter() - began

    def add_durations(self, *handles: WorkerGroupHandle[Any]) -> None:
        """Record the timers of workers in these calls, the longest of the ranks, as `time/TAG`."""
        for handle in handles:
            for tag, seconds in handle.consume_durations().items():
                self._times[f"time/{tag}"] = seconds

    def shutdown(self) -> None:
        """End the workers. Leaving the cluster does the same.

        Raises:
            WorkerGroupError: a call that nobody waited for had failed; all groups have ended then, too.
        """
        self._close_record()
        with ExitStack() as ends:
            for group in self.groups.values():
                ends.callback(group.shutdown)

    def _is_due(self, interval: int, step: int) -> bool:
        return interval != NEVER and (step % interval == 0 or step == self.last_step)

    @contextmanager
    def _closing_after_failure(self) -> Generator[None, None, None]:
        """Close a record of the runner's own when the block raises."""
        try:
            yield
        except BaseException as error:
            self._close_record(error)
            raise

    def _close_record(self, error: BaseException | None = None) -> None:
        if self._own_record is not None:
            self._own_record.close(error)


def rank_means(by_rank: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over ranks of metrics of equally many samples each."""
    metrics = list(by_rank)
    return {name: sum(rank_metrics[name] for rank_metrics in metrics) / len(metrics) for name in metrics[0]}


class RolloutRunner(Runner):
    """A loop that gives the actor's weights to rollout workers, which may run ahead of the training steps."""

    def __init__(self, cfg: RunConfig, groups: Mapping[str, WorkerGroup[Any]], record: RunRecord | None = None) -> None:
        super().__init__(cfg, groups, record)
        # The version of the weights that the rollout has, or will have before anything that is asked of it from now on.
        self._synced: int | None = None
        self._syncing: tuple[WorkerGroupHandle[Any], ...] = ()

    @abstractmethod
    def send_weights(self) -> tuple[WorkerGroupHandle[Any], ...]:
        """Begin to send the weights of the actor to the rollout workers."""

    @property
    @abstractmethod
    def runs_ahead(self) -> bool:
        """Whether rollouts of later steps are under way, so that nobody waits for weights."""

    def update_rollout_weights(self, step: int | None = None) -> None:
        """Give the rollout workers the weights of the actor, unless they have them. Nobody waits where rollouts run
        ahead.
        """
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
        """Return the steps whose rollouts may be under way before `step` is trained: it, and `max_staleness` more."""
        newest = step + self.config.max_staleness
        return range(step, 1 + (newest if self.last_step is None else min(newest, self.last_step)))

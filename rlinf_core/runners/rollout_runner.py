"""The base of training loops whose rollout workers have weights of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rlinf_core.runners import events
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.runner import Runner
from rlinf_core.runners.standalone import RunConfig
from rlinf_core.worker.handle import WorkerGroupHandle, wait_together
from rlinf_core.worker.worker_group import WorkerGroup


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
        """Give the rollout workers the weights of the actor, unless they have them.

        Where rollouts go on while the actor trains nobody waits for that.
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

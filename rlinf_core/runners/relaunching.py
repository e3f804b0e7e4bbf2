"""Recovery by rank: dead workers are started again alone, and what they were doing is done again."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from rlinf_core.errors import RLinfError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners import events
from rlinf_core.runners.evidence.keeping import evidence_line
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery.restarts import all_deaths, death
from rlinf_core.worker.death import took_its_node
from rlinf_core.worker.group.watchers import fallen_watcher
from rlinf_core.worker.group.worker_group import WorkerGroup

T = TypeVar("T")
LOGGER = logging.getLogger("rlinf")

Dead: TypeAlias = Mapping[str, tuple[int, ...]]
"""The ranks that died, by component."""


class Relaunching(ABC):
    """The relaunch of dead workers of a running loop, whose attempts it repeats.

    Args:
        groups: the worker groups whose dead may be started again alone, by component.
        record: the record of the run; its limit of restarts counts relaunches too.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup[Any]], record: RunRecord) -> None:
        self._groups = groups
        self._record = record

    @abstractmethod
    def may_relaunch(self, dead: Dead) -> bool:
        """Return whether these may be started again alone; else the failure is raised, and the run restarts."""

    @abstractmethod
    def prepare(self, dead: Dead) -> str:
        """Undo the attempt that failed, and prepare workers that were started again; return what is done again, in
        words."""

    def repeat(self, attempt: Callable[[], T]) -> T:
        """Call `attempt`, and call it again after each death of workers; return its result.

        Args:
            attempt: what it has changed when it raises is undone by `prepare`.

        Raises:
            Exception: as `attempt`, once more deaths have happened than `runner.max_restarts` allows, or a worker
                cannot be started again alone.
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
        # What all depend on may have ended them.
        if not dead or not self.may_relaunch(dead) or fallen_watcher() is not None:
            return False
        cause, record, began = death(error), self._record, time.monotonic()
        restart = None if cause is None else record.restarts.allow(record.component_of(cause.address))
        if cause is None or restart is None:
            return False
        with ThreadPoolExecutor(1, "rlinf-evidence") as background:
            # While the new processes import their packages.
            evidence = background.submit(record.keep_evidence, error)
            try:
                for component, ranks in dead.items():
                    self._groups[component].relaunch(*ranks)
                repeated = self.prepare(dead)
            except RLinfError as failure:
                LOGGER.warning("%s could not be started again alone: %s", _spell(dead), failure)
                return False
        reason, *details = str(cause).splitlines()
        if cause.end is not None and cause.end.signal is not None:
            reason = f"{reason} ({cause.end.signal})"
        lines = (*details, *evidence_line(evidence.result()))
        seconds = time.monotonic() - began
        record.emit(events.WorkersRelaunched(record.step, *restart, reason, seconds, repeated, lines))
        return True

    def _dead(self, error: BaseException) -> Dead | None:
        """Return who died, by component; None if somebody did who is no worker of these groups, or has no place now."""
        names = {group.worker_group_name: component for component, group in self._groups.items()}
        dead: dict[str, list[int]] = {}
        for address, cause in all_deaths(error).items():
            group, _, rank = address.rpartition(":")
            if group not in names or not rank.isdigit() or took_its_node(cause):
                return None
            dead.setdefault(names[group], []).append(int(rank))
        return {component: tuple(sorted(ranks)) for component, ranks in dead.items()}


def _spell(dead: Dead) -> str:
    return ", ".join(f"`{component}:{rank}`" for component, ranks in dead.items() for rank in ranks)

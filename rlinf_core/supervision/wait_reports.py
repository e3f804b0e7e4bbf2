"""Long waits of a process: their reports to the manager and the log, and their descriptions by the manager."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.work import Work
from rlinf_core.errors import RuntimeFailure
from rlinf_core.process.inflight_ops import InflightOps
from rlinf_core.supervision.lives import MANAGER
from rlinf_core.supervision.waits import LongWaits, is_long_wait
from rlinf_core.waiting import Operation, Publication

_log = logging.getLogger("rlinf.job")
_REPORT_EVERY: Final = 1.0
_PICTURE_SECONDS: Final = 1.5
_SHORTEST_EXTENDED: Final = 1.0
# The serial that stands for an expired operation; no operation has it.
_EXPIRED: Final = -2


class WaitReports:
    """The reports of one process about its waits.

    Args:
        me: the address of this process.
        operations: the pending operations of this process.
        call: calls a method of the manager by name, with its arguments and the time limit `seconds`.
        notify: calls a method of the manager by name, without waiting for a result.

    Attributes:
        long_waits: decides which waits are logged.
    """

    def __init__(
        self, me: WorkerAddress, operations: InflightOps, call: Callable[..., Any], notify: Callable[[str], object]
    ) -> None:
        self._name, self._is_worker = me.get_name(), bool(me.ranks)
        self._operations, self._call, self._notify = operations, call, notify
        self.long_waits = LongWaits()
        self._next = 0.0
        self._closed = False

    @property
    def due_in(self) -> float:
        """Seconds until the next report."""
        return max(0.0, self._next - time.monotonic())

    def report(self) -> None:
        """Report long waits to the manager and to the log."""
        self._next = time.monotonic() + _REPORT_EVERY
        publication = self._operations.publication()
        if any(is_long_wait(operation, is_worker=self._is_worker) for operation in publication.operations):
            self._notify("waits_long")
        for operation in self.long_waits.due(publication):
            # In a separate thread: the description of a wait needs answers of other processes, and of this one.
            threading.Thread(
                target=self._log, args=(operation, publication), name="rlinf-first-word", daemon=True
            ).start()

    def paused(self, target: str, seconds: float) -> float:
        """Return the number of the last `seconds` in which a process of the job waited at a breakpoint.

        Time limits below a second are not extended: their callers are meant to continue after them.
        """
        if target == MANAGER or seconds < _SHORTEST_EXTENDED or self._closed:
            return 0.0
        try:
            return self._call("paused", seconds, seconds=_PICTURE_SECONDS)
        except RuntimeFailure:
            return 0.0

    def picture_of(self, serial: int) -> str | None:
        """Return a description of the peers that an operation of this process waits for; None if it takes too long."""
        return self._explained(serial, self._operations.publication())

    def picture_of_expired(self, work: Work[Any]) -> str | None:
        """Return a description of the peers that an expired operation waits for; blocks briefly."""
        if work.target == MANAGER:
            return None
        # The operation may have ended already, so an entry for it is added.
        shown = Operation(work.kind, work.target, work.key, time.monotonic() - work.since, _EXPIRED)
        now = self._operations.publication()
        return self._explained(_EXPIRED, replace(now, operations=(*now.operations, shown), running=False))

    def close(self) -> None:
        """Stop reporting."""
        self._closed = True

    def _log(self, operation: Operation, publication: Publication) -> None:
        picture = self._explained(operation.serial, publication)
        if picture is None:
            picture = f"{self._name} {operation.waits()}"
        if not self._closed:
            _log.warning("%s", picture)

    def _explained(self, serial: int, publication: Publication) -> str | None:
        if self._closed:
            return None
        try:
            return self._call("explain", serial, publication, seconds=_PICTURE_SECONDS) or None
        except RuntimeFailure:
            return None

"""The processes that all workers of a job depend on: gcs_server, raylet, and the manager.

No other process would report their death to the driver soon.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from rlinf_core.cluster import engine
from rlinf_core.errors import WorkerDiedError
from rlinf_core.manager.manager_client import current_client
from rlinf_core.worker.group.stopped import StoppedWatch

LOGGER = logging.getLogger("rlinf")
# Seconds that an ending raylet lives on after the processes below it, and between two looks.
_ENGINE_SECONDS: Final = 0.5
_ENGINE_PAUSE: Final = 0.01
# Seconds between two looks of a loop that polls.
_LOOK_SECONDS: Final = 0.25


def fallen_watcher() -> WorkerDiedError | None:
    """Return the death of `gcs_server`, `raylet` or `manager`; None while all of them live.

    A raylet that ends, as it does without one of its agents, ends the manager and the workers first: where the manager
    is gone, it is given half a second.
    """
    client = current_client()
    lost = client.lost_manager() if client is not None else None
    died, deadline = engine.fallen(), time.monotonic() + _ENGINE_SECONDS
    while lost is not None and died is None and time.monotonic() < deadline:
        time.sleep(_ENGINE_PAUSE)
        died = engine.fallen()
    return died or lost


def check_watchers() -> None:
    """Raise if one of them has died.

    Raises:
        WorkerDiedError: one has died; the error names it.
    """
    died = fallen_watcher()
    if died is not None:
        # At once: the run hears of it only when all its processes have ended.
        LOGGER.warning("%s: %s", died.message, died.cause)
        raise died


class WaitWatch:
    """The looks of a loop that polls calls, as those of a handle that is waited for."""

    def __init__(self) -> None:
        self._stopped = StoppedWatch()
        self._next = 0.0

    def look(self) -> None:
        """Warn of processes that are stopped, where a look is due.

        Raises:
            WorkerDiedError: a process that all workers depend on has died.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_SECONDS
        check_watchers()
        self._stopped.look(current_client())

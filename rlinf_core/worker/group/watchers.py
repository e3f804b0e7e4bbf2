"""The checks by a process that waits for workers: for the death of processes they depend on, and for stopped ones.

No other process would soon report the death of gcs_server, raylet or the manager to the driver.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from rlinf_core.cluster import engine
from rlinf_core.collective.endpoint_info import own_place
from rlinf_core.errors import RLinfError, WorkerDiedError
from rlinf_core.process.proc import MARK, processes_of, stat
from rlinf_core.supervision.client import ManagerClient, current_client
from rlinf_core.supervision.verdicts import spell_stopped

LOGGER = logging.getLogger("rlinf")
_JOB_LOGGER = logging.getLogger("rlinf.job")
# Seconds for which an ending raylet outlives the processes below it, and between two checks of that.
_ENGINE_SECONDS: Final = 0.5
_ENGINE_PAUSE: Final = 0.01
# Seconds between two checks for deaths, and until the first check for stopped processes.
_LOOK_SECONDS: Final = 0.2
_FIRST_LOOK: Final = 2.0


def fallen_watcher() -> WorkerDiedError | None:
    """Return the death of `gcs_server`, `raylet` or `manager`; None while all of them live.

    A raylet that ends, for example because an agent of it died, first ends the manager and the workers. So if the
    manager is gone, wait half a second for the end of the raylet.
    """
    client = current_client()
    lost = client.lost_manager() if client is not None else None
    died, deadline = engine.fallen(), time.monotonic() + _ENGINE_SECONDS
    while lost is not None and died is None and time.monotonic() < deadline:
        time.sleep(_ENGINE_PAUSE)
        died = engine.fallen()
    return died or lost


class WaitWatch:
    """The checks during one wait for workers, by a handle or by a loop that polls calls."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = 0.0
        self._next_stopped = _FIRST_LOOK

    def look(self) -> None:
        """Check for deaths, and warn of stopped processes of the driver's own Ray: after 2 s, then ever more rarely.

        Raises:
            WorkerDiedError: a process that all workers depend on has died; the error names it.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_SECONDS
        died = fallen_watcher()
        if died is not None:
            # Log now: the run reports the error only when all its processes have ended.
            LOGGER.warning("%s: %s", died.message, died.cause)
            raise died
        client = current_client()
        if client is not None and now - self._began >= self._next_stopped:
            self._next_stopped *= 2
            _warn_of_stopped(client)


def _warn_of_stopped(client: ManagerClient) -> None:
    running = engine.current()
    if running is None or running.folder is None or MARK not in os.environ:
        return
    pids = [pid for pid in processes_of(os.environ[MARK], str(running.folder)) if stat(pid).is_stopped]
    if not pids:
        return
    workers = _workers(client)
    for pid in pids:
        _JOB_LOGGER.warning("%s", spell_stopped(_named(pid, workers), pid))


def _workers(client: ManagerClient) -> Mapping[int, str]:
    """Return the workers of this machine by their pids; empty if the manager does not answer."""
    with suppress(RLinfError):
        peers = client.snapshot().peers
        return {peer.info.pid: name for name, peer in peers.items() if peer.info.place == own_place()}
    return {}


def _named(pid: int, workers: Mapping[int, str]) -> str:
    """Return a text such as `` `EnvGroup:0` (pid 7) ``, or one that tells which worker started the process."""
    if pid in workers:
        return f"`{workers[pid]}` (pid {pid})"
    parent = stat(pid).parent
    while parent > 1:
        if parent in workers:
            return f"process {pid}, which `{workers[parent]}` has started,"
        parent = stat(parent).parent
    return f"process {pid}"

"""Processes of this machine that are stopped, as by SIGSTOP, while a driver waits for its workers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from rlinf_core.cluster import engine
from rlinf_core.collective.endpoint_info import own_place
from rlinf_core.errors import RLinfError
from rlinf_core.manager.manager_client import ManagerClient
from rlinf_core.process.proc import MARK, processes_of, stat

LOGGER = logging.getLogger("rlinf.job")
_FIRST_LOOK: Final = 2.0


class StoppedWatch:
    """A look for stopped processes during one wait, after 2 s and then at growing intervals."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = _FIRST_LOOK

    def look(self, client: ManagerClient | None) -> None:
        """Warn of each process of the driver's own Ray that is stopped, by name, where a look is due."""
        if client is None or time.monotonic() - self._began < self._next:
            return
        self._next *= 2
        running = engine.current()
        if running is None or running.folder is None or MARK not in os.environ:
            return
        pids = [pid for pid in processes_of(os.environ[MARK], str(running.folder)) if stat(pid).is_stopped]
        if not pids:
            return
        workers = _workers(client)
        for pid in pids:
            LOGGER.warning("%s is stopped, as by SIGSTOP; `kill -CONT %d` continues it", _named(pid, workers), pid)


def _workers(client: ManagerClient) -> Mapping[int, str]:
    """Return the workers of this machine by their pids; none where the manager does not answer."""
    with suppress(RLinfError):
        peers = client.snapshot().peers
        return {peer.info.pid: name for name, peer in peers.items() if peer.info.place == own_place()}
    return {}


def _named(pid: int, workers: Mapping[int, str]) -> str:
    """Return `` `EnvGroup:0` (pid 7) ``, or a process that a worker has started."""
    if pid in workers:
        return f"`{workers[pid]}` (pid {pid})"
    parent = stat(pid).parent
    while parent > 1:
        if parent in workers:
            return f"process {pid}, which `{workers[parent]}` has started,"
        parent = stat(parent).parent
    return f"process {pid}"

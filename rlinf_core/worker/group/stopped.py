"""Processes of this machine that are stopped, as by SIGSTOP, while a driver waits for its workers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, cast

from rlinf_core.cluster import engine
from rlinf_core.collective.endpoint_info import host_identity, network_identity
from rlinf_core.errors import RLinfError
from rlinf_core.manager.manager_client import ManagerClient
from rlinf_core.manager.manager_messages import Inspect, JobSnapshot
from rlinf_core.node.node_processes import MARK, processes_of

LOGGER = logging.getLogger("rlinf.job")
_FIRST_LOOK: Final = 2.0
_SNAPSHOT_SECONDS: Final = 2.0
# Of proc_pid_stat(5): stopped by a signal, stopped by a tracer.
_STOPPED: Final = frozenset("Tt")


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
        pids = [pid for pid in processes_of(os.environ[MARK], str(running.folder)) if _is_stopped(pid)]
        if not pids:
            return
        workers = _workers(client)
        for pid in pids:
            LOGGER.warning("%s is stopped, as by SIGSTOP; `kill -CONT %d` continues it", _named(pid, workers), pid)


def _workers(client: ManagerClient) -> Mapping[int, str]:
    """Return the workers of this machine by their pids; none where the manager does not answer."""
    with suppress(RLinfError):
        job = cast("JobSnapshot", client.request(Inspect(), _SNAPSHOT_SECONDS))
        place = host_identity(), network_identity()
        return {peer.info.pid: name for name, peer in job.peers.items() if (peer.info.host, peer.info.network) == place}
    return {}


def _named(pid: int, workers: Mapping[int, str]) -> str:
    """Return `` `EnvGroup:0` (pid 7) ``, or a process that a worker has started."""
    if pid in workers:
        return f"`{workers[pid]}` (pid {pid})"
    parent = _fields(pid)[1:2]
    while parent and parent[0].isdigit() and int(parent[0]) > 1:
        if int(parent[0]) in workers:
            return f"process {pid}, which `{workers[int(parent[0])]}` has started,"
        parent = _fields(int(parent[0]))[1:2]
    return f"process {pid}"


def _is_stopped(pid: int) -> bool:
    return _fields(pid)[:1] in [[state] for state in _STOPPED]


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command: state, parent, and others."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []

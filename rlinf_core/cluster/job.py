"""The job of this driver: the start of its manager, and this process's connection to the manager."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import engine
from rlinf_core.cluster.driver_folder import JobRecord
from rlinf_core.cluster.ray_api import pickle_by_value, ray_api
from rlinf_core.collective.endpoint_info import advertised_on
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError
from rlinf_core.supervision.client import ManagerClient, current_client, enter_job
from rlinf_core.supervision.lives import DRIVER, MANAGER
from rlinf_core.supervision.manager import ManagerProcess
from rlinf_core.waiting import contact_seconds

# The driver's handle of the manager: Ray ends an actor when its owner's last handle is gone.
_manager: Any = None
_connecting = threading.Lock()


def start_manager(session: Session, ip: str, scheduling: Any) -> None:
    """Start the job's manager, if not started yet, without waiting for it, as Ray's strategy `scheduling` places it.

    `ip` is the address at which other nodes reach its node.
    """
    global _manager
    if _manager is not None or current_client() is not None:
        return
    engine.on_disconnect(_leave)
    options = {"name": MANAGER, "namespace": session.job, "num_cpus": 0, "scheduling_strategy": scheduling}
    _manager = (
        ray_api()
        .remote(ManagerProcess)
        .options(**options)
        .remote(session.job, session.secret, advertised_on(ip), session.folder)
    )


def connect_driver(session: Session, ip: str, node: str, node_rank: int) -> ManagerClient:
    """Return this process's connection to its job's manager, made on first use; thread-safe.

    Raises:
        ClusterError: the manager does not start.
    """
    with _connecting:
        return current_client() or _connect(session, ip, node, node_rank)


def _connect(session: Session, ip: str, node: str, node_rank: int) -> ManagerClient:
    ray = ray_api()
    seconds = contact_seconds()
    try:
        info = ray.get(_manager.info.remote(), timeout=seconds)
    except (ray.exceptions.RayError, TimeoutError) as error:
        late = f" within {seconds:g} s" if isinstance(error, TimeoutError) else ""
        help = f"a very busy machine takes longer: allow more seconds with `{env_vars.CONNECT_TIMEOUT.name}`"
        raise ClusterError(
            f"the job's manager did not start{late}", where=node, why=cause_of(error), help=help if late else None
        ) from None
    client = ManagerClient(
        session, info, WorkerAddress(DRIVER), ip=advertised_on(ip), has_main=True, fallback=pickle_by_value
    )
    client.announce(0, node, node_rank)
    enter_job(client)
    running = engine.current()
    if running is not None and running.folder is not None:
        record = JobRecord(session.job, session.secret.hex(), info, running.address, os.getpid(), time.time())
        record.write(running.folder)
    return client


def cause_of(error: BaseException) -> str:
    """Return the cause in Ray's error about a failed actor: the last line that is not indented, which holds the
    constructor's exception."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
    return lines[-1] if lines else type(error).__name__


def _leave() -> tuple[()]:
    global _manager
    client = current_client()
    enter_job(None)
    _manager = None
    if client is not None:
        client.close(linger=0.0)
    return ()

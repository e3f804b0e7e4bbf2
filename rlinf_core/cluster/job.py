"""The job that this process belongs to: its manager, started or joined, and this process's line to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import engine
from rlinf_core.cluster.driver_folder import JobRecord
from rlinf_core.cluster.ray_api import pickle_by_value, ray_api
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.collective.handshake import ClusterSecret
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError
from rlinf_core.manager.client import ManagerClient, current_client, enter_job
from rlinf_core.manager.manager import Manager
from rlinf_core.manager.messages import DRIVER, MANAGER

# The driver's handle: Ray ends an actor when the last handle of its owner is gone.
_manager: Any = None


def start_manager(session: Session, ip: str, scheduling: Any) -> None:
    """Start the job's manager without waiting for it, once, at the place of Ray's strategy `scheduling`.

    Other nodes reach the one that it runs on at `ip`.
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
        .remote(session.job, session.secret, advertised(ip), session.folder)
    )


def connect_driver(session: Session, ip: str, node: str, node_rank: int) -> ManagerClient:
    """Return this process's line to its job's manager, made when it is first needed.

    Raises:
        ClusterError: the manager does not start.
    """
    client = current_client()
    if client is not None:
        return client
    ray = ray_api()
    seconds = env_vars.CONNECT_TIMEOUT.get()
    try:
        info = ray.get(_manager.info.remote(), timeout=seconds)
    except (ray.exceptions.RayError, TimeoutError) as error:
        late = f" within {seconds:g} s" if isinstance(error, TimeoutError) else ""
        raise ClusterError(f"the job's manager did not start{late}", where=node, why=cause_of(error)) from None
    client = ManagerClient(
        session, info, WorkerAddress(DRIVER), ip=advertised(ip), has_main=True, fallback=pickle_by_value
    )
    client.announce(0, node, node_rank)
    enter_job(client)
    running = engine.current()
    if running is not None and running.folder is not None:
        record = JobRecord(session.job, session.secret.hex(), info, running.address, os.getpid(), time.time())
        record.write(running.folder)
    return client


def cause_of(error: BaseException) -> str:
    """Return why Ray says that an actor has failed: what its constructor raised comes last, below a traceback; what
    belongs to that line is indented."""
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


def advertised(ip: str) -> str | None:
    """Return what an endpoint advertises on a node that Ray reaches at `ip`; None leaves it to `RLINF_NET_IF`."""
    return None if env_vars.NET_IF.get() else ip


class ManagerProcess:
    """The one Ray actor for each job. It is on the path of no message between workers.

    Args:
        ip: the address under which other nodes reach this one; None leaves it to `RLINF_NET_IF`.
        folder: the private folder of the driver that started this machine's Ray, for the sockets; None elsewhere.
    """

    def __init__(self, job: str, secret: bytes, ip: str | None, folder: str | None) -> None:
        self._job = job
        self._secret = secret
        self._started = time.time()
        self._endpoint = Endpoint(ClusterSecret(secret), ip=ip, directory=folder)
        self._manager = Manager(self._endpoint, job)

    def __repr__(self) -> str:
        """Return what Ray puts before each line that this process prints."""
        return "manager"

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what `function(*args)` returns. Actors that it creates live as long as the job, whoever asked."""
        return function(*args)

    def record(self) -> tuple[str, str, EndpointInfo, float]:
        """Return the job's name, its secret in hex, where this is reached, and since when: for a look from outside."""
        return self._job, self._secret.hex(), self._endpoint.info, self._started

    def info(self) -> EndpointInfo:
        return self._endpoint.info

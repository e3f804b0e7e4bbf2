"""The process of a job's manager, as an actor of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rlinf_core.collective.connections.handshake import ClusterSecret
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.supervision.manager import Manager


class ManagerProcess:
    """The manager's Ray actor, one per job. Messages between workers do not pass through it.

    Args:
        ip: the address at which other nodes reach this one; None for `RLINF_NET_IF`.
        folder: the private folder of the driver that started this machine's Ray, for sockets; None elsewhere.
    """

    def __init__(self, job: str, secret: bytes, ip: str | None, folder: str | None) -> None:
        self._job = job
        self._secret = secret
        self._started = time.time()
        self._endpoint = Endpoint(ClusterSecret(secret), ip=ip, directory=folder)
        self._manager = Manager(self._endpoint, job)

    def __repr__(self) -> str:
        """Return Ray's prefix for lines that this process prints."""
        return "manager"

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` and return its result. Actors that it creates live as long as the job, regardless of
        the caller."""
        return function(*args)

    def record(self) -> tuple[str, str, EndpointInfo, float]:
        """Return the job's name, its secret in hex, the manager's endpoint, and its start, for inspection from
        outside."""
        return self._job, self._secret.hex(), self._endpoint.info, self._started

    def info(self) -> EndpointInfo:
        return self._endpoint.info

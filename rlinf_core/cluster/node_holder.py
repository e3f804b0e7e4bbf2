"""The holder of claims on a node that the driver is not on: an actor, and one that outlasts an attempt of a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from rlinf_core import env_vars
from rlinf_core.cluster.claimed_devices import labels_of
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.errors import RLinfError
from rlinf_core.node.device_claims import ClaimResult, DeviceHolder, HolderInfo
from rlinf_core.topology import ClusterTopology

# For which claims outlast an attempt, besides the time to join; and in which they are left to their keepers.
_RETURN_SECONDS: Final = 120.0
_LEAVE_SECONDS: Final = 60.0


class NodesOf(Protocol):
    """The part of a cluster that holders on its nodes need."""

    @property
    def topology(self) -> ClusterTopology: ...
    def allocate(self, actor_class: type, *, node_rank: int, outlives: bool = False) -> Any: ...


class NodeHolder:
    """The holder of claims on a node that the driver is not on: an actor, which ends with the job."""

    def __init__(self) -> None:
        self._holder = DeviceHolder()

    def look(self, devices: Sequence[str], group: str) -> Sequence[HolderInfo]:
        """See `DeviceHolder`."""
        return self._holder.look(devices, group=group)

    def take(self, devices: Sequence[str], group: str, *, share: bool, labels: Mapping[str, str]) -> ClaimResult:
        """See `DeviceHolder`."""
        return self._holder.take(devices, share=share, group=group, labels=labels)

    def tell(self, about: Mapping[str, Any]) -> None:
        """See `DeviceHolder`."""
        self._holder.tell(about)

    def drop(self, devices: Sequence[str]) -> None:
        """See `DeviceHolder`."""
        self._holder.drop(devices)

    def pid(self) -> int:
        """Return the process."""
        return os.getpid()

    def adopt(self, names: Mapping[str, str], pid: int, labels: Mapping[str, str]) -> list[str]:
        """See `DeviceHolder`."""
        return self._holder.adopt(names, pid, labels)

    def keep(
        self, names: Mapping[str, str], pid: int, labels: Mapping[str, str], about: Mapping[str, Any], seconds: float
    ) -> tuple[int, list[str]]:
        """Hold claims until the next attempt adopts them, for some seconds at most, and then end this process.

        Returns:
            This process, and the devices whose claims it has.
        """
        self._holder.tell(about)
        devices = self._holder.adopt(names, pid, labels)
        self._holder.when_empty(_end_process)
        end = threading.Timer(seconds, self._holder.drop)
        end.daemon = True
        end.start()
        return os.getpid(), devices


def _end_process() -> None:
    os._exit(0)


class LeftClaims(NamedTuple):
    """The claims that an attempt of a run has left on a node for the next.

    Attributes:
        pid: the process that holds them there.
        names: the names of the claims, by device.
    """

    pid: int
    names: Mapping[str, str]


def leave_claims(
    cluster: NodesOf, held: Mapping[int, Mapping[str, str]], holders: Mapping[int, Any], about: Mapping[str, Any]
) -> dict[str, LeftClaims]:
    """Leave claims to processes that go on after this one has left the cluster, until the next attempt has joined.

    A node that does not answer keeps nothing.

    Args:
        cluster: the cluster.
        held: the names of claims by device, by node.
        holders: the actors that have them, by node.
        about: what askers are told.

    Returns:
        What was left, by the address of the node.
    """
    ray = ray_api()
    seconds = _RETURN_SECONDS + env_vars.CONNECT_TIMEOUT.get()
    pending: dict[int, Any] = {}
    for rank, names in held.items():
        try:
            keeper = cluster.allocate(NodeHolder, node_rank=rank, outlives=True)
            labels = labels_of(cluster.topology.nodes[rank])
            pending[rank] = keeper.keep.remote(names, holders[rank].pid.remote(), labels, about, seconds)
        except (RLinfError, ray.exceptions.RayError):
            continue
    left: dict[str, LeftClaims] = {}
    end = time.monotonic() + _LEAVE_SECONDS
    for rank, answer in pending.items():
        try:
            pid, devices = ray.get(answer, timeout=max(0.0, end - time.monotonic()))
        except (ray.exceptions.RayError, TimeoutError):
            continue
        address = cluster.topology.nodes[rank].ip
        if devices and address is not None:
            left[address] = LeftClaims(pid, {device: held[rank][device] for device in devices})
    return left

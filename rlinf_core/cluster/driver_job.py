"""The job of this driver: its manager and the connection to it, and its claims on devices.

Claims last for a use, for a cluster, or for all clusters of a run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import engine
from rlinf_core.cluster.engine import JobRecord
from rlinf_core.cluster.job_claims import LOGGER, ClaimsOn, JobClaims, devices_of
from rlinf_core.cluster.ray_api import pickle_by_value, ray_api
from rlinf_core.collective.endpoint_info import advertised_on
from rlinf_core.context import Session, current_session
from rlinf_core.errors import ClusterError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.hardware.accelerators import Found, find_accelerators
from rlinf_core.placement.strategy import Placement
from rlinf_core.process import pacing
from rlinf_core.supervision.client import ManagerClient, current_client, enter_job
from rlinf_core.supervision.lives import DRIVER, MANAGER
from rlinf_core.supervision.manager import ManagerProcess
from rlinf_core.topology import ClusterTopology, NodeInfo
from rlinf_core.waiting import contact_seconds

_claims: JobClaims | None = None


def _of_this_process() -> JobClaims:
    global _claims
    _claims = _claims or JobClaims()
    return _claims


# The use of devices claimed by `Cluster.claim`, which ends with the cluster.
_THE_CLUSTER: Final = object()


def claim(cluster: ClaimsOn, placements: Iterable[Placement], use: object = _THE_CLUSTER) -> None:
    """Claim the accelerators and robots of processes before they start; claims that this job has stay.

    It claims nothing for processes without such devices, nor in a worker, whose job has claims already, nor in a
    rehearsal, whose processes use no device (see `pacing`).

    Args:
        placements: the places of the processes.
        use: the use that `give_back` ends. By default the claims last as long as the cluster.

    Raises:
        DeviceHeldError: another job holds a device, and this one does not wait.
        ClusterError: a node does not answer.
    """
    session = current_session()
    if pacing.wanted is not None or (session is not None and session.member is not None):
        return
    devices = devices_of(cluster.topology, placements)
    if not devices and _claims is None:
        return
    claims = _of_this_process()
    claims.enter(cluster)
    wanted = {
        rank: new
        for rank, named in devices.items()
        if (new := {device: words for device, words in named.items() if (rank, device) not in claims.names})
    }
    if wanted:
        engine.on_disconnect(_on_disconnect)
        claims.take(cluster, wanted)
    else:
        claims.renew()
    claims.use(use, [(rank, device) for rank, named in devices.items() for device in named])


def give_back(use: object) -> None:
    """Give back the devices that were claimed only for this use, if any."""
    if _claims is not None:
        _claims.end_use(use)


class _Here:
    """This machine as a `ClaimsOn`, for a process that computes on it without a cluster."""

    own_rank = 0

    def __init__(self, accelerators: Found) -> None:
        devices = accelerators.devices
        node = NodeInfo(
            0,
            len(devices),
            accelerators.accelerator.name,
            accelerator_ids=tuple(device.visible_id for device in devices),
            accelerator_identities=tuple(device.identities for device in devices),
        )
        self.topology = ClusterTopology.from_nodes([node])

    def allocate(self, actor_class: type, *, node_rank: int, outlives: bool = False) -> Any:
        raise RuntimeError("there is no other node")

    def announce_wait(self, what: str, *, again: bool = False, instead: str = "") -> None:
        if not again:
            LOGGER.warning("waiting for %s", "; ".join(filter(None, (what, instead))))


def claim_here() -> None:
    """Claim this machine's first accelerator for a process that computes without a cluster, until it ends.

    Raises:
        DeviceHeldError: another job holds it, and this one does not wait.
    """
    accelerators = find_accelerators()
    if accelerators.devices:
        vendor, here = accelerators.accelerator.name, _Here(accelerators)
        wanted = {0: {f"{vendor}:{name}": "accelerator 0" for name in accelerators.devices[0].identities}}
        claims = _of_this_process()
        claims.enter(here)
        engine.on_disconnect(_on_disconnect)
        claims.take(here, wanted)


def claim_names(topology: ClusterTopology, placement: Placement) -> tuple[str, ...]:
    """Return the names of the claims of which a worker keeps copies."""
    if _claims is None or not _claims.names:
        return ()
    rank = placement.cluster_node_rank
    devices = devices_of(topology, [placement]).get(rank, {})
    return tuple(_claims.names[rank, device] for device in devices if (rank, device) in _claims.names)


def describe_claims(*, often: bool = False, **about: object) -> None:
    """Set the description that other jobs see: `run` (its folder), `step`, `total` steps, and seconds `left`."""
    if _claims is not None:
        _claims.tell(often=often, **about)


@contextmanager
def kept_claims(run: str) -> Generator[None, None, None]:
    """Keep the claims on the driver's node over the successive clusters of the run in the folder `run`.

    Claims on other nodes end with each cluster, unless `leave_claims` was called: then processes there hold them
    until the next cluster has joined.
    """
    claims = _of_this_process()
    claims.tell(run=run)
    claims.kept, claims.had = True, False
    try:
        yield
    finally:
        claims.kept = False
        claims.release()


def leave_claims(cluster: ClaimsOn) -> None:
    """Leave the claims on other nodes to processes there, since this job leaves the cluster and returns at once.

    These processes release the claims after two minutes and the time limit for joining.
    """
    if _claims is None or not _claims.kept:
        return
    try:
        _claims.leave(cluster)
    except Exception as error:  # noqa: BLE001 - it must not hide the failure that ends the attempt
        LOGGER.warning("devices on other nodes are free until the next attempt: %s", error)


def _on_disconnect() -> Sequence[WorkerGroupError]:
    if _claims is not None:
        _claims.release()
    return ()


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

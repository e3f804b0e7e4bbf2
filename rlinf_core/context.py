"""The context of a worker: one frozen value from its launch, so that nothing is read from the environment later."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_core.address import WorkerAddress
from rlinf_core.hardware.robots import RobotUnit
from rlinf_core.placement.strategy import Placement
from rlinf_core.process.pacing import Pacing


@dataclass(frozen=True, slots=True)
class Session:
    """The values that the processes of one job share.

    Attributes:
        job: the job's name, unique on its cluster; it is the Ray namespace of the job's actors.
        secret: the shared secret that authenticates the job's processes to each other.
        folder: the driver's private folder on its machine, for sockets, or None.
        log_folder: folder for each worker's log on its node, or None for Ray's log files only.
        log_names: a group's folder in `log_folder`, by group name; by default the group's name.
        trace: whether workers record spans (see `rlinf_core.process.activity`).
        pacing: the durations that a rehearsal gives to calls in place of their work, or None.
        secrets: values that workers mask in what they print and log.
        import_path: the folders that driver and workers import from before installed packages.
        working_folder: the driver's working folder, which imports search after `import_path`, or None.
        nodes: Ray's ids of the nodes by rank, if spares have replaced nodes; empty if nodes have their own ranks.
        member: the worker that this process is, or None in the driver.
    """

    job: str
    secret: bytes = field(repr=False)
    folder: str | None = None
    log_folder: str | None = None
    log_names: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    trace: bool = False
    pacing: Pacing | None = field(default=None, hash=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    import_path: tuple[str, ...] = ()
    working_folder: str | None = None
    nodes: tuple[str, ...] = ()
    member: WorkerAddress | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The node and the devices of a worker.

    Attributes:
        address: its name among all workers of the job.
        rank, world_size: its rank and the number of workers, within its group.
        node_id, node_ip, hostname: its node's rank in the cluster, address for other nodes, and host name.
        pid: its process id.
        gpu_id: the index on its node of its first accelerator, or None without one.
        available_gpus: the indices on its node of its visible accelerators: all if it is assigned none.
        accelerator_type: the vendor of its node's accelerators as in `NVIDIA`, or None.
        hardware: the robots or other declared units that it owns.
    """

    address: WorkerAddress
    rank: int
    world_size: int
    node_id: int
    node_ip: str
    hostname: str
    pid: int
    gpu_id: int | None
    available_gpus: tuple[int, ...]
    accelerator_type: str | None
    hardware: tuple[RobotUnit, ...]


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The start values of one worker.

    Attributes:
        address: its name among all workers of the job.
        group_name: the name of its group, which peers send to.
        placement: its node and devices; `placement.rank` and `placement.world_size` count within its group.
        node_ip: the address at which other nodes reach its node.
        master_addr: the address of rank 0 of its group, for `torch.distributed`.
        hardware: the robots or other declared units that it owns, in the order of its `local_hardware_ranks`.
        session: the job.
        incarnation: the number of the group's launch, from 1, which distinguishes a relaunched worker.
        given: the environment variables that the file sets for it, which the runtime does not overwrite.
        host: Ray's name of the actor that forwards its calls; empty for a worker that is an actor itself.
        claims: the names of the job's claims on its devices, which it keeps until it ends.
    """

    address: WorkerAddress
    group_name: str
    placement: Placement
    node_ip: str
    master_addr: str
    hardware: tuple[RobotUnit, ...]
    session: Session
    incarnation: int
    given: frozenset[str] = frozenset()
    host: str = ""
    claims: tuple[str, ...] = ()

    def info(self) -> WorkerInfo:
        """Return the worker's info. Call in its own process."""
        placement = self.placement
        return WorkerInfo(
            address=self.address,
            rank=placement.rank,
            world_size=placement.world_size,
            node_id=placement.cluster_node_rank,
            node_ip=self.node_ip,
            hostname=platform.node(),
            pid=os.getpid(),
            gpu_id=placement.local_accelerator_rank,
            available_gpus=placement.visible_accelerators,
            accelerator_type=placement.accelerator_type,
            hardware=self.hardware,
        )


# Global because a process belongs to one job: a `Cluster()` in a worker joins that job.
_session: Session | None = None


def current_session() -> Session | None:
    """Return the job that this process belongs to, or None before it has one."""
    return _session


def enter_session(session: Session | None) -> None:
    """Make `session` the job of this process."""
    global _session
    _session = session

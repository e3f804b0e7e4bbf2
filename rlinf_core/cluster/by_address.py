"""The state of a cluster that is not recorded here, such as one started by hand, from its own Ray."""

from __future__ import annotations

import time
from typing import Any, Final

from rlinf_core.bootstrap.down import RunningJob
from rlinf_core.bootstrap.status import NodeStatus, State, StatusReport
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.cluster.ray_private import gcs_client
from rlinf_core.topology import NodeInfo

_SECONDS: Final = 5


def ask(address: str, name: str | None = None) -> StatusReport:
    """Return the nodes by the ranks that a job would find there, and the jobs that run.

    It is joined as a job joins it: what cannot be joined, or has no sound ranks, is no cluster for one.

    Args:
        address: of its head, `HOST:PORT`.
        name: that `rlinf up` gave it, where it did.

    Raises:
        ClusterError: it cannot be joined, or the ranks of its nodes are not 0 to N-1 once each.
    """
    begun = time.monotonic()
    with Cluster(address=address) as cluster:
        nodes = tuple(map(_status, cluster.topology.nodes))
        jobs = _other_jobs(address)
    return StatusReport(nodes, jobs, time.monotonic() - begun, address=address, name=name)


def _status(node: NodeInfo) -> NodeStatus:
    versions = dict(node.versions)
    return NodeStatus(
        rank=node.rank,
        groups=(),
        host=node.hostname,
        state=State.UP,
        address=node.ip,
        python=versions.get("python"),
        ray=versions.get("ray"),
        rlinf=versions.get("rlinf"),
    )


def _other_jobs(address: str) -> tuple[RunningJob, ...] | None:
    """Return the drivers that are connected besides this one; None when the head does not tell."""
    ray: Any = ray_api()
    try:
        listed = gcs_client(address).get_all_job_info(timeout=_SECONDS)
    except ray.exceptions.RayError:
        return None
    own = ray.get_runtime_context().get_job_id()
    return tuple(
        RunningJob(str(job.driver_ip_address), int(job.driver_pid), str(job.entrypoint), job.start_time / 1000)
        for key, job in listed.items()
        if key.hex() != own and not job.is_dead and not job.config.ray_namespace.startswith("_ray_internal")
    )

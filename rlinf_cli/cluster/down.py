"""Taking a cluster down, and verifying that nothing is left of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.node.node_requests import ask
from rlinf_cli.cluster.progress import ClusterReport, Emit, Event, NodeFailure, Phase, Progress
from rlinf_cli.cluster.transport import Transport
from rlinf_core.config.secrets import mask_text
from rlinf_core.node import cluster_records

# Seconds for Ray's own shutdown, and for the whole end of a node.
GRACE_SECONDS: Final = 8.0
STOP_SECONDS: Final = 45.0
_JOBS_SECONDS: Final = 10.0
# Seconds for the drivers of running jobs to save and end.
JOB_SECONDS: Final = 8.0
# Extra seconds for the connection to a node.
_MARGIN_SECONDS: Final = 5.0
_NOT_FOUND: Final = 127


class RunningJob(NamedTuple):
    """A driver that is connected to the cluster.

    Attributes:
        command: its command line.
        started: its start, in seconds since 1970.
    """

    address: str
    pid: int
    command: str
    started: float

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> RunningJob:
        """Return a job that the head lists; see `questions.members`."""
        return cls(str(job["address"]), int(job["pid"]), str(job["command"]), float(job["started"]))

    @property
    def shown(self) -> str:
        """Its command line with masked secrets, for display."""
        return mask_text(self.command)


class NodeEnd(NamedTuple):
    """The outcome of taking one node down.

    Attributes:
        found: whether anything of the cluster was there.
        left: leftovers, in words; empty if verified that there are none.
    """

    rank: int
    host: str | None
    reached: bool
    found: bool
    left: tuple[str, ...]


DownReport: TypeAlias = ClusterReport[NodeEnd]


async def running_jobs(cluster: str, node: NodeTarget, transport: Transport) -> list[RunningJob]:
    """Return the running jobs of a cluster, as its head tells the node `node`; empty if the head is gone."""
    request: dict[str, Any] = {"verb": "members", "cluster": cluster, "wanted": [], "deadline": _JOBS_SECONDS}
    answer = await ask(transport, node, request, deadline=_JOBS_SECONDS + 25.0 + _MARGIN_SECONDS + node.connect_seconds)
    if answer.data is None:
        return []
    return [RunningJob.of(job) for job in answer.data["jobs"]]


async def take_down(
    name: str,
    nodes: Sequence[NodeTarget],
    transport: Transport,
    emit: Emit,
    *,
    jobs: Sequence[RunningJob] = (),
) -> DownReport:
    """End the cluster `name` on `nodes`: the joined nodes in parallel, then the head.

    Unreachable nodes stay recorded, for the next attempt. The drivers of `jobs` are asked to end first: a driver that
    loses its Ray notices late, and cannot save anything.

    Raises:
        RLinfError: another command is working on the cluster.
    """
    begun = time.monotonic()
    cluster = identity.cluster_id(name)
    # Nodes started by hand are ended one by one, perhaps concurrently on a shared home, so they take no lock. The head
    # keeps the record.
    alone = all(node.host is None and not node.is_head for node in nodes)
    with nullcontext() if alone else identity.locked(name):
        ends: dict[int, NodeEnd] = {}
        failures: list[NodeFailure] = []

        async def end(node: NodeTarget) -> None:
            ends[node.rank], failure = await _end(cluster, node, transport, emit)
            if failure is not None:
                failures.append(failure)

        if jobs:
            await asyncio.gather(*(_end_jobs(cluster, node, transport, jobs) for node in nodes))
        await asyncio.gather(*(end(node) for node in nodes if not node.is_head))
        await asyncio.gather(*(end(node) for node in nodes if node.is_head))
        if not alone:
            _record(name, ends)
    ordered = tuple(ends[node.rank] for node in nodes)
    failures.sort(key=lambda failure: failure.rank)
    return ClusterReport(name, ordered, tuple(failures), time.monotonic() - begun)


async def _end_jobs(cluster: str, node: NodeTarget, transport: Transport, jobs: Sequence[RunningJob]) -> None:
    """End the drivers on a node. One that does not end in time loses its Ray anyway."""
    listed = [{"address": job.address, "pid": job.pid, "command": job.command} for job in jobs]
    request: dict[str, Any] = {"verb": "end_jobs", "cluster": cluster, "jobs": listed, "deadline": JOB_SECONDS}
    await ask(transport, node, request, deadline=JOB_SECONDS + _MARGIN_SECONDS + node.connect_seconds)


async def _end(cluster: str, node: NodeTarget, transport: Transport, emit: Emit) -> tuple[NodeEnd, NodeFailure | None]:
    deadline = STOP_SECONDS + GRACE_SECONDS
    emit(Event(node.rank, Phase.STOP, Progress.BEGUN, deadline=deadline))
    request: dict[str, Any] = {"verb": "stop", "cluster": cluster, "grace": GRACE_SECONDS}
    patience = deadline + _MARGIN_SECONDS + node.connect_seconds
    answer = await ask(transport, node, request, deadline=patience)
    if answer.data is None and answer.result.rc == _NOT_FOUND:
        # The node's interpreter may have been removed; any other can end its processes.
        answer = await ask(transport, node, request, deadline=patience, interpreter="python3")
    if answer.data is None:
        emit(Event(node.rank, Phase.STOP, Progress.FAILED, answer.message))
        return NodeEnd(node.rank, node.host, False, False, ()), NodeFailure.of(node, Phase.STOP, answer)
    leftovers = _left(answer.data)
    existed = bool(answer.data["found"])
    if leftovers:
        message = f"{len(leftovers)} items of the cluster are left"
        emit(Event(node.rank, Phase.STOP, Progress.FAILED, message))
        help_text = (
            "run the command again; a process that cannot be killed hangs in the kernel until the machine reboots"
        )
        failure = NodeFailure(node.rank, node.name, Phase.STOP, message, "\n".join(leftovers), help_text)
        return NodeEnd(node.rank, node.host, True, existed, leftovers), failure
    detail = f"{answer.data.get('ended', 0)} processes ended, nothing left" if existed else "nothing found"
    emit(Event(node.rank, Phase.STOP, Progress.DONE, detail))
    return NodeEnd(node.rank, node.host, True, existed, ()), None


def _left(data: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{what} {item}"
        for what, items in (
            ("process", data["processes"]),
            ("port", data["ports"]),
            ("file", data["files"]),
            ("shared memory", data["shared"]),
        )
        for item in items
    )


def _record(name: str, ends: dict[int, NodeEnd]) -> None:
    """Remove clean nodes from the record, and the record with the last node."""
    record = cluster_records.load(name)
    if record is None:
        return
    clean = {rank for rank, end in ends.items() if end.reached and not end.left}
    rest = tuple(
        node._replace(process=None, address=None, folder=None) if node.rank in clean else node for node in record.nodes
    )
    # A node without a folder runs nothing.
    if all(node.folder is None for node in rest):
        cluster_records.forget(name)
    else:
        cluster_records.save(replace(record, nodes=rest, address="" if 0 in clean else record.address))

"""The state of the recorded cluster: facts from each node, membership and jobs from the head."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rlinf_cli.cluster.down import RunningJob
from rlinf_cli.cluster.inventory import NodeTarget, recorded_targets
from rlinf_cli.cluster.transports.agent import AgentReply, ask
from rlinf_cli.cluster.transports.transport import CommandOutcome, Transport
from rlinf_core.node.cluster_records import ClusterRecord

PROBE_SECONDS: Final = 30.0
_MEMBERS_SECONDS: Final = 3.0
_MEMBERS_MARGIN_SECONDS: Final = 25.0

Notify = Callable[[str], None]


class State(StrEnum):
    """The state of a node."""

    UP = "up"
    """Its Ray runs, and the head lists it."""
    NOT_JOINED = "not joined"
    """Its Ray runs, and the head does not list it as alive."""
    UNCERTAIN = "runs"
    """Its Ray runs; the head did not answer."""
    DIED = "died"
    """It was started, but its Ray has ended."""
    ABSENT = "not started"
    UNREACHABLE = "unreachable"
    BROKEN = "cannot answer"
    """It is reachable, but its interpreter does not run."""


class NodeStatus(NamedTuple):
    """One node.

    Attributes:
        address: the address at which the others reach it, or None.
        python, ray, rlinf: versions, or None if unknown.
        detail: why it is not up; empty if it is.
        help: the remedy; may be empty.
    """

    rank: int
    groups: tuple[str, ...]
    host: str | None
    state: State
    address: str | None = None
    python: str | None = None
    ray: str | None = None
    rlinf: str | None = None
    detail: str = ""
    help: str = ""


class StatusReport(NamedTuple):
    """The cluster.

    Attributes:
        jobs: the connected drivers, or None if the head did not answer.
        seconds: the duration of the query.
        address: the address of the head's GCS; empty while it is not up.
        name, file: the name and file, as recorded by `rlinf up`; None if Ray was started by other means.
        authenticated: whether a token is required, or None if unknown.
    """

    nodes: tuple[NodeStatus, ...]
    jobs: tuple[RunningJob, ...] | None
    seconds: float
    address: str
    name: str | None = None
    file: str | None = None
    authenticated: bool | None = None

    @property
    def all_up(self) -> bool:
        return all(node.state is State.UP for node in self.nodes)


async def ask_all(cluster: ClusterRecord, transport: Transport, notify: Notify) -> StatusReport:
    """Return the status of every node; each has its own deadline.

    Args:
        cluster: the record of `up`.
        transport: the transport to its nodes.
        notify: called with a message before a wait.
    """
    begun = time.monotonic()
    nodes = recorded_targets(cluster)
    connect = max(node.connect_seconds for node in nodes)
    notify(f"asking {len(nodes)} node{'' if len(nodes) == 1 else 's'}, {connect + PROBE_SECONDS:.0f} s at most")
    head = next((node for node in nodes if node.is_head), None)
    joined = asyncio.ensure_future(_members(cluster, head, transport))
    answers = await asyncio.gather(*(_probe(cluster, node, transport) for node in nodes))
    members = await joined
    members_by_rank = None if members is None else _by_rank(members["nodes"])
    statuses = tuple(_status(node, answer, members_by_rank) for node, answer in zip(nodes, answers, strict=True))
    jobs = None if members is None else tuple(_job(job) for job in members["jobs"])
    seconds = time.monotonic() - begun
    return StatusReport(statuses, jobs, seconds, cluster.address, cluster.name, cluster.file, cluster.authenticated)


def _by_rank(members: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the head's entries by rank; a restarted node also has entries of its dead predecessors."""
    by_rank: dict[str, Mapping[str, Any]] = {}
    for member in members:
        rank = str(member["rank"])
        if member["alive"] or rank not in by_rank:
            by_rank[rank] = member
    return by_rank


async def _probe(cluster: ClusterRecord, node: NodeTarget, transport: Transport) -> AgentReply | None:
    """Return the facts of a node; None for one started by hand on another machine, which cannot be reached from
    here."""
    if node.host is None and not node.is_head:
        return None
    request: dict[str, Any] = {"verb": "probe", "cluster": cluster.id}
    return await ask(transport, node, request, deadline=node.connect_seconds + PROBE_SECONDS)


async def _members(cluster: ClusterRecord, head: NodeTarget | None, transport: Transport) -> Mapping[str, Any] | None:
    """Return the head's list of nodes and jobs, or None if it does not answer."""
    if head is None:
        return None
    ranks = [node.rank for node in cluster.nodes]
    # A dead node is listed until its heartbeats time out; missing nodes are not waited for.
    request = {"verb": "members", "cluster": cluster.id, "wanted": ranks, "deadline": _MEMBERS_SECONDS}
    deadline = head.connect_seconds + _MEMBERS_SECONDS + _MEMBERS_MARGIN_SECONDS
    answer = await ask(transport, head, request, deadline=deadline)
    return answer.data if answer.data is not None and answer.data["fault"] is None else None


def _status(node: NodeTarget, answer: AgentReply | None, known: Mapping[str, Any] | None) -> NodeStatus:
    if answer is None:
        member = (known or {}).get(str(node.rank))
        state, detail, help = _state(node, {"alive": True}, known)
        address = str(member["address"]) if member else None
        return NodeStatus(node.rank, node.groups, node.host, state, address, detail=detail, help=help)
    if answer.data is None:
        state = State.BROKEN if answer.result.kind is CommandOutcome.DONE else State.UNREACHABLE
        why = f": {answer.why}" if answer.why and answer.why not in answer.message else ""
        status = NodeStatus(node.rank, node.groups, node.host, state)
        return status._replace(detail=f"{answer.message}{why}", help=answer.help)
    facts, record = answer.data, answer.data["record"]
    state, detail, help = _state(node, record, known)
    return NodeStatus(
        node.rank,
        node.groups,
        node.host,
        state,
        record["address"] if record else None,
        ".".join(map(str, facts["python"])),
        facts["ray"],
        facts["rlinf"],
        detail,
        help,
    )


def _state(
    node: NodeTarget, record: Mapping[str, Any] | None, known: Mapping[str, Any] | None
) -> tuple[State, str, str]:
    again = "run `rlinf up` again to restart it"
    if record is None:
        return State.ABSENT, "the cluster does not run there", again
    if not record["alive"]:
        return State.DIED, f"its Ray has ended; see {record['folder']}/up.log there", again
    if known is None:
        return State.UNCERTAIN, "unknown whether it has joined: the head did not answer", ""
    member = known.get(str(node.rank))
    if member is None or not member["alive"]:
        reason = f": {member['reason']}" if member and member.get("reason") else ""
        return State.NOT_JOINED, f"the head does not list it{reason}", again if node.host or node.is_head else ""
    return State.UP, "", ""


def _job(job: Mapping[str, Any]) -> RunningJob:
    return RunningJob(str(job["address"]), int(job["pid"]), str(job["command"]), float(job["started"]))

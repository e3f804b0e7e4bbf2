"""The state of the recorded cluster: each node answers for itself, the head for who has joined and which jobs run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rlinf_cli.bootstrap.inventory import NodeTarget, recorded_targets
from rlinf_cli.bootstrap.teardown import RunningJob
from rlinf_cli.bootstrap.transports.agent import AgentReply, ask
from rlinf_cli.bootstrap.transports.transport import CommandOutcome, Transport
from rlinf_core.node.cluster_records import ClusterRecord

PROBE_SECONDS: Final = 30.0
_MEMBERS_SECONDS: Final = 3.0
_MEMBERS_MARGIN_SECONDS: Final = 25.0

Tell = Callable[[str], None]


class State(StrEnum):
    """The state of a node."""

    UP = "up"
    """Its Ray runs, and the head lists it."""
    NOT_JOINED = "not joined"
    """Its Ray runs, and the head does not list it as alive."""
    UNCERTAIN = "runs"
    """Its Ray runs; the head could not be asked."""
    DIED = "died"
    """It was started, and its Ray has ended."""
    ABSENT = "not started"
    UNREACHABLE = "unreachable"
    BROKEN = "cannot answer"
    """It is reached, and its interpreter does not run."""


class NodeStatus(NamedTuple):
    """One node.

    Attributes:
        address: by which the others reach it, or None.
        python, ray, rlinf: versions, or None where nobody could tell.
        detail: why it is not up; empty when it is.
        help: what to do; may be empty.
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
        jobs: drivers that are connected, or None when the head could not be asked.
        seconds: that asking took.
        address: of the head's GCS; empty while it is not up.
        name, file: as `rlinf up` recorded them; None where Ray was started by other means.
        authenticated: whether a token is asked for, or None where nobody has recorded it.
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


async def ask_all(cluster: ClusterRecord, transport: Transport, tell: Tell) -> StatusReport:
    """Return how every node is; none keeps the others waiting beyond its deadline.

    Args:
        cluster: as `up` recorded it.
        transport: the way to its nodes.
        tell: is told what is waited for.
    """
    begun = time.monotonic()
    nodes = recorded_targets(cluster)
    connect = max(node.connect_seconds for node in nodes)
    tell(f"asking {len(nodes)} node{'' if len(nodes) == 1 else 's'}, {connect + PROBE_SECONDS:.0f} s at most")
    head = next((node for node in nodes if node.is_head), None)
    joined = asyncio.ensure_future(_members(cluster, head, transport))
    answers = await asyncio.gather(*(_probe(cluster, node, transport) for node in nodes))
    members = await joined
    known = None if members is None else _by_rank(members["nodes"])
    statuses = tuple(_status(node, answer, known) for node, answer in zip(nodes, answers, strict=True))
    jobs = None if members is None else tuple(_job(each) for each in members["jobs"])
    seconds = time.monotonic() - begun
    return StatusReport(statuses, jobs, seconds, cluster.address, cluster.name, cluster.file, cluster.authenticated)


def _by_rank(members: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return what the head lists, by rank: a node that was repaired has entries of those that died before it, too."""
    found: dict[str, Mapping[str, Any]] = {}
    for each in members:
        rank = str(each["rank"])
        if each["alive"] or rank not in found:
            found[rank] = each
    return found


async def _probe(cluster: ClusterRecord, node: NodeTarget, transport: Transport) -> AgentReply | None:
    """Return what a node says; None of one that was started on its own machine, to which there is no way from here."""
    if node.host is None and not node.is_head:
        return None
    request: dict[str, Any] = {"verb": "probe", "cluster": cluster.id}
    return await ask(transport, node, request, deadline=node.connect_seconds + PROBE_SECONDS)


async def _members(cluster: ClusterRecord, head: NodeTarget | None, transport: Transport) -> Mapping[str, Any] | None:
    """Return what the head says about the nodes and jobs, or None when it cannot be asked."""
    if head is None:
        return None
    ranks = [node.rank for node in cluster.nodes]
    # A node that died a moment ago is listed until its beats are missed; none is waited for that is not there.
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
    again = "`rlinf up` again repairs it"
    if record is None:
        return State.ABSENT, "nothing of the cluster runs there", again
    if not record["alive"]:
        return State.DIED, f"its Ray has ended; see {record['folder']}/up.log there", again
    if known is None:
        return State.UNCERTAIN, "the head could not be asked whether it has joined", ""
    member = known.get(str(node.rank))
    if member is None or not member["alive"]:
        reason = f": {member['reason']}" if member and member.get("reason") else ""
        return State.NOT_JOINED, f"the head does not list it{reason}", again if node.host or node.is_head else ""
    return State.UP, "", ""


def _job(job: Mapping[str, Any]) -> RunningJob:
    return RunningJob(str(job["address"]), int(job["pid"]), str(job["command"]), float(job["started"]))

"""`rlinf status`: facts from each node of the recorded cluster, membership and jobs from its head."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rlinf_cli import console
from rlinf_cli.cluster.down import RunningJob
from rlinf_cli.cluster.inventory import NodeTarget, recorded_cluster, recorded_targets
from rlinf_cli.cluster.node.node_requests import AgentReply, ask
from rlinf_cli.cluster.node.questions import jobs_of
from rlinf_cli.cluster.transport import CommandOutcome, Transport, run
from rlinf_cli.command import Result
from rlinf_cli.interrupts import ExitCode
from rlinf_core import env_vars
from rlinf_core.node import attach, cluster_records
from rlinf_core.node.cluster_records import ClusterRecord
from rlinf_core.node.device_claims import HolderInfo, listing
from rlinf_core.node.holder_words import device_words, holder_record, job_words, progress_words, since, waits_for
from rlinf_core.topology import NodeInfo

SCHEMA: Final = "rlinf.status/1"
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
        python, ray, rlinf: the versions, or None if unknown.
        detail: why it is not up; empty if it is.
        holdings, waiting: the holders of its accelerators and robots, and the drivers on it that wait for devices.
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
    holdings: tuple[HolderInfo, ...] = ()
    waiting: tuple[HolderInfo, ...] = ()


class StatusReport(NamedTuple):
    """The status of a cluster.

    Attributes:
        jobs: the connected drivers, or None if the head did not answer.
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


def status_of(name: str | None, *, parallel: int) -> Result:
    """Return the status of the cluster called `name`.

    Without a name, it is the cluster at `RLINF_ADDRESS`, else the recorded one, else the cluster of the node that was
    started by hand on this machine.

    Raises:
        ClusterError: the cluster does not exist or does not answer.
    """
    report = _asked(name, parallel)
    code = ExitCode.OK if report.all_up else ExitCode.UNREACHABLE
    return Result(lambda: status_text(report), lambda: status_record(report), code)


def _asked(name: str | None, parallel: int) -> StatusReport:
    address = env_vars.ADDRESS.get() if name is None else None
    if address is not None and address != attach.LOCAL:
        return cluster_status(address)
    # If each node was started by hand, only the head's machine has the record.
    here = attach.known() if name is None and cluster_records.recorded() is None else None
    if here is not None:
        attach.prepare(here)
        return cluster_status(here.address, here.name)
    if name is None and env_vars.CLUSTER.get() is None and cluster_records.recorded() is None:
        alone = _with_holders(NodeStatus(0, (), None, State.ABSENT, detail="no cluster is known here"), listing())
        if alone.holdings or alone.waiting:
            # Jobs with a private Ray hold accelerators, too.
            return StatusReport(
                (alone._replace(help="`rlinf ps` shows jobs on Rays of their own"),), (), 0.0, address=""
            )
    return run(ask_all(recorded_cluster(name), Transport(parallel=parallel), console.message))


def cluster_status(address: str, name: str | None = None) -> StatusReport:
    """Return the nodes by rank, and the running jobs, of the Ray at an address.

    The connection is made as by a job, so that errors are the same.

    Raises:
        ClusterError: the cluster cannot be joined, or the ranks of its nodes are not 0 to N-1 once each.
    """
    from rlinf_core.cluster.cluster import Cluster

    console.message(f"asking the cluster at {address}, at most {env_vars.CONNECT_TIMEOUT.get():g} s per node")
    begun = time.monotonic()
    with Cluster(address=address) as cluster:
        nodes = tuple(
            _with_holders(_joined(node), said)
            for node, said in zip(cluster.topology.nodes, cluster.ask_nodes(listing), strict=True)
        )
        jobs = _other_jobs(address)
    return StatusReport(nodes, jobs, time.monotonic() - begun, address=address, name=name)


def _joined(node: NodeInfo) -> NodeStatus:
    versions = dict(node.versions)
    python, ray, rlinf = map(versions.get, ("python", "ray", "rlinf"))
    return NodeStatus(node.rank, (), node.hostname, State.UP, node.ip, python, ray, rlinf)


def _with_holders(node: NodeStatus, said: Mapping[str, Any]) -> NodeStatus:
    """Return a node with the holders of its devices and the waiting drivers, from the node's `listing`."""
    claims, waiting = (tuple(HolderInfo(**one) for one in said[key]) for key in ("claims", "waiting"))
    return node._replace(holdings=claims, waiting=waiting)


def _other_jobs(address: str) -> tuple[RunningJob, ...] | None:
    """Return the other connected drivers; None if the head does not answer."""
    from rlinf_core.cluster.ray_api import gcs_client, ray_api

    ray: Any = ray_api()
    try:
        listed = jobs_of(gcs_client(address))
    except ray.exceptions.RayError:
        return None
    own = ray.get_runtime_context().get_job_id()
    return tuple(RunningJob.of(job) for job in listed if job["id"] != own)


async def ask_all(cluster: ClusterRecord, transport: Transport, notify: Notify) -> StatusReport:
    """Return the status of every node; each has its own deadline."""
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
    jobs = None if members is None else tuple(map(RunningJob.of, members["jobs"]))
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
    """Return the facts of a node; None for a node started by hand on another machine, which is unreachable here."""
    if node.host is None and not node.is_head:
        return None
    request: dict[str, Any] = {"verb": "probe", "cluster": cluster.id}
    return await ask(transport, node, request, deadline=node.connect_seconds + PROBE_SECONDS)


async def _members(cluster: ClusterRecord, head: NodeTarget | None, transport: Transport) -> Mapping[str, Any] | None:
    """Return the head's list of nodes and jobs, or None if it does not answer."""
    if head is None:
        return None
    ranks = [node.rank for node in cluster.nodes]
    # A dead node stays listed until its heartbeats time out. The short deadline limits the wait for missing nodes.
    request = {"verb": "members", "cluster": cluster.id, "wanted": ranks, "deadline": _MEMBERS_SECONDS}
    deadline = head.connect_seconds + _MEMBERS_SECONDS + _MEMBERS_MARGIN_SECONDS
    answer = await ask(transport, head, request, deadline=deadline)
    return answer.data if answer.data is not None and answer.data["fault"] is None else None


def _status(node: NodeTarget, answer: AgentReply | None, known: Mapping[str, Any] | None) -> NodeStatus:
    status = NodeStatus(node.rank, node.groups, node.host, State.UNREACHABLE)
    if answer is None:
        member = (known or {}).get(str(node.rank))
        state, detail, help = _state(node, {"alive": True}, known)
        address = str(member["address"]) if member else None
        return status._replace(state=state, address=address, detail=detail, help=help)
    if answer.data is None:
        why = f": {answer.why}" if answer.why and answer.why not in answer.message else ""
        state = State.BROKEN if answer.result.kind is CommandOutcome.DONE else State.UNREACHABLE
        return status._replace(state=state, detail=f"{answer.message}{why}", help=answer.help)
    facts, record = answer.data, answer.data["record"]
    state, detail, help = _state(node, record, known)
    status = status._replace(state=state, address=record["address"] if record else None, detail=detail, help=help)
    status = status._replace(python=".".join(map(str, facts["python"])), ray=facts["ray"], rlinf=facts["rlinf"])
    return _with_holders(status, facts["holders"])


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


def status_text(report: StatusReport) -> str:
    """Return the nodes, then problems of nodes that are not up, then the jobs."""
    ups = sum(node.state is State.UP for node in report.nodes)
    count = f"{len(report.nodes)} node{'' if len(report.nodes) == 1 else 's'}"
    if report.name is None and not report.address:
        title = "no cluster"
    elif report.name is None:
        title = f"a cluster not started by `rlinf up`: {count}"
    else:
        title = f"cluster {report.name}: {ups} of {count} {'is' if len(report.nodes) == 1 else 'are'} up"
    title += f", head {report.address}" if report.address else ""
    title += ", no authentication" if report.authenticated is False else ""
    rows = [_row(node) for node in report.nodes]
    headers = ("node", "group", "host", "state", "address", "python", "ray", "rlinf")
    blocks = [title, console.table(headers, rows, right=(0,))]
    troubles = [_trouble(node) for node in report.nodes if node.state is not State.UP]
    if troubles:
        blocks.append("\n".join(troubles))
    blocks.append(_jobs_text(report.jobs))
    blocks += _holders_text(report.nodes)
    return "\n\n".join(blocks)


def _row(node: NodeStatus) -> tuple[str, ...]:
    host = _host(node)
    versions = tuple(version or "-" for version in (node.python, node.ray, node.rlinf))
    return (str(node.rank), ", ".join(node.groups) or "-", host, str(node.state), node.address or "-", *versions)


def _host(node: NodeStatus) -> str:
    # A node without a host was started on its own machine; only the head's is this one.
    return node.host or ("this machine" if node.rank == 0 else "started there")


def _trouble(node: NodeStatus) -> str:
    line = f"node {node.rank} ({_host(node)}): {node.detail}"
    return f"{line}\n  do: {node.help}" if node.help else line


def _jobs_text(jobs: tuple[RunningJob, ...] | None) -> str:
    if jobs is None:
        return "jobs: unknown, the head did not answer"
    if not jobs:
        return "jobs: none"
    rows = [(str(job.pid), job.address, _since(job.started), job.shown) for job in jobs]
    return "jobs\n" + console.table(("pid", "node", "since", "command"), rows, right=(0,))


def _holders_text(nodes: Sequence[NodeStatus]) -> list[str]:
    """Return the tables of held devices and of waiting jobs, each only if not empty."""
    held = [
        (str(node.rank), device_words(one), job_words(one), str(one.pid), _since(since(one)), progress_words(one))
        for node in nodes
        for one in node.holdings
    ]
    waiting = [
        (str(node.rank), job_words(one), str(one.pid), _since(since(one)), waits_for(one))
        for node in nodes
        for one in node.waiting
    ]
    blocks: list[str] = []
    if held:
        # A device with parts has a claim for each part, which gives equal rows.
        held = list(dict.fromkeys(held))
        blocks.append(
            "held\n" + console.table(("node", "device", "by", "pid", "since", "progress"), held, right=(0, 3))
        )
    if waiting:
        blocks.append("waiting\n" + console.table(("node", "job", "pid", "since", "for"), waiting, right=(0, 2)))
    return blocks


def _since(started: float | None) -> str:
    if started is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))


def status_record(report: StatusReport) -> dict[str, Any]:
    """Return the status as data."""
    return {
        "schema": SCHEMA,
        "cluster": report.name,
        "whole": report.all_up,
        "file": report.file,
        "address": report.address or None,
        "authenticated": report.authenticated,
        "seconds": round(report.seconds, 3),
        "nodes": [
            {
                **node._asdict(),
                "detail": node.detail or None,
                "help": node.help or None,
                "holdings": list(map(holder_record, node.holdings)),
                "waiting": list(map(holder_record, node.waiting)),
            }
            for node in report.nodes
        ],
        "jobs": None if report.jobs is None else [{**job._asdict(), "command": job.shown} for job in report.jobs],
    }

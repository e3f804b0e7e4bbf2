"""The bring-up of nodes, the head first, then the others in parallel; each phase has a deadline and emits events.

probe every node -> decide -> start the head -> join the others -> verify on the head
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.inventory import NodeTarget, address_of
from rlinf_cli.cluster.node import node_probe
from rlinf_cli.cluster.node.node_requests import ask
from rlinf_cli.cluster.plan import Action, Facts, LocalSoftware, NodeState, decide, refuse_other_nodes
from rlinf_cli.cluster.progress import ClusterReport, Emit, Event, NodeFailure, Phase, Progress
from rlinf_cli.cluster.transport import CommandOutcome, Transport
from rlinf_core.node import cluster_records, node_facts
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode

# Seconds for a connected node to answer, and for Ray to come up on it.
PROBE_SECONDS: Final = 30.0
START_SECONDS: Final = 60.0
SYNC_SECONDS: Final = 120.0
# Extra seconds for the connection to a node, for cleaning up after a dead Ray, and for the head's own query.
_MARGIN_SECONDS: Final = 5.0
_CLEANING_SECONDS: Final = 15.0
_QUERY_SECONDS: Final = 20.0
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class UpRequest:
    """The nodes to bring up, and the options.

    Attributes:
        file: the configuration file as named on the command line.
        path, section: the file's absolute path, and the digest of its cluster section; see `ClusterRecord`.
        nodes: all nodes of the file, by rank.
        head_address: the address at which the nodes reach the head; None to detect it.
        only: the single node to start, which is this machine; None for all.
        wait_head: whether the head may come up after the others, as with nodes started by hand.
        token: the cluster's token, if it was given by the user.
        fingerprint: the fingerprint of the code on this machine; None to skip the comparison.
        start_seconds: the time limit for Ray to start on a node.
        archive: the code for the nodes, packed by `agent.archive`; None if they have it.
    """

    name: str
    file: str
    nodes: tuple[NodeTarget, ...]
    head_address: str | None = None
    authenticated: bool = True
    only: int | None = None
    wait_head: bool = False
    token: str | None = None
    fingerprint: str | None = None
    start_seconds: float = START_SECONDS
    archive: str | None = None
    path: str = ""
    section: str = ""


class NodeOutcome(NamedTuple):
    """The outcome of one node.

    Attributes:
        changed: whether this run started it.
    """

    rank: int
    host: str | None
    groups: tuple[str, ...]
    up: bool
    changed: bool
    address: str | None
    phase: Phase


UpReport: TypeAlias = ClusterReport[NodeOutcome]


async def bring_up(request: UpRequest, transport: Transport, emit: Emit) -> UpReport:
    """Start the missing nodes; running nodes stay as they are, even if others fail.

    Raises:
        RLinfError: the running cluster contradicts the file, or another command is working on it.
    """
    # Nodes started by hand may share a home, and so take no common lock but the one on their machine.
    alone = request.only is not None and request.only != 0
    with nullcontext() if alone else identity.locked(request.name):
        return await _Run(request, transport, emit).run()


class _Run:
    """One run of `up`."""

    def __init__(self, request: UpRequest, transport: Transport, emit: Emit) -> None:
        self.request = request
        self._transport = transport
        self._emit = emit
        self._begun = time.monotonic()
        self._id = identity.cluster_id(request.name)
        self._nodes = [NodeState(node) for node in request.nodes if request.only in (None, node.rank)]
        self._head = next((node for node in self._nodes if node.target.is_head), None)
        self._failures: list[NodeFailure] = []
        self._token: str | None = None

    async def run(self) -> UpReport:
        request = self.request
        before = cluster_records.load(request.name)
        refuse_other_nodes(before, request.name, request.nodes, alone=request.only is not None)
        await asyncio.gather(*(self._probe(node) for node in self._nodes))
        if request.authenticated:
            self._choose_token(before)
        own = await self._reference()
        for failure in decide(self._nodes, own):
            self._fail(failure)
        usable = [node for node in self._nodes if node.action is not None]
        for node in usable:
            self._done(node, Phase.PROBE)
        # Saved before anything is started, so that `down` always knows the nodes.
        if usable and self._keeps_record:
            self._save(before)
        if request.archive is not None:
            await asyncio.gather(*(self._sync(node) for node in usable))
        await self._start_all(own)
        await self._verify()
        if any(node.action for node in self._nodes) and self._keeps_record:
            self._save(before)
        elif before is None and request.only is None:
            cluster_records.forget(request.name)  # a token that no node has received
        return self._report()

    @property
    def _keeps_record(self) -> bool:
        """Whether this machine keeps the record. With nodes started by hand, the head's machine does."""
        return self.request.only in (None, 0)

    def _choose_token(self, before: ClusterRecord | None) -> None:
        request = self.request
        anyone = any((node.facts or {}).get("record") for node in self._nodes)
        self._token = request.token or identity.token_of(request.name, fresh=before is None and not anyone)
        if request.token is not None and self._keeps_record:
            identity.keep_token(request.name, request.token)

    async def _reference(self) -> LocalSoftware:
        request = self.request
        digest = node_facts.digest_of(self._token) if self._token else None
        spec = {
            "num_nodes": len(request.nodes),
            "authentication": "token" if request.authenticated else "none",
            "code": "of `--sync`" if request.archive is not None else "of the node",
        }
        return LocalSoftware(await self._fingerprints(), digest, spec)

    async def _fingerprints(self) -> frozenset[str] | None:
        """Return the fingerprints of the code on this machine, which may have been edited since the command began."""
        first = self.request.fingerprint
        if first is None:
            return None
        if all(node.facts is None or node.facts["fingerprint"] == first for node in self._nodes):
            return frozenset((first,))
        now = await asyncio.to_thread(node_probe.software, dict(os.environ))
        return frozenset((first, now["fingerprint"] or first))

    async def _ask(
        self, node: NodeState, verb: str, phase: Phase, seconds: float, margin: float = 0.0, **request: Any
    ) -> Facts | None:
        """Return a node's reply within a phase; without a reply, record that the node failed in it."""
        self._begin(node, phase, seconds)
        data = {"verb": verb, "cluster": self._id, **request}
        deadline = seconds + margin + node.target.connect_seconds + _MARGIN_SECONDS
        answer = await ask(self._transport, node.target, data, deadline=deadline)
        if answer.data is None:
            self._fail(NodeFailure.of(node.target, phase, answer))
        return answer.data

    def _common(self, node: NodeState) -> dict[str, Any]:
        return {
            "name": self.request.name,
            "rank": node.rank,
            "env": dict(node.target.env),
            "code": self.request.archive is not None,
        }

    async def _probe(self, node: NodeState) -> None:
        target = node.target
        seconds = target.connect_seconds + PROBE_SECONDS
        self._begin(node, Phase.CONNECT, seconds)
        ports = target.ports.fixed(head=target.is_head)
        request = {"verb": "probe", "cluster": self._id, **self._common(node), "ports": ports}

        def hello() -> None:
            self._done(node, Phase.CONNECT)
            self._begin(node, Phase.PROBE, PROBE_SECONDS)

        answer = await ask(self._transport, target, request, deadline=seconds + _MARGIN_SECONDS, on_hello=hello)
        node.facts = answer.data
        if answer.data is None:
            ran = answer.result.kind is CommandOutcome.DONE
            self._fail(NodeFailure.of(target, Phase.PROBE if ran else node.phase, answer))

    async def _sync(self, node: NodeState) -> None:
        """Copy the code to a node; if that fails, the node is not started."""
        reply = await self._ask(node, "sync", Phase.SYNC, SYNC_SECONDS, archive=self.request.archive)
        if reply is not None:
            self._done(node, Phase.SYNC, f"{reply['files']} files")
        else:
            node.action = None

    async def _start_all(self, own: LocalSoftware) -> None:
        """Start the head, then all others, unless the head failed."""
        address, process = self.request.head_address, None
        others = [node for node in self._nodes if node is not self._head]
        if self._head is not None:
            await self._start(self._head, own, None, None)
            record = self._head.record
            if record is None:
                for node in others:
                    if node.action is not None:
                        node.record = {**node.running, "started": False} if node.running else None
                        self._emit(Event(node.rank, Phase.JOIN, Progress.SKIPPED, "the head is not up"))
                return
            address, process = str(record["gcs"]).rpartition(":")[0], record["process"]
        await asyncio.gather(*(self._start(node, own, address, process) for node in others))

    async def _start(
        self, node: NodeState, own: LocalSoftware, head_address: str | None, head_process: str | None
    ) -> None:
        target, action, facts = node.target, node.action, node.facts
        if action is None or facts is None:
            return
        phase = Phase.HEAD if target.is_head else Phase.JOIN
        if action is Action.KEEP:
            node.record = {**facts["record"], "started": False}
            self._done(node, phase, "was up")
            return
        node.record = await self._ask(
            node,
            "start",
            phase,
            self.request.start_seconds,
            _CLEANING_SECONDS,
            **self._common(node),
            head=target.is_head,
            address=self._head_address(facts) if target.is_head else None,
            head_address=head_address,
            head_process=head_process,
            token=self._token,
            labels=target.labels,
            ports=target.ports._asdict(),
            fixed=list(target.ports.fixed(head=target.is_head)),
            spec=node.spec(own),
            restart=action is Action.RESTART,
            wait=self.request.wait_head,
            path=self.request.path,
            section=self.request.section,
            deadline=self.request.start_seconds,
            **{"from": f"{getpass.getuser()}@{socket.gethostname()}"},
        )
        if node.record is not None:
            self._done(node, phase, str(node.record["address"]))

    def _head_address(self, facts: Facts) -> str:
        """Return the head's own address: the file's, else that of its Ray, of ssh, or of its default route.

        A single-node cluster without a declared address uses loopback, since its drivers run on that node.
        """
        if self.request.head_address is None and len(self.request.nodes) == 1:
            return _LOOPBACK
        return address_of(facts, self.request.head_address)

    async def _verify(self) -> None:
        """Poll the head until it lists all started nodes."""
        up = [node for node in self._nodes if node.record is not None]
        if not up or (self.request.only is None and up[0] is not self._head):
            return
        # The head lists a slowly starting Ray late, so this phase has the same time limit as the start.
        seconds, ranks = self.request.start_seconds, [node.rank for node in up]
        for node in up[1:]:
            self._begin(node, Phase.VERIFY, seconds)
        members = await self._ask(
            up[0], "members", Phase.VERIFY, seconds, _QUERY_SECONDS, wanted=ranks, deadline=seconds
        )
        if members is not None:
            self._compare(up, members)

    def _compare(self, up: list[NodeState], members: Facts) -> None:
        alive = {str(member["rank"]): member for member in members["nodes"] if member["alive"]}
        dead = {str(member["rank"]): member for member in members["nodes"] if not member["alive"]}
        for node in up:
            rank, record = str(node.rank), node.record or {}
            if rank in alive:
                self._done(node, Phase.VERIFY, str(alive[rank]["address"]))
                continue
            why = f"it joined and died: {dead[rank]['reason']}" if rank in dead else members.get("fault") or ""
            message = "Ray was started, but its head does not list the node"
            help_text = f"run the command again; see {record.get('folder')}/up.log on the node"
            self._fail(NodeFailure(node.rank, node.target.name, Phase.VERIFY, message, why, help_text))
            node.record = None

    def _begin(self, node: NodeState, phase: Phase, deadline: float) -> None:
        node.phase = phase
        self._emit(Event(node.rank, phase, Progress.BEGUN, deadline=deadline))

    def _done(self, node: NodeState, phase: Phase, detail: str = "") -> None:
        node.phase = phase
        self._emit(Event(node.rank, phase, Progress.DONE, detail))

    def _fail(self, failure: NodeFailure) -> None:
        self._failures.append(failure)
        for node in self._nodes:
            if node.rank == failure.rank:
                node.phase = failure.phase
        self._emit(Event(failure.rank, failure.phase, Progress.FAILED, failure.message))

    def _save(self, before: ClusterRecord | None) -> None:
        request = self.request
        earlier = {node.rank: node for node in before.nodes} if before else {}
        states = {node.rank: node for node in self._nodes}
        head = self._head.record if self._head is not None else None
        ports = request.nodes[0].ports
        cluster_records.save(
            ClusterRecord(
                name=request.name,
                id=self._id,
                file=request.file,
                address=str(head["gcs"]) if head else before.address if before else "",
                authenticated=request.authenticated,
                ports=(ports.gcs, ports.last_data),
                nodes=tuple(_recorded(node, states.get(node.rank), earlier.get(node.rank)) for node in request.nodes),
                since=before.since if before else time.time(),
                synced=request.archive is not None,
                path=request.path,
                section=request.section,
            )
        )

    def _report(self) -> UpReport:
        outcomes: list[NodeOutcome] = []
        for node in self._nodes:
            target, record = node.target, node.record or {}
            started, address = bool(record.get("started")), record.get("address")
            up = node.record is not None
            outcomes.append(NodeOutcome(node.rank, target.host, target.groups, up, started, address, node.phase))
        up = [node.record for node in self._nodes if node.record is not None]
        failures = tuple(sorted(self._failures, key=lambda failure: failure.rank))
        address = str(up[0]["gcs"]) if up else ""
        return ClusterReport(self.request.name, tuple(outcomes), failures, time.monotonic() - self._begun, address)


def _recorded(node: NodeTarget, state: NodeState | None, before: RecordedNode | None) -> RecordedNode:
    """Return the entry of a node in the record: this run's facts, else the earlier entry's."""
    facts, record = (state.facts, state.record) if state is not None else (None, None)
    return RecordedNode(
        rank=node.rank,
        host=node.host,
        groups=node.groups,
        interpreter=node.interpreter,
        ssh=node.ssh.model_dump(mode="json"),
        address=record["address"] if record else before.address if before else None,
        folder=facts["folder"] if facts else before.folder if before else None,
        process=record["process"] if record else before.process if before else None,
        machine=facts["machine"] if facts else before.machine if before else None,
    )

"""Bringing the nodes up in parallel, the head first; each phase has a deadline and emits events.

probe every node -> decide -> start the head -> join the others -> verify on the head
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.node import node_probe
from rlinf_cli.cluster.phases import Emit, Event, NodeFailure, Phase, Progress
from rlinf_cli.cluster.plan import Action, NodeActions, Own, decide, refuse_other_nodes, spec_of
from rlinf_cli.cluster.transports.agent import AgentReply, ask
from rlinf_cli.cluster.transports.transport import CommandOutcome, Transport
from rlinf_core.node import cluster_records, node_facts
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode

# Seconds for a connected node to answer, and for Ray to come up on it.
PROBE_SECONDS: Final = 30.0
START_SECONDS: Final = 60.0
SYNC_SECONDS: Final = 120.0
# Extra seconds for the connection to a node.
_MARGIN_SECONDS: Final = 5.0
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class UpRequest:
    """The nodes to bring up, and the options.

    Attributes:
        name: the name of the cluster.
        file: the configuration file as named on the command line.
        path, section: its absolute path, and the digest of its cluster section; see `ClusterRecord`.
        nodes: all of its nodes, by rank.
        head_address: the address at which the nodes reach the head; None to detect it.
        authenticated: whether the cluster requires a token.
        only: the single node to start, which is this machine; None for all.
        wait_head: whether the head may come up after the others, as with nodes started by hand.
        token: the cluster's token, if it was given by the user.
        fingerprint: the fingerprint of the code on this machine; None to skip the comparison.
        start_seconds: time limit for Ray to start on a node.
        archive: code for the nodes, packed by `sync.archive`; None if they have it.
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


class UpReport(NamedTuple):
    """The result of `up`, node by node.

    Attributes:
        address: the address of the head's GCS, empty when it is not up.
        seconds: the duration, in seconds.
    """

    name: str
    address: str
    nodes: tuple[NodeOutcome, ...]
    failures: tuple[NodeFailure, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.failures


async def bring_up(request: UpRequest, transport: Transport, emit: Emit) -> UpReport:
    """Start the missing nodes; running nodes stay as they are, even if others fail.

    Raises:
        RLinfError: the running cluster contradicts the file, or another command is working on it.
    """
    # Nodes started by hand may share a home; the locks on their machines keep them apart.
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
        self._nodes = [node for node in request.nodes if request.only in (None, node.rank)]
        self._facts: dict[int, dict[str, Any]] = {}
        self._failures: list[NodeFailure] = []
        self._up: dict[int, dict[str, Any]] = {}
        self._phases: dict[int, Phase] = {node.rank: Phase.CONNECT for node in self._nodes}
        self._token: str | None = None

    async def run(self) -> UpReport:
        request = self.request
        before = cluster_records.load(request.name)
        refuse_other_nodes(before, request.name, request.nodes, alone=request.only is not None)
        await asyncio.gather(*(self._probe(node) for node in self._nodes))
        if request.authenticated:
            anyone = any(facts.get("record") for facts in self._facts.values())
            self._token = request.token or identity.token_of(request.name, fresh=before is None and not anyone)
            if request.token is not None and self._keeps_record:
                identity.keep_token(request.name, request.token)
        digest = node_facts.digest_of(self._token) if self._token else None
        auth = "token" if request.authenticated else "none"
        code = "of `--sync`" if request.archive is not None else "of the node"
        spec = {"num_nodes": len(request.nodes), "authentication": auth, "code": code}
        own = Own(await self._fingerprints(), digest, spec)
        decision = decide(self._nodes, self._facts, own)
        for failure in decision.failures:
            self._fail(failure)
        for rank in decision.actions:
            self._done(rank, Phase.PROBE)
        # Written before anything is started, so that `down` always knows where to look.
        if decision.actions and self._keeps_record:
            self._save(before)
        if request.archive is not None:
            await asyncio.gather(*(self._sync(node, decision) for node in self._nodes if node.rank in decision.actions))
        await self._start_all(decision, own)
        await self._verify()
        if decision.actions and self._keeps_record:
            self._save(before)
        elif before is None and request.only is None:
            cluster_records.forget(request.name)  # a token that no node has received
        return self._report()

    @property
    def _keeps_record(self) -> bool:
        """Whether this machine keeps the record. With nodes started by hand, the head's machine does."""
        return self.request.only in (None, 0)

    async def _fingerprints(self) -> frozenset[str] | None:
        """Fingerprints of the code on this machine, which may have been edited since the command began."""
        first = self.request.fingerprint
        if first is None:
            return None
        if all(facts["fingerprint"] == first for facts in self._facts.values()):
            return frozenset((first,))
        now = await asyncio.to_thread(node_probe.software, dict(os.environ))
        return frozenset((first, now["fingerprint"] or first))

    async def _probe(self, node: NodeTarget) -> None:
        connect = node.connect_seconds
        self._begin(node.rank, Phase.CONNECT, connect + PROBE_SECONDS)
        ports = node.ports.fixed(head=node.is_head)
        request = {**self._common(node), "verb": "probe", "ports": ports}

        def hello() -> None:
            self._done(node.rank, Phase.CONNECT)
            self._begin(node.rank, Phase.PROBE, PROBE_SECONDS)

        answer = await ask(
            self._transport, node, request, deadline=connect + PROBE_SECONDS + _MARGIN_SECONDS, on_hello=hello
        )
        if answer.data is not None:
            self._facts[node.rank] = answer.data
        else:
            self._fail(self._failure(node, self._phase_of(node.rank, answer), answer))

    def _phase_of(self, rank: int, answer: AgentReply) -> Phase:
        ran = answer.result.kind is CommandOutcome.DONE
        return Phase.PROBE if ran else self._phases[rank]

    def _common(self, node: NodeTarget) -> dict[str, Any]:
        return {
            "cluster": self._id,
            "name": self.request.name,
            "rank": node.rank,
            "env": dict(node.env),
            "code": self.request.archive is not None,
        }

    async def _sync(self, node: NodeTarget, decision: NodeActions) -> None:
        """Copy the code to the nodes; a node where this fails is not started."""
        self._begin(node.rank, Phase.SYNC, SYNC_SECONDS)
        request = {"verb": "sync", "cluster": self._id, "archive": self.request.archive}
        answer = await ask(
            self._transport, node, request, deadline=SYNC_SECONDS + node.connect_seconds + _MARGIN_SECONDS
        )
        if answer.data is not None:
            self._done(node.rank, Phase.SYNC, f"{answer.data['files']} files")
        else:
            decision.actions.pop(node.rank)
            self._fail(self._failure(node, Phase.SYNC, answer))

    async def _start_all(self, decision: NodeActions, own: Own) -> None:
        """Start the head, then all others, unless the head failed."""
        actions = dict(decision.actions)
        head = next((node for node in self._nodes if node.is_head), None)
        head_address = self.request.head_address
        head_process: str | None = None
        if head is not None:
            if head.rank in actions:
                await self._start(head, actions.pop(head.rank), own, None, None)
            record = self._up.get(head.rank)
            if record is None:
                self._skip(actions)
                return
            head_address, head_process = str(record["gcs"]).rpartition(":")[0], record["process"]
        others = [node for node in self._nodes if node.rank in actions]
        await asyncio.gather(
            *(self._start(node, actions[node.rank], own, head_address, head_process) for node in others)
        )

    def _skip(self, ranks: Mapping[int, Action]) -> None:
        for node in self._nodes:
            if node.rank in ranks:
                record = self._facts[node.rank].get("record")
                if record and record.get("alive"):
                    self._up[node.rank] = {**record, "started": False}
                self._emit(Event(node.rank, Phase.JOIN, Progress.SKIPPED, "the head is not up"))

    async def _start(
        self, node: NodeTarget, action: Action, own: Own, head_address: str | None, head_process: str | None
    ) -> None:
        facts = self._facts[node.rank]
        phase = Phase.HEAD if node.is_head else Phase.JOIN
        if action is Action.KEEP:
            self._up[node.rank] = {**facts["record"], "started": False}
            self._done(node.rank, phase, "was up")
            return
        seconds = self.request.start_seconds
        self._begin(node.rank, phase, seconds)
        request = {
            **self._common(node),
            "verb": "start",
            "head": node.is_head,
            "address": self._head_address(facts) if node.is_head else None,
            "head_address": head_address,
            "head_process": head_process,
            "token": self._token,
            "labels": node.labels,
            "ports": node.ports._asdict(),
            "fixed": list(node.ports.fixed(head=node.is_head)),
            "spec": spec_of(node, own),
            "restart": action is Action.RESTART,
            "wait": self.request.wait_head,
            "from": f"{getpass.getuser()}@{socket.gethostname()}",
            "path": self.request.path,
            "section": self.request.section,
            "deadline": seconds,
        }
        # Cleaning up after a dead Ray takes extra time.
        margin = _MARGIN_SECONDS + node.connect_seconds + 15.0
        answer = await ask(self._transport, node, request, deadline=seconds + margin)
        if answer.data is not None:
            self._up[node.rank] = answer.data
            self._done(node.rank, phase, str(answer.data["address"]))
        else:
            self._fail(self._failure(node, phase, answer))

    def _head_address(self, facts: Mapping[str, Any]) -> str:
        """Return the head's own address: from the file, else the one ssh reached, else that of its default route.

        A single-node cluster uses loopback: its drivers run on that node, and no other machine has to reach it.
        """
        if self.request.head_address is not None:
            return self.request.head_address
        if len(self.request.nodes) == 1:
            return _LOOPBACK
        login = facts.get("address")
        if login and not str(login).startswith(("127.", "::1")):
            return str(login)
        return str(facts["primary"])

    async def _verify(self) -> None:
        """Poll the head until it lists all started nodes."""
        if not self._up:
            return
        asked_node = next((node for node in self._nodes if node.rank in self._up), None)
        if asked_node is None or (self.request.only is None and 0 not in self._up):
            return
        # A Ray that starts slowly is listed late.
        seconds = self.request.start_seconds
        for rank in self._up:
            self._begin(rank, Phase.VERIFY, seconds)
        request = {
            "verb": "members",
            "cluster": self._id,
            "wanted": sorted(self._up),
            "deadline": seconds,
        }
        margin = _MARGIN_SECONDS + asked_node.connect_seconds + 20.0
        answer = await ask(self._transport, asked_node, request, deadline=seconds + margin)
        if answer.data is None:
            self._fail(self._failure(asked_node, Phase.VERIFY, answer))
            return
        self._compare(answer.data)

    def _compare(self, members: Mapping[str, Any]) -> None:
        alive = {str(member["rank"]): member for member in members["nodes"] if member["alive"]}
        dead = {str(member["rank"]): member for member in members["nodes"] if not member["alive"]}
        by_rank = {node.rank: node for node in self._nodes}
        for rank in sorted(self._up):
            if str(rank) in alive:
                self._done(rank, Phase.VERIFY, str(alive[str(rank)]["address"]))
                continue
            dead_member = dead.get(str(rank))
            why = f"it joined and died: {dead_member['reason']}" if dead_member else members.get("fault") or ""
            message = "Ray was started, but its head does not list the node"
            log = f"{self._up[rank]['folder']}/up.log"
            help_text = f"run the command again; see {log} on the node"
            self._fail(NodeFailure(rank, by_rank[rank].name, Phase.VERIFY, message, why, help_text))
            self._up.pop(rank)

    def _failure(self, node: NodeTarget, phase: Phase, answer: AgentReply) -> NodeFailure:
        return NodeFailure(
            node.rank, node.name, phase, answer.message, answer.why, answer.help, answer.rc, answer.lines
        )

    def _begin(self, rank: int, phase: Phase, deadline: float) -> None:
        self._phases[rank] = phase
        self._emit(Event(rank, phase, Progress.BEGUN, deadline=deadline))

    def _done(self, rank: int, phase: Phase, detail: str = "") -> None:
        self._phases[rank] = phase
        self._emit(Event(rank, phase, Progress.DONE, detail))

    def _fail(self, failure: NodeFailure) -> None:
        self._failures.append(failure)
        self._phases[failure.rank] = failure.phase
        self._emit(Event(failure.rank, failure.phase, Progress.FAILED, failure.message))

    def _save(self, before: ClusterRecord | None) -> None:
        request = self.request
        earlier_nodes = {node.rank: node for node in before.nodes} if before else {}
        head = self._up.get(0)
        ports = request.nodes[0].ports
        cluster_records.save(
            ClusterRecord(
                name=request.name,
                id=self._id,
                file=request.file,
                address=str(head["gcs"]) if head else before.address if before else "",
                authenticated=request.authenticated,
                ports=(ports.gcs, ports.last_data),
                nodes=tuple(self._recorded(node, earlier_nodes.get(node.rank)) for node in request.nodes),
                since=before.since if before else time.time(),
                synced=request.archive is not None,
                path=request.path,
                section=request.section,
            )
        )

    def _recorded(self, node: NodeTarget, before: RecordedNode | None) -> RecordedNode:
        facts, record = self._facts.get(node.rank), self._up.get(node.rank)
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

    def _report(self) -> UpReport:
        outcomes = tuple(
            NodeOutcome(
                node.rank,
                node.host,
                node.groups,
                node.rank in self._up,
                bool(self._up.get(node.rank, {}).get("started")),
                self._up.get(node.rank, {}).get("address"),
                self._phases[node.rank],
            )
            for node in self._nodes
        )
        head = self._up.get(0) or next(iter(self._up.values()), None)
        address = str(head["gcs"]) if head else ""
        failures = tuple(sorted(self._failures, key=lambda failure: failure.rank))
        return UpReport(self.request.name, address, outcomes, failures, time.monotonic() - self._begun)

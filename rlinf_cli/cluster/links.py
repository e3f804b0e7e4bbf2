"""The links between nodes that a job will use, and their quality."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, Final, NamedTuple

from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding, ProbedNode
from rlinf_cli.cluster.transports.agent import ask, command, script
from rlinf_cli.cluster.transports.transport import Transport
from rlinf_core.foreign.strict_json import load_json_object

# Seconds of sending on each link, and the limit after which a link counts as broken.
_PART_SECONDS: Final = 0.1
_LINK_SECONDS: Final = 20.0
# A gigabit Ethernet carries 117 MB/s.
_SLOW_BYTES: Final = 50e6
_LOOPBACK: Final = ("127.", "::1")


class NodeLink(NamedTuple):
    """A link between two nodes.

    Attributes:
        one: the rank of the connecting node.
        other: the rank of the listening node, the lower one.
        uses: its users: `Ray`, `actor`, `actor-env`.
    """

    one: int
    other: int
    uses: tuple[str, ...]


class Measured(NamedTuple):
    """A measured link.

    Attributes:
        fault: why it is broken, else None.
        latency: median round trip in seconds.
        bandwidth: bytes per second.
    """

    link: NodeLink
    fault: str | None
    latency: float = 0.0
    bandwidth: float = 0.0


def links_of(nodes_of: Mapping[str, Sequence[int]], num_nodes: int) -> list[NodeLink]:
    """Return the links to measure: Ray's between the head and every node, a ring within each component, and between two
    components as many as the larger has nodes, so that every node of both is covered.

    Args:
        nodes_of: the ranks of the nodes of each component.
        num_nodes: the number of nodes of the cluster.
    """
    uses: dict[tuple[int, int], list[str]] = {}

    def add(one: int, other: int, use: str) -> None:
        if one != other:
            names = uses.setdefault((max(one, other), min(one, other)), [])
            if use not in names:
                names.append(use)

    for rank in range(1, num_nodes):
        add(rank, 0, "Ray")
    for name, ranks in nodes_of.items():
        for one, other in pairwise([*ranks, *ranks[:1]]):
            add(one, other, name)
    for (a, first), (b, second) in combinations(nodes_of.items(), 2):
        for index in range(max(len(first), len(second)) if first and second else 0):
            add(first[index % len(first)], second[index % len(second)], f"{a}-{b}")
    return [NodeLink(one, other, tuple(names)) for (one, other), names in uses.items()]


def rounds_of(links: Sequence[NodeLink], most: int) -> list[list[NodeLink]]:
    """Return the links in rounds, in which no two links share a node.

    Args:
        links: the links.
        most: the maximum size of a round.
    """
    rounds: list[list[NodeLink]] = []
    busy: list[set[int]] = []
    for link in links:
        ends = {link.one, link.other}
        free = (index for index, taken in enumerate(busy) if not taken & ends and len(rounds[index]) < most)
        index = next(free, len(rounds))
        if index == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[index].append(link)
        busy[index] |= ends
    return rounds


def address_of(facts: Mapping[str, Any], declared: str | None = None) -> str:
    """Return the address at which others reach a node: from the file, its Ray, ssh, or its default route."""
    record: Mapping[str, Any] = facts.get("record") or {}
    login = facts.get("address")
    if declared is not None:
        return declared
    if record.get("alive") and record.get("address"):
        return str(record["address"])
    if login and not str(login).startswith(_LOOPBACK):
        return str(login)
    return str(facts["primary"])


class _Server:
    """A node that accepts measurements within the block."""

    def __init__(self, transport: Transport, probed: ProbedNode, address: str, secret: str) -> None:
        self._node = probed.node
        self._port: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        ports = probed.node.ports
        request = {
            "verb": "serve",
            "secret": secret,
            "address": address,
            "ports": [ports.first_data, ports.last_data],
            "deadline": _LINK_SECONDS,
        }
        self._task = asyncio.ensure_future(self._run(transport, request))

    async def _run(self, transport: Transport, request: dict[str, Any]) -> None:
        argv = command(self._node.interpreter)
        await transport.run(self._node, argv, script(request), deadline=2 * _LINK_SECONDS, on_line=self._heard)
        if not self._port.done():
            self._port.set_result(None)

    def _heard(self, line: bytes) -> None:
        try:
            port = load_json_object(line).get("port")
        except ValueError:
            return
        if isinstance(port, int) and not self._port.done():
            self._port.set_result(port)

    async def __aenter__(self) -> int | None:
        """Return the port that it listens on; None if it does not."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._port), _LINK_SECONDS)
        except TimeoutError:
            return None

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def measure(
    links: Sequence[NodeLink],
    probed: Mapping[int, ProbedNode],
    transport: Transport,
    *,
    seconds: float,
    head_address: str | None = None,
    most: int = 64,
) -> tuple[list[Measured], list[NodeLink]]:
    """Return the measured links, and those left for lack of time.

    Args:
        links: the links, between nodes of `probed` only.
        probed: the nodes by rank.
        transport: the transport to each of them.
        seconds: the seconds after which no further round starts.
        head_address: the head's address in the file.
        most: how many are measured concurrently; each needs two runs of the transport.
    """
    end = time.monotonic() + seconds
    results: list[Measured] = []
    unmeasured: list[NodeLink] = []
    for group in rounds_of(links, most):
        if time.monotonic() > end:
            unmeasured += group
            continue
        addresses = [address_of(probed[link.other].facts, head_address if link.other == 0 else None) for link in group]
        results += await asyncio.gather(
            *(_measure(link, probed, address, transport) for link, address in zip(group, addresses, strict=True))
        )
    return results, unmeasured


async def _measure(link: NodeLink, probed: Mapping[int, ProbedNode], address: str, transport: Transport) -> Measured:
    secret = secrets.token_hex(32)
    async with _Server(transport, probed[link.other], address, secret) as port:
        if port is None:
            return Measured(link, f"node {link.other} does not listen")
        request = {"verb": "measure", "secret": secret, "peer": [address, port], "seconds": _PART_SECONDS}
        answer = await ask(transport, probed[link.one].node, request, deadline=_LINK_SECONDS)
    if answer.data is None:
        return Measured(link, answer.message)
    fault = answer.data["fault"]
    if fault is not None:
        return Measured(link, f"{fault} at {address}:{port}")
    return Measured(link, None, float(answer.data["latency"]), float(answer.data["bandwidth"]))


def findings_of(
    measured: Sequence[Measured], unmeasured: Sequence[NodeLink], probed: Mapping[int, ProbedNode]
) -> list[Finding]:
    """Return a finding for each link."""
    findings = [_finding(link, probed) for link in measured]
    if unmeasured:
        what = f"{len(unmeasured)} of {len(unmeasured) + len(measured)} links were not measured for lack of time"
        findings.append(Finding("link", CheckVerdict.SKIPPED, what, help="allow more with `--link-seconds`"))
    return findings


def _finding(measured: Measured, probed: Mapping[int, ProbedNode]) -> Finding:
    link = measured.link
    where = f"{probed[link.one].node.name} - {probed[link.other].node.name}"
    uses = ", ".join(link.uses)
    data: dict[str, Any] = {"from": link.one, "to": link.other, "uses": list(link.uses)}
    if measured.fault is not None:
        help = "open `cluster.ports` between the machines, and check the address and the route between them"
        what = f"{measured.fault} ({uses})"
        return Finding("link", CheckVerdict.FAULT, what, None, where, help, {**data, "fault": measured.fault})
    data |= {"latency_seconds": measured.latency, "bytes_per_second": measured.bandwidth}
    what = f"{figures([measured.latency], [measured.bandwidth])} ({uses})"
    if measured.bandwidth < _SLOW_BYTES:
        help = "check the cable, the network card's speed and the choice of network (`RLINF_NET_IF`)"
        return Finding("link", CheckVerdict.WARNING, f"slow: {what}", None, where, help, data)
    return Finding("link", CheckVerdict.OK, what, None, where, "", data)


def figures(latencies: Sequence[float], bandwidths: Sequence[float]) -> str:
    """Return `0.05 ms, 1.6 GB/s`, or ranges of both."""

    def span(values: Sequence[float], unit: str) -> str:
        first, last = (f"{float(f'{value:.2g}'):g}" for value in (min(values), max(values)))
        return f"{first} {unit}" if first == last else f"{first}-{last} {unit}"

    fast = max(bandwidths) >= 1e9
    return (
        f"{span([seconds * 1e3 for seconds in latencies], 'ms')}, "
        f"{span([rate / (1e9 if fast else 1e6) for rate in bandwidths], 'GB/s' if fast else 'MB/s')}"
    )

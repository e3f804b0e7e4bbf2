"""The links between nodes that a job will use, and their quality."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, Final, NamedTuple

from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding, ProbedNode
from rlinf_cli.cluster.inventory import address_of
from rlinf_cli.cluster.transports.agent import ask, command, script
from rlinf_cli.cluster.transports.transport import Transport
from rlinf_core.foreign.strict_json import load_json_object

# Seconds of each part of a measurement, and the limit after which a link counts as broken.
_PART_SECONDS: Final = 0.1
_LINK_SECONDS: Final = 20.0
# A gigabit Ethernet carries 117 MB/s.
_SLOW_BYTES: Final = 50e6


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
    """Return the links to measure.

    They are Ray's links between the head and every node, a ring within each component, and between two components as
    many links as the larger has nodes, so that every node of both is covered.
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


async def measure(
    links: Sequence[NodeLink],
    probed: Mapping[int, ProbedNode],
    transport: Transport,
    *,
    seconds: float,
    head_address: str | None = None,
    most: int = 64,
) -> tuple[list[Measured], list[NodeLink]]:
    """Return the measured links, and those left for lack of time. A node's links are measured one at a time.

    Args:
        links: the links, between nodes of `probed` only.
        seconds: the seconds after which no further measurement starts.
        most: the maximum number of concurrent measurements; each needs two runs of the transport.
    """
    end = time.monotonic() + seconds
    free = {rank: asyncio.Lock() for rank in probed}
    places = asyncio.Semaphore(most)

    async def one(link: NodeLink) -> Measured | None:
        # Locking the lower rank first avoids a deadlock between two links.
        async with free[link.other], free[link.one], places:
            if time.monotonic() > end:
                return None
            address = address_of(probed[link.other].facts, head_address if link.other == 0 else None)
            return await _measure(link, probed, address, transport)

    results = await asyncio.gather(*map(one, links))
    unmeasured = [link for link, result in zip(links, results, strict=True) if result is None]
    return [result for result in results if result is not None], unmeasured


async def _measure(link: NodeLink, probed: Mapping[int, ProbedNode], address: str, transport: Transport) -> Measured:
    secret, server = secrets.token_hex(32), probed[link.other].node
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def heard(line: bytes) -> None:
        try:
            number = load_json_object(line).get("port")
        except ValueError:
            return
        if isinstance(number, int) and not port.done():
            port.set_result(number)

    request: dict[str, Any] = {
        "verb": "serve",
        "secret": secret,
        "address": address,
        "ports": [server.ports.first_data, server.ports.last_data],
        "deadline": _LINK_SECONDS,
    }
    argv = command(server.interpreter)
    serving = asyncio.ensure_future(
        transport.run(server, argv, script(request), deadline=2 * _LINK_SECONDS, on_line=heard)
    )
    try:
        await asyncio.wait({serving, port}, timeout=_LINK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not port.done():
            return Measured(link, f"node {link.other} does not listen")
        request = {"verb": "measure", "secret": secret, "peer": [address, port.result()], "seconds": _PART_SECONDS}
        answer = await ask(transport, probed[link.one].node, request, deadline=_LINK_SECONDS)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    if answer.data is None:
        return Measured(link, answer.message)
    fault = answer.data["fault"]
    if fault is not None:
        return Measured(link, f"{fault} at {address}:{port.result()}")
    return Measured(link, None, float(answer.data["latency"]), float(answer.data["bandwidth"]))


def findings_of(
    measured: Sequence[Measured], unmeasured: Sequence[NodeLink], probed: Mapping[int, ProbedNode]
) -> list[Finding]:
    """Return a finding for each measured link, and one for the unmeasured links."""
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
    """Return latency and bandwidth in words, as in `0.05 ms, 1.6 GB/s`, or the ranges of both."""

    def span(values: Sequence[float], unit: str) -> str:
        first, last = (f"{float(f'{value:.2g}'):g}" for value in (min(values), max(values)))
        return f"{first} {unit}" if first == last else f"{first}-{last} {unit}"

    fast = max(bandwidths) >= 1e9
    return (
        f"{span([seconds * 1e3 for seconds in latencies], 'ms')}, "
        f"{span([rate / (1e9 if fast else 1e6) for rate in bandwidths], 'GB/s' if fast else 'MB/s')}"
    )

"""Checks of the nodes' accelerators, robots and cameras against the declared ones."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, combinations, pairwise, repeat
from typing import Any, Final, NamedTuple

from rlinf_cli.cluster.inventory import NodeTarget, address_of
from rlinf_cli.cluster.node.node_requests import ask, command, script
from rlinf_cli.cluster.transport import Transport
from rlinf_core.config.ranks import format_ranks
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.hardware.robots import RobotUnit
from rlinf_core.topology import NodeInfo

MIB: Final = 1 << 20
GIB: Final = 1 << 30


class CheckVerdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """It works, but is slow or surprising."""
    FAULT = "fault"
    """A job would not start, or would not run as configured."""
    UNREACHABLE = "unreachable"
    """The node could not be probed."""
    SKIPPED = "not checked"


OK, WARNING, FAULT, SKIPPED = CheckVerdict.OK, CheckVerdict.WARNING, CheckVerdict.FAULT, CheckVerdict.SKIPPED


class Said(NamedTuple):
    """A rule's result for a node: the verdict, the observation, the remedy, and figures for programs."""

    verdict: CheckVerdict
    what: str
    help: str = ""
    data: Mapping[str, Any] = {}


class Finding(NamedTuple):
    """A finding, one line of the report.

    Attributes:
        check: the check, as in `clock`.
        rank: the node, or None for the whole cluster or a pair of nodes.
        help: the remedy; may be empty.
        data: figures, for programs.
    """

    check: str
    verdict: CheckVerdict
    what: str
    rank: int | None = None
    where: str = "cluster"
    help: str = ""
    data: Mapping[str, Any] = {}


class ProbedNode(NamedTuple):
    """A node that answered.

    Attributes:
        facts: its facts; see `node_probe.inspect`.
        asked, heard: the times of the request and the reply, by this machine's clock.
    """

    node: NodeTarget
    facts: Mapping[str, Any]
    asked: float
    heard: float

    def finding(self, check: str, said: Said) -> Finding:
        """Return a finding about this node."""
        return Finding(check, said.verdict, said.what, self.node.rank, self.node.name, said.help, said.data)


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings without duplicates, which several interpreters of a node may cause."""
    return list({finding[:6]: finding for finding in findings}.values())


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings shared by several nodes, as of `nodes 0-7`; the order of the checks is kept."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for item in findings:
        place = "" if item.rank is not None else item.where
        groups.setdefault((item.check, item.verdict, item.what, item.help, place), []).append(item)
    return [_of_all(group) for group in groups.values()]


def _of_all(group: Sequence[Finding]) -> Finding:
    ranks = sorted(item.rank for item in group if item.rank is not None)
    return group[0] if len(ranks) < 2 else group[0]._replace(where=f"nodes {format_ranks(ranks)}")


def size(count: float) -> str:
    """Return a number of bytes in words, as in `512 MiB` or `3.2 GiB`."""
    return f"{count / MIB:.0f} MiB" if count < GIB else f"{count / GIB:.1f} GiB"


_PACKAGE: Final = {"realsense": "pyrealsense2", "zed": "pyzed"}


def judged(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Return the findings about the accelerators, robots and cameras of the nodes."""
    return [
        *(machine.finding("accelerators", _accelerators(machine)) for machine in probed),
        *(machine.finding("robot", said) for machine in probed for said in _robots(machine)),
        *(machine.finding("camera", said) for machine in probed for said in _cameras(machine)),
    ]


def _accelerators(machine: ProbedNode) -> Said:
    """Check the number of accelerators, and their model if the system reports one."""
    declared, reply = machine.node.accelerators, machine.facts["accelerators"]
    if "found" not in reply:
        if machine.facts["fingerprint"] is None:
            return Said(SKIPPED, "not checked, because rlinf is not installed there")
        return Said(SKIPPED if declared is None else FAULT, reply["fault"])
    models: list[str | None] = reply["found"]["models"]
    what, data = found_text(reply), {"found": len(models), "models": models}
    if declared is None:
        return Said(OK, what, "", data)
    data["declared"] = declared.per_node
    if len(models) != declared.per_node:
        named = f" {declared.model}" if declared.model else ""
        count_text = f"{len(models)} of" if models else "no accelerator found,"
        message = f"{count_text} {declared.per_node} declared{named}" + (" were found" if models else "")
        help = "fix the node, or correct `accelerators.per_node` of its group; a visibility variable may hide some"
        return Said(FAULT, message, help, data)
    wanted = _folded(declared.model or "")
    others = sorted({model for model in models if model and wanted not in _folded(model)})
    if wanted and others:
        message = f"{declared.model} is declared, {', '.join(others)} was found"
        return Said(FAULT, message, "correct `accelerators.model` of its group", data)
    return Said(OK, f"{what}, as declared", "", data)


def _folded(model: str) -> str:
    """Return a model name without case and separators, so that `RTX 4090` matches `NVIDIA GeForce RTX-4090`."""
    return "".join(filter(str.isalnum, model.casefold()))


def found_text(reply: Any) -> str:
    """Return the accelerators in words, as in `8 NVIDIA (A800)`, or why they are unknown."""
    if "found" not in reply:
        return f"unknown: {reply['fault']}"
    models = reply["found"]["models"]
    if not models:
        return "no accelerator found"
    names = ", ".join(sorted({model for model in models if model}))
    return f"{len(models)} {reply['found']['type']}" + (f" ({names})" if names else "")


def node_info(probed: ProbedNode) -> NodeInfo:
    """Return the `NodeInfo` of a node that answered, with its accelerators if known."""
    node = NodeInfo(probed.node.rank)
    reply = probed.facts["accelerators"].get("found")
    if reply is None:
        return node
    models: list[str | None] = reply["models"]
    if not models:
        return node._replace(num_accelerators=0)
    return node._replace(num_accelerators=len(models), accelerator_type=reply["type"], accelerator_model=models[0])


def _robots(machine: ProbedNode) -> Iterator[Said]:
    """Check that each declared robot answers on its node."""
    answers = {(host, port): fault for host, port, fault in machine.facts["robots"]}
    for kind, unit in machine.node.robots:
        if getattr(unit, "disable_validate", False):
            yield Said(SKIPPED, f"{kind}: `disable_validate` is set")
            continue
        for address, node in zip(unit.addresses(), chain(unit.controller_nodes(), repeat(None)), strict=False):
            yield _robot(kind, "{}:{}".format(*address), answers.get(address, "not checked"), node)


def _robot(kind: str, address: str, fault: str | None, controller_node: int | None) -> Said:
    """Return the result for one controller; `controller_node` is the node that runs it, if the file names one."""
    data = {"type": kind, "address": address, "fault": fault, "controller_node_rank": controller_node}
    at_node = "" if controller_node is None else f" on node {controller_node}"
    robot = f"{kind} at {address}{f', controller{at_node},' if at_node else ''}"
    if fault is None:
        return Said(OK, f"{robot} answers", "", data)
    help = (
        f"switch on the robot and its controller{at_node}, and check the cable, `robot_ip` and the node's route to it"
    )
    return Said(FAULT, f"{robot.removesuffix(',')}: {fault}", help, data)


def _cameras(machine: ProbedNode) -> Iterator[Said]:
    """Check that each declared camera is plugged in, if the vendor's package is installed."""
    for make, serials in cameras_of(unit for _, unit in machine.node.robots).items():
        reply = machine.facts["cameras"].get(make) or {"fault": "not checked"}
        named, package = f"{make} {', '.join(serials)}", _PACKAGE.get(make, make)
        missing = [serial for serial in serials if serial not in {str(serial) for serial in reply.get("found", ())}]
        if "ModuleNotFoundError" in reply.get("fault", ""):
            yield Said(SKIPPED, f"{named}: `{package}` is not installed there, so it was not checked")
        elif "found" not in reply:
            yield Said(FAULT, f"{named}: {reply['fault']}", f"repair `{package}`")
        elif not missing:
            yield Said(OK, f"{named} {'are' if len(serials) > 1 else 'is'} plugged in")
        else:
            others = ", ".join(sorted({str(serial) for serial in reply["found"]} - set(serials))) or "none"
            are = "are" if len(missing) > 1 else "is"
            what = f"{make} {', '.join(missing)} {are} not plugged in; others there: {others}"
            yield Said(FAULT, what, "plug it in, or correct `camera_serials`")


def cameras_of(units: Iterable[RobotUnit]) -> dict[str, tuple[str, ...]]:
    """Return the declared serial numbers of a node's cameras, by make."""
    serials_by_make: dict[str, tuple[str, ...]] = {}
    for unit in units:
        for make, serial in unit.cameras():
            serials_by_make[make] = (*serials_by_make.get(make, ()), serial)
    return serials_by_make


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

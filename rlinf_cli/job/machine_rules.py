"""Rules for the machines: hosts, the head's address, the ports, hardware without units."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.machines.hosts import expand_hosts
from rlinf_core.config.ranks import format_range, intersect, merge_ranges, subtract
from rlinf_core.config.rules.groups import CLUSTER, Site, group_ranges
from rlinf_core.config.source import Span
from rlinf_core.config.tree import Path, ScalarNode, SequenceNode, find

# Linux uses these for outgoing connections by default.
_EPHEMERAL: Final = range(32768, 61000)
_LOOPBACK: Final = ("localhost", "::1")


def check(site: Site) -> None:
    _hosts(site)
    _head(site)
    _ports(site)
    _empty_hardware(site)


def _empty_hardware(site: Site) -> None:
    for path, group in site.groups():
        configs = (*path, "hardware", "configs")
        if group.hardware is not None and not group.hardware.configs and not site.damaged(configs):
            site.report(
                "hardware-empty",
                f"group `{group.label}` declares hardware but no units",
                configs,
                help="add an entry for each unit, or remove `hardware` to count accelerators or nodes",
                severity=Severity.WARNING,
            )


def _hosts(site: Site) -> None:
    hosts_path: Path = (*CLUSTER, "hosts")
    with_hosts = [(path, group) for path, group in site.groups() if group.hosts]
    if site.cluster.hosts and with_hosts:
        first = (*with_hosts[0][0], "hosts")
        site.report(
            "hosts-twice",
            "hosts are set both for the cluster and for its groups",
            hosts_path,
            span=site.key(hosts_path),
            help="keep only one: the groups' hosts or the cluster's",
            related=[(site.key(first), "a group's hosts are set at")],
        )
    elif site.cluster.hosts:
        count = site.num_nodes
        if count is not None and not site.damaged(hosts_path) and len(site.cluster.hosts) != count:
            _count(site, hosts_path, len(site.cluster.hosts), count, "`num_nodes` is")
            return
        _assign(site, [(hosts_path, site.cluster.hosts, [range(len(site.cluster.hosts))])])
        return
    claims: list[tuple[Path, tuple[str, ...], Sequence[range]]] = []
    for path, group in with_hosts:
        hosts = (*path, "hosts")
        if site.damaged(hosts) or site.damaged((*path, "node_ranks")):
            continue
        nodes = group_ranges(site, group.node_ranks)
        if group.node_ranks.ranges is None and site.num_nodes is None:
            continue
        size = sum(map(len, nodes))
        if len(group.hosts) != size:
            subject = f"the number of node_ranks of group `{group.label}` is"
            _count(site, hosts, len(group.hosts), size, subject, _shared(site, path, nodes))
        else:
            claims.append((hosts, group.hosts, nodes))
    _assign(site, claims)
    judged = len(claims) == len(with_hosts) and not any(site.damaged((*path, "hosts")) for path, _ in site.groups())
    if with_hosts and judged and not site.cluster.hosts:
        _without_host(site, [piece for _, _, nodes in claims for piece in nodes])


def _shared(site: Site, path: Path, nodes: Sequence[range]) -> str:
    """Return which nodes of a group are in other groups, too, as the end of a remedy."""
    for other, group in site.groups():
        shared = () if other == path else intersect(merge_ranges(nodes), group_ranges(site, group.node_ranks))
        if shared:
            plural, listed = "s" * (sum(map(len, shared)) > 1), ",".join(map(format_range, shared))
            verb = "overlap" if plural else "overlaps"
            return f"; node{plural} {listed} of `node_ranks` {verb} with group `{group.label}`"
    return ""


def _count(site: Site, path: Path, count: int, wanted: int, subject: str, overlap: str = "") -> None:
    site.report(
        "hosts-count",
        f"{count} host{'' if count == 1 else 's'} for {wanted} node{'' if wanted == 1 else 's'}",
        path,
        help=f"{subject} {wanted}; list one host per node, in rank order{overlap}",
    )


def _assign(site: Site, claims: list[tuple[Path, tuple[str, ...], Sequence[range]]]) -> None:
    places = _Places(site)
    host_of: dict[int, tuple[str, Path, int]] = {}
    node_of: dict[str, tuple[int, Path, int]] = {}
    for path, hosts, nodes in claims:
        ranks = (rank for piece in nodes for rank in piece)
        for number, (rank, host) in enumerate(zip(ranks, hosts, strict=True)):
            known_host, first, at = host_of.setdefault(rank, (host, path, number))
            if known_host != host:
                site.report(
                    "host-conflict",
                    f"node {rank} is `{host}` here and `{known_host}` in another group",
                    path,
                    span=places.of(path, number),
                    help="groups that share a node must name the same host for it",
                    related=[(places.of(first, at), "the other host is set at")],
                )
                continue
            known_rank, first, at = node_of.setdefault(host, (rank, path, number))
            if known_rank != rank:
                site.report(
                    "duplicate-host",
                    f"`{host}` is node {known_rank} and node {rank}",
                    path,
                    span=places.of(path, number),
                    help="every node must be a separate machine",
                    related=[(places.of(first, at), "first given at")],
                )


class _Places:
    """The span of host number N of a value; in a list, of the item that names it and maybe others."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._starts: dict[Path, list[int]] = {}

    def of(self, path: Path, number: int) -> Span:
        node = find(self._site.view.tree, path)
        if not isinstance(node, SequenceNode):
            return self._site.place(path)
        if path not in self._starts:
            sizes = (len(expand_hosts(item.raw)) for item in node.items if isinstance(item, ScalarNode))
            self._starts[path] = list(accumulate(sizes, initial=0))
        return self._site.place((*path, bisect_right(self._starts[path], number) - 1))


def _without_host(site: Site, covered: list[range]) -> None:
    """Warn about nodes without a host where others have one: `rlinf up` cannot start them."""
    count = site.num_nodes
    if count is None:
        return
    missing = subtract((range(count),), merge_ranges(covered))
    if missing:
        number = sum(map(len, missing))
        site.report(
            "node-without-host",
            f"other nodes have a host, node{'' if number == 1 else 's'} {','.join(map(format_range, missing))} not",
            (*CLUSTER, "num_nodes"),
            help="`rlinf up` starts only nodes that have a host; put the others into a group with `hosts`",
            severity=Severity.WARNING,
        )


def _head(site: Site) -> None:
    address = site.cluster.head_address
    count = site.num_nodes
    if address is None or count is None or count == 1:
        return
    if address in _LOOPBACK or address.startswith("127."):
        site.report(
            "head-address-local",
            f"other nodes cannot reach the head at `{address}`",
            (*CLUSTER, "head_address"),
            help="set the address at which the other nodes reach node 0",
        )


def _ports(site: Site) -> None:
    ports = site.cluster.ports
    path: Path = (*CLUSTER, "ports")
    if find(site.view.tree, path) is not None and ports.start < _EPHEMERAL.stop and ports.stop > _EPHEMERAL.start:
        site.report(
            "ports-ephemeral",
            f"ports {format_range(_EPHEMERAL)} are used for outgoing connections: any of them may be taken",
            path,
            help="choose ports below 32768",
            severity=Severity.WARNING,
        )

"""Rules for `hardware`, the robots that groups declare, and for spare nodes; and assumed accelerators of nodes that are
not probed: `--assume a800=8`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.sections.cluster import (
    MAX_ACCELERATORS_PER_NODE,
    ClusterConfig,
    NodeGroup,
    groups_of,
    has_robots,
    replaceable,
)
from rlinf_core.config.sections.group_rules import CLUSTER, Site, group_ranges, out_of_range, outside
from rlinf_core.config.tree import Path
from rlinf_core.errors import ConfigError
from rlinf_core.hardware.robots import UNKNOWN_TYPE, RobotUnit, variable_of
from rlinf_core.suggest import did_you_mean, quoted

_ASSUMPTION = re.compile(r"(?:(?P<label>[^:,\s]+)=)?(?P<count>[0-9]+)(?:x(?P<model>\S.*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Assumption:
    """`--assume a800=8xA800`: assumed accelerators of a group's nodes (None: every node)."""

    label: str | None
    count: int
    model: str | None = None


def parse_assumption(text: str) -> Assumption:
    """Read `8`, `a800=8` or `a800=8xA800`.

    Raises:
        ConfigError: `text` has none of these forms, or exceeds the maximum per node.
    """
    match = _ASSUMPTION.fullmatch(text.strip())
    if match is None:
        help = "write `8` (on every node), `a800=8` (on the nodes of group `a800`) or `a800=8xA800` (with the model)"
        raise ConfigError(f"`{text}` does not give a number of accelerators per node", where="--assume", help=help)
    digits = match["count"].lstrip("0") or "0"
    if len(digits) > len(str(MAX_ACCELERATORS_PER_NODE)) or int(digits) > MAX_ACCELERATORS_PER_NODE:
        raise ConfigError(f"a node has at most {MAX_ACCELERATORS_PER_NODE} accelerators", where="--assume")
    label = None if match["label"] == "cluster" else match["label"]
    return Assumption(label, int(digits), match["model"])


def assumed(text: str, cluster: ClusterConfig) -> Assumption:
    """Read an assumption about a cluster; see `parse_assumption`.

    Raises:
        ConfigError: the assumption is invalid or names no group of the cluster.
    """
    assumption, labels = parse_assumption(text), [group.label for group in cluster.node_groups]
    if assumption.label is not None and assumption.label not in labels:
        known = f"the groups are {quoted(labels)}" if labels else "the file has no node groups: write only the number"
        help = did_you_mean(assumption.label, labels) or known
        raise ConfigError(f"node group `{assumption.label}` does not exist", where="--assume", help=help)
    return assumption


def accelerator_claims(
    cluster: ClusterConfig, assume: Sequence[str]
) -> Iterator[tuple[NodeGroup | None, int, str | None]]:
    """Yield the claims on the accelerators of nodes (None: all nodes), in order of precedence.

    An assumed number keeps the declared model of a group.

    Raises:
        ConfigError: an assumption is invalid or names no group of the cluster.
    """
    assumptions = [assumed(text, cluster) for text in assume][::-1]
    for assumption in assumptions:
        for group in cluster.node_groups:
            if group.label == assumption.label:
                declared = group.accelerators.model if group.accelerators else None
                yield group, assumption.count, assumption.model or declared
    for group in cluster.node_groups:
        if group.accelerators is not None:
            yield group, group.accelerators.per_node, group.accelerators.model
    for assumption in assumptions:
        if assumption.label is None:
            yield None, assumption.count, assumption.model


# A device file, or an address of the node itself, possibly of a URL.
_OF_A_NODE: Final = re.compile(r"(\w+://)?(/dev/|localhost\b|127\.|\[?::1(?![:0-9a-f]))")


def check(site: Site) -> None:
    exclusive: dict[tuple[str, str], tuple[str, Path]] = {}
    declared: dict[tuple[int, str], Path] = {}
    alike: dict[tuple[Path, type[RobotUnit], str], Path] = {}
    for path, group in site.groups():
        for index, unit in enumerate(group.hardware.configs if group.hardware else ()):
            at: Path = (*path, "hardware", "configs", index)
            _nodes(site, path, group, at, unit)
            if group.hardware and group.hardware.type != UNKNOWN_TYPE:
                _of_one_group(site, group.hardware.type, (*at, "node_rank"), unit, declared)
            _exclusive(site, at, unit, exclusive)
            _repeated(site, at, unit, alike)
    _check_spares(site)


def _nodes(site: Site, path: Path, group: NodeGroup, at: Path, unit: RobotUnit) -> None:
    """Report a unit's nodes outside the cluster, and a `node_rank` outside its group; a controller may be elsewhere."""
    nodes = None if site.damaged((*path, "node_ranks")) else group_ranges(site, group.node_ranks)
    count = site.num_nodes
    for field in ("node_rank", *type(unit).node_ranks):
        node: int | None = getattr(unit, field)
        if node is None or site.damaged((*at, field)):
            continue
        rank = range(node, node + 1)
        if count is not None and node >= count:
            out_of_range(site, (*at, field), rank, site.place((*at, field)))
        elif field == "node_rank" and nodes is not None and outside(rank, nodes) is not None:
            message = f"node {node} is not in group `{group.label}`"
            help = f"the group's node_ranks are {group.node_ranks}"
            related = [(site.place((*path, "node_ranks")), "they are set at")]
            site.report("hardware-outside-group", message, (*at, field), help=help, related=related)


def _of_one_group(site: Site, kind: str, at: Path, unit: RobotUnit, declared: dict[tuple[int, str], Path]) -> None:
    """Report a unit on a node for which another group declares units of the same type."""
    first = at if site.damaged(at) else declared.setdefault((unit.node_rank, kind), at)
    if first[:3] != at[:3]:
        message = f"two groups declare {kind} hardware on node {unit.node_rank}"
        help = "declare all units of a type on a node in one group"
        related = [(site.place(first), "the other group declares it at")]
        site.report("hardware-in-two-groups", message, at, help=help, related=related)


def _exclusive(site: Site, at: Path, unit: RobotUnit, used: dict[tuple[str, str], tuple[str, Path]]) -> None:
    """Report values used twice that must be unique: the address of an arm, the serial of a camera."""
    for field in type(unit).exclusive:
        value: object = getattr(unit, field)
        several = isinstance(value, tuple | list)
        singles: list[object] = [*value] if isinstance(value, tuple | list) else [value]
        for index, single in enumerate(singles):
            path = (*at, field, index) if several else (*at, field)
            if single is None or site.damaged(path):
                continue
            meant = _folded(str(single))
            is_variable = field in type(unit).variables and variable_of(meant) is not None
            if is_variable or _OF_A_NODE.match(meant):
                meant = f"{meant} of node {unit.node_rank}"  # each node has its own
            as_first, first = used.setdefault((_kind(field), meant), (field, path))
            if first != path:
                how = f"twice as `{field}`" if as_first == field else f"as `{as_first}` and as `{field}`"
                message = f"`{single}` is used {how}"
                help = "it must be unique"
                site.report("hardware-shared", message, path, help=help, related=[(site.place(first), "first set at")])


def _kind(field: str) -> str:
    """Return the kind of a field without its prefix: `left_robot_ip` holds a `robot_ip`."""
    side, _, rest = field.partition("_")
    return rest if side in ("left", "right", "base") and rest else field


def _folded(text: str) -> str:
    """Return a canonical spelling of an address; other texts unchanged."""
    if ":" not in text:
        return text
    # Imported here: only IPv6 addresses have several spellings.
    from ipaddress import ip_address

    try:
        return str(ip_address(text))
    except ValueError:
        return text


def _repeated(site: Site, at: Path, unit: RobotUnit, alike: dict[tuple[Path, type[RobotUnit], str], Path]) -> None:
    """Report a unit without unique values that its group declares twice."""
    if any(getattr(unit, field) for field in type(unit).exclusive) or site.damaged(at):
        return
    first = alike.setdefault((at[:-1], type(unit), unit.model_dump_json()), at)
    if first != at:
        message = "this unit is declared twice"
        help = "remove one of them"
        site.report("hardware-shared", message, at, help=help, related=[(site.place(first), "first declared at")])


_PATH: Path = (*CLUSTER, "spare_nodes")


def _check_spares(site: Site) -> None:
    cluster, count = site.cluster, site.num_nodes
    if not cluster.spare_nodes or count is None or site.damaged(_PATH):
        return
    if cluster.spare_nodes >= count:
        message = f"{cluster.spare_nodes} of {count} nodes are spares: none is left for the job"
        help = f"`num_nodes` includes the spares: did you mean `num_nodes: {count + cluster.spare_nodes}`?"
        related = [(site.place((*CLUSTER, "num_nodes")), "`num_nodes` is set at")]
        site.report("spare-nodes-count", message, _PATH, help=help, related=related)
        return
    if any(site.damaged(path) or site.damaged((*path, "node_ranks")) for path, _ in site.groups()):
        return
    useless = [rank for rank in cluster.spare_ranks if not replaceable(cluster, rank)]
    if useless:
        several = len(useless) > 1
        site.report(
            "spare-cannot-serve",
            f"node{'s' * several} {format_ranks(useless)} {'are spares' if several else 'is a spare'}, and can replace"
            f" no node: {_reason(site, useless[0])}",
            _PATH,
            help=_help(site, useless),
        )


def _reason(site: Site, spare: int) -> str:
    cluster, labels = site.cluster, groups_of(site.cluster, spare)
    if has_robots(cluster, spare):
        return "a robot is on it"
    alike = [rank for rank in range(cluster.num_active_nodes) if groups_of(cluster, rank) == labels]
    where = f"in {quoted(sorted(labels))}" if labels else "without a group"
    if not alike:
        return f"no other node is {where}"
    if alike == [0]:
        return f"the only other node {where} is 0, the head, with which the whole cluster ends"
    return f"the other nodes {where} have robots"


def _help(site: Site, useless: list[int]) -> str:
    cluster = site.cluster
    last = cluster.num_nodes - 1
    spares = f"{cluster.spare_ranks[0]}-{last}" if len(cluster.spare_ranks) > 1 else str(last)
    taken = f"the spares are the last ranks, {spares}"
    able = [rank for rank in range(1, cluster.num_active_nodes) if not has_robots(cluster, rank)]
    labels = groups_of(cluster, able[0]) if able else frozenset[str]()
    if labels:
        return f"{taken}; list it in `node_ranks` of {quoted(sorted(labels))}, and there only, as node {able[0]} is"
    if able:
        return f"{taken}; leave it out of all groups, as node {able[0]} is"
    return f"{taken}, and only a node other than 0 and without robots can be replaced: remove `spare_nodes`"

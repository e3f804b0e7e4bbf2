"""Rules for `hardware`: the robots that groups declare."""

from __future__ import annotations

from rlinf_core.config.machines.cluster import NodeGroup
from rlinf_core.config.rules.groups import group_ranges, out_of_range
from rlinf_core.config.rules.site import Site, outside
from rlinf_core.config.tree import Path
from rlinf_core.hardware.robots.registry import UNKNOWN_TYPE
from rlinf_core.hardware.robots.unit import RobotUnit, variable_of


def check(site: Site) -> None:
    exclusive: dict[tuple[str, str], tuple[str, Path]] = {}
    declared: dict[tuple[int, str], Path] = {}
    for path, group in site.groups():
        if group.hardware is None:
            continue
        configs = (*path, "hardware", "configs")
        _nodes(site, path, group, declared)
        _further_nodes(site, (*path, "hardware", "configs"), group.hardware.configs)
        for index, unit in enumerate(group.hardware.configs):
            _exclusive(site, (*configs, index), unit, exclusive)
        _repeated(site, configs, group.hardware.configs)


def _nodes(site: Site, path: Path, group: NodeGroup, declared: dict[tuple[int, str], Path]) -> None:
    """Report units outside the cluster or the group, and nodes whose units two groups declare."""
    if group.hardware is None:
        return
    nodes = None if site.damaged((*path, "node_ranks")) else group_ranges(site, group.node_ranks)
    count = site.num_nodes
    for index, unit in enumerate(group.hardware.configs):
        at: Path = (*path, "hardware", "configs", index, "node_rank")
        if site.damaged(at):
            continue
        rank = range(unit.node_rank, unit.node_rank + 1)
        if count is not None and unit.node_rank >= count:
            out_of_range(site, at, rank, site.place(at))
        elif nodes is not None and outside(rank, nodes) is not None:
            site.report(
                "hardware-outside-group",
                f"node {unit.node_rank} is not in group `{group.label}`",
                at,
                help=f"the group's node_ranks are {group.node_ranks}",
                related=[(site.place((*path, "node_ranks")), "they are set at")],
            )
        if group.hardware.type == UNKNOWN_TYPE:
            continue
        key = (unit.node_rank, group.hardware.type)
        first = declared.setdefault(key, at)
        if first[:3] != at[:3]:
            site.report(
                "hardware-in-two-groups",
                f"two groups declare {group.hardware.type} hardware on node {unit.node_rank}",
                at,
                help="declare all units of a type on a node in one group",
                related=[(site.place(first), "the other group declares it at")],
            )


def _further_nodes(site: Site, configs: Path, units: tuple[RobotUnit, ...]) -> None:
    """Report nodes outside the cluster named by fields other than `node_rank`, such as an arm's controller node."""
    count = site.num_nodes
    for index, unit in enumerate(units):
        for field in type(unit).node_ranks:
            at = (*configs, index, field)
            rank: int | None = getattr(unit, field)
            if rank is not None and count is not None and rank >= count and not site.damaged(at):
                out_of_range(site, at, range(rank, rank + 1), site.place(at))


def _exclusive(site: Site, at: Path, unit: RobotUnit, used: dict[tuple[str, str], tuple[str, Path]]) -> None:
    """Report values shared by two units that must be unique: the address of an arm, the serial of a camera."""
    for field in type(unit).exclusive:
        value: object = getattr(unit, field)
        several = isinstance(value, tuple | list)
        singles: list[object] = [*value] if isinstance(value, tuple | list) else [value]
        for index, single in enumerate(singles):
            path = (*at, field, index) if several else (*at, field)
            if single is None or site.damaged(path):
                continue
            meant = _folded(str(single))
            if field in type(unit).variables and variable_of(meant) is not None:
                meant = f"{meant} of node {unit.node_rank}"  # each node has its own value
            as_first, first = used.setdefault((_kind(field), meant), (field, path))
            if first != path:
                how = f"twice as `{field}`" if as_first == field else f"as `{as_first}` and as `{field}`"
                site.report(
                    "hardware-shared",
                    f"`{single}` is used {how}",
                    path,
                    help="it must be unique",
                    related=[(site.place(first), "first set at")],
                )


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


def _repeated(site: Site, configs: Path, units: tuple[RobotUnit, ...]) -> None:
    field_counts: dict[tuple[type[RobotUnit], str], int] = {}
    for index, unit in enumerate(units):
        if any(getattr(unit, field) for field in type(unit).exclusive) or site.damaged((*configs, index)):
            continue
        first = field_counts.setdefault((type(unit), unit.model_dump_json()), index)
        if first != index:
            site.report(
                "hardware-shared",
                "this unit is declared twice",
                (*configs, index),
                help="remove one of them",
                related=[(site.place((*configs, first)), "first declared at")],
            )

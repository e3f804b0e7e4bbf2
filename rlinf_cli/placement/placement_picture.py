"""The processes on each unit of hardware, and the picture model made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlinf_cli.placement.picture import ACCELERATOR, NODE, Card, Cell, Picture, Section, User
from rlinf_core.config.machines.cluster import RESERVED_LABELS, ClusterConfig
from rlinf_core.config.ranks import format_ranks
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import CLUSTER_LABEL, ClusterTopology, NodeInfo


@dataclass(frozen=True, slots=True)
class UnitUse:
    """A unit of hardware, or a node as a whole, with the processes on it.

    Attributes:
        node_rank: its node.
        hardware_type: the hardware type, as in `Placement.hardware_type`.
        local_hardware_rank: its index among the node's units of that type.
        users: (component, rank) of every process on it.
    """

    node_rank: int
    hardware_type: str
    local_hardware_rank: int
    users: tuple[tuple[str, int], ...]


def unit_uses(topology: ClusterTopology, placements: Mapping[str, Sequence[Placement]]) -> list[UnitUse]:
    """Return every known accelerator and robot, node by node, used or not.

    A node as a whole is listed if it has neither, or if processes were placed on nodes rather than on hardware.
    """
    users: dict[tuple[int, str, int], list[tuple[str, int]]] = {}
    for component, processes in placements.items():
        for process in processes:
            node, kind = process.cluster_node_rank, process.hardware_type
            for unit in process.local_hardware_ranks or (0,):
                users.setdefault((node, kind, unit), []).append((component, process.rank))
    uses: list[UnitUse] = []
    for node in topology.nodes:
        for kind, index in (*_units_of(node), (NODE, 0)):
            users_of_unit = users.get((node.rank, kind, index), [])
            bare = node.num_accelerators == 0 and not node.robots
            if kind != "node" or users_of_unit or bare:
                uses.append(UnitUse(node.rank, kind, index, tuple(users_of_unit)))
    return uses


def _units_of(node: NodeInfo) -> Iterable[tuple[str, int]]:
    kind = node.accelerator_type or "accelerator"
    yield from ((kind, index) for index in range(node.num_accelerators or 0))
    counts: dict[str, int] = {}
    for robot in node.robots:
        index = counts.get(robot.type, 0)
        counts[robot.type] = index + 1
        yield robot.type, index


def picture_of(
    title: str,
    cluster: ClusterConfig,
    topology: ClusterTopology,
    placements: Mapping[str, Sequence[Placement]],
    mode: str,
) -> Picture:
    """Return the whole placement, node by node."""
    uses: dict[int, list[UnitUse]] = {}
    for use in unit_uses(topology, placements):
        uses.setdefault(use.node_rank, []).append(use)
    hosts = hosts_by_rank(cluster)
    grouped: dict[tuple[str, ...], list[Card]] = {}
    numbers = robot_numbers(topology)
    for node in topology.nodes:
        card = _card(node, hosts.get(node.rank), uses.get(node.rank, []), numbers)
        grouped.setdefault(labels_of(topology, node.rank), []).append(card)
    sections = tuple(_section(labels, cards, topology) for labels, cards in grouped.items())
    sizes = tuple((name, len(component_placements)) for name, component_placements in placements.items())
    subtitle = headline(topology, sum(size for _, size in sizes), mode, len(cluster.spare_ranks))
    return Picture(title, subtitle, sizes, sections)


def headline(topology: ClusterTopology, processes: int, mode: str, spares: int = 0) -> str:
    """Return `18 nodes · 1 spare · 128 accelerators · 2 robots · 530 processes · disaggregated`."""
    accelerators = sum(node.num_accelerators or 0 for node in topology.nodes)
    robots = sum(len(node.robots) for node in topology.nodes)
    parts = [counted(topology.num_nodes, "node"), *([counted(spares, "spare")] if spares else [])]
    if accelerators:
        parts.append(counted(accelerators, "accelerator"))
    if robots:
        parts.append(counted(robots, "robot"))
    unknown = [node.rank for node in topology.nodes if node.num_accelerators is None]
    if unknown:
        nodes = f"node{'s' * (len(unknown) > 1)} {format_ranks(unknown)}"
        parts.append(f"accelerators not declared ({nodes})")
    return " · ".join([*parts, counted(processes, "process"), mode])


def robot_numbers(topology: ClusterTopology) -> dict[tuple[int, str, int], int]:
    """Return the rank of each robot in its group, by node, type and index among the node's robots of that type."""
    robot_ranks: dict[tuple[int, str, int], int] = {}
    for group in topology.groups.values():
        if group.unit is None or group.unit.robot is None:
            continue
        numbers = topology.numbers(group.unit)
        for rank, number in enumerate(number for units in group.segments for number in units):
            node = numbers.node_of(number)
            robot_ranks[node, group.unit.robot, number - numbers.on_node(node).start] = rank
    return robot_ranks


def counted(count: int, name: str) -> str:
    """Return `1 node`, `2 nodes`, `2 processes`."""
    if count == 1:
        return f"1 {name}"
    return f"{count} {name}{'es' if name.endswith('s') else 's'}"


def hosts_by_rank(cluster: ClusterConfig) -> dict[int, str]:
    """Return the ssh destination of every node that has one."""
    hosts = dict(enumerate(cluster.hosts))
    for group in cluster.node_groups:
        hosts.update(zip(group.node_ranks.resolve(cluster.num_nodes), group.hosts, strict=False))
    return hosts


def _card(
    node: NodeInfo, host: str | None, uses: Sequence[UnitUse], numbers: Mapping[tuple[int, str, int], int]
) -> Card:
    """Add processes on the node as a whole: as a cell where the node has no units, else as loose processes."""
    robots = {robot.type for robot in node.robots}
    cells: list[Cell] = []
    loose: tuple[User, ...] = ()
    for use in uses:
        if use.hardware_type == NODE and len(uses) > 1:
            loose = _users(use)
        else:
            kind = use.hardware_type if use.hardware_type in robots | {NODE} else ACCELERATOR
            local = use.local_hardware_rank
            number = numbers.get((node.rank, kind, local), local)
            cells.append(Cell(kind, number, _users(use), _address(node, kind, local)))
    return Card((node.rank,), host, tuple(cells), loose)


def _address(node: NodeInfo, kind: str, local: int) -> str:
    """Return the hosts of a robot, without their ports."""
    units = [robot.config for robot in node.robots if robot.type == kind]
    hosts = dict.fromkeys(host for host, _ in units[local].addresses()) if local < len(units) else {}
    return ", ".join(hosts)


def _users(use: UnitUse) -> tuple[User, ...]:
    ranks: dict[str, list[int]] = {}
    for component, rank in use.users:
        ranks.setdefault(component, []).append(rank)
    return tuple(User(component, tuple(user_ranks)) for component, user_ranks in ranks.items())


def _section(labels: tuple[str, ...], cards: Sequence[Card], topology: ClusterTopology) -> Section:
    ranks = [rank for card in cards for rank in card.ranks]
    nodes = f"node{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
    contents = dict.fromkeys(_content(topology.nodes[rank]) for rank in ranks)
    content = f"{next(iter(contents))}{' each' if len(ranks) > 1 else ''}" if len(contents) == 1 else "unlike nodes"
    about = nodes if contents.keys() == {""} else f"{nodes} · {content}"
    without = "in no group" if topology.groups.keys() - RESERVED_LABELS else CLUSTER_LABEL
    return Section(" + ".join(labels) or without, about, tuple(cards))


def _content(node: NodeInfo) -> str:
    """Return `8 × A800`, `1 Franka`, `no accelerators`; empty where unknown, which the headline states once."""
    parts: list[str] = []
    if node.num_accelerators:
        model = node.accelerator_model
        parts.append(f"{node.num_accelerators} × {model}" if model else counted(node.num_accelerators, "accelerator"))
    robots = Counter(robot.type for robot in node.robots)
    parts += [f"{count} {robot}" for robot, count in robots.items()]
    return ", ".join(parts) or ("" if node.num_accelerators is None else "no accelerators")


def labels_of(topology: ClusterTopology, node: int) -> tuple[str, ...]:
    """Return the labels of the user-defined groups of a node."""
    return tuple(
        info.label
        for info in topology.groups.values()
        if info.label not in RESERVED_LABELS and any(node in piece for piece in info.node_ranges)
    )

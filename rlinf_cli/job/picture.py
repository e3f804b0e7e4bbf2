"""The model of a placement's picture (node cards, unit cells, user bands), and its construction from a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rlinf_core.config.ranks import format_ranks, nodes_text
from rlinf_core.config.sections.cluster import RESERVED_LABELS, ClusterConfig
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import CLUSTER_LABEL, ClusterTopology, NodeInfo

ACCELERATOR, NODE = "accelerator", "node"
_UNITS_A_ROW = 8

# Up to this many nodes, each has its own card.
_ALL_CARDS = 24
# In a longer run of equal nodes, this many are drawn, plus one card for the rest.
_RUN_HEAD = 3
# A section has at most this many cards.
_MOST_CARDS = 60


@dataclass(frozen=True, slots=True)
class User:
    """Processes of one component on one unit."""

    component: str
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        return format_ranks(self.ranks)


@dataclass(frozen=True, slots=True)
class Cell:
    """One unit of a node: an accelerator, a robot, or the node itself.

    Attributes:
        kind: `accelerator`, `node`, or a robot's type.
        index: its number: an accelerator's number on its node, a robot's number in its group (as in rank maps).
        users: the processes on it.
        address: the hosts of a robot, or empty.
        node_rank: its node.
        hardware_type, local_hardware_rank: its type, as in `Placement.hardware_type`, and its index among the units of
        that type on the node.
    """

    kind: str
    index: int
    users: tuple[User, ...]
    address: str = ""
    node_rank: int = 0
    hardware_type: str = ""
    local_hardware_rank: int = 0

    @property
    def name(self) -> str:
        """The name: `3` for an accelerator, `Franka 0 · 10.10.10.1` for a robot, `node` for a node."""
        if self.kind == ACCELERATOR:
            return str(self.index)
        if self.kind == NODE:
            return self.kind
        return f"{self.kind} {self.index}" + (f" · {self.address}" if self.address else "")

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(user.component for user in self.users)


@dataclass(frozen=True, slots=True)
class Card:
    """One node, or several equal nodes.

    Attributes:
        ranks: the ranks of the nodes.
        host: its ssh destination, or None.
        cells: its units.
        loose: the processes without a unit.
    """

    ranks: tuple[int, ...]
    host: str | None
    cells: tuple[Cell, ...]
    loose: tuple[User, ...]

    @property
    def pattern(self) -> object:
        """Return a key that is equal for nodes that differ only in the ranks of their processes."""
        before = (None, *self.cells)
        cells = tuple(
            # If a process holds several units, neighboring cells have equal users.
            (cell.kind, _counts(cell.users), previous is not None and previous.users == cell.users)
            for previous, cell in zip(before, self.cells, strict=False)
        )
        return cells, _counts(self.loose)


def _counts(users: Sequence[User]) -> tuple[tuple[str, int], ...]:
    """Return the number of processes of each component."""
    return tuple((user.component, len(user.ranks)) for user in users)


@dataclass(frozen=True, slots=True)
class Section:
    """The nodes of one group."""

    title: str
    subtitle: str
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """The whole placement.

    Attributes:
        components: names and world sizes, in the order of the file; this order selects the colors.
    """

    title: str
    subtitle: str
    components: tuple[tuple[str, int], ...]
    sections: tuple[Section, ...]


def summarised(picture: Picture) -> Picture:
    """Return the picture with long runs of equal nodes reduced to a few cards."""
    if sum(len(section.cards) for section in picture.sections) <= _ALL_CARDS:
        return picture
    return replace(
        picture, sections=tuple(replace(section, cards=_shortened(section.cards)) for section in picture.sections)
    )


def _shortened(cards: Sequence[Card]) -> tuple[Card, ...]:
    shown: list[Card] = []
    for _, run in groupby(cards, key=lambda card: card.pattern):
        like = list(run)
        shown.extend(like[:_RUN_HEAD])
        rest = like[_RUN_HEAD:]
        if len(rest) == 1:
            shown.append(rest[0])
        elif rest:
            shown.append(_merged(rest))
    if len(shown) <= _MOST_CARDS:
        return tuple(shown)
    return (*shown[: _MOST_CARDS - 1], _merged(shown[_MOST_CARDS - 1 :]))


def _merged(cards: Sequence[Card]) -> Card:
    """Return one card for several nodes, with all their processes as `loose`."""
    ranks: dict[str, list[int]] = {}
    for card in cards:
        for user in [*(user for cell in card.cells for user in cell.users), *card.loose]:
            ranks.setdefault(user.component, []).extend(user.ranks)
    together = tuple(User(name, tuple(sorted(set(user_ranks)))) for name, user_ranks in ranks.items())
    return Card(tuple(rank for card in cards for rank in card.ranks), None, (), together)


def picture_record(picture: Picture) -> dict[str, Any]:
    """Return the picture as data, for a run's `placement.json` and for pages."""
    picture = summarised(picture)
    colors = {name: index for index, (name, _) in enumerate(picture.components)}
    cells = [cell for section in picture.sections for card in section.cards for cell in card.cells]
    return {
        "title": picture.title,
        "subtitle": picture.subtitle,
        "components": [{"name": name, "size": size} for name, size in picture.components],
        "idle": not all(cell.users for cell in cells),
        "sections": [
            {
                "title": section.title,
                "subtitle": section.subtitle,
                "cards": [_card_record(card, colors) for card in section.cards],
            }
            for section in picture.sections
        ],
    }


def _card_record(card: Card, colors: Mapping[str, int]) -> dict[str, Any]:
    many = len(card.ranks) > 1
    title = f"and {len(card.ranks)} more" if many else f"node {card.ranks[0]}"
    alone = card.host or ("" if card.cells or card.loose else "unused")
    rows: list[dict[str, Any]] = []
    for accelerators, kin in groupby(card.cells, key=lambda cell: cell.kind == ACCELERATOR):
        cells = list(kin)
        for first in range(0, len(cells), _UNITS_A_ROW):
            row = cells[first : first + _UNITS_A_ROW]
            # Robots share the row's width. An accelerator takes an eighth, so that different nodes stay comparable.
            columns = _UNITS_A_ROW if accelerators else len(row)
            rows.append({"columns": columns, "runs": _run_records(row, title, colors)})
    return {
        "title": title,
        "about": f"nodes {format_ranks(card.ranks)}" if many else alone,
        "many": many,
        "rows": rows,
        "loose": _user_records(card.loose, colors),
    }


def _run_records(row: Sequence[Cell], title: str, colors: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the units of a row; neighboring units with the same users are drawn as one."""
    runs: list[dict[str, Any]] = []
    for _, run in groupby(enumerate(row), key=lambda item: item[1].users or item[0]):
        units = [cell for _, cell in run]
        kind = f"{ACCELERATOR} " if units[0].kind == ACCELERATOR else ""
        users = ", ".join(f"{user.component}:{user.label}" for user in units[0].users) or "idle"
        about = f"{title}, {kind}{', '.join(unit.name for unit in units)}: {users}"
        names = [unit.name for unit in units]
        runs.append({"units": names, "users": _user_records(units[0].users, colors), "about": about})
    return runs


def _user_records(users: Sequence[User], colors: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"component": user.component, "ranks": user.label, "color": colors[user.component]} for user in users]


def unit_cells(topology: ClusterTopology, placements: Mapping[str, Sequence[Placement]]) -> list[Cell]:
    """Return every known accelerator and robot, node by node, used or not.

    A node itself is listed if it has no units, or if processes were placed on the node rather than on its hardware.
    """
    ranks: dict[tuple[int, str, int], dict[str, list[int]]] = {}
    for component, processes in placements.items():
        for process in processes:
            for unit in process.local_hardware_ranks or (0,):
                held = ranks.setdefault((process.cluster_node_rank, process.hardware_type, unit), {})
                held.setdefault(component, []).append(process.rank)
    numbers = robot_numbers(topology)
    cells: list[Cell] = []
    for node in topology.nodes:
        bare = node.num_accelerators == 0 and not node.robots
        own_kinds = {NODE, *(robot.type for robot in node.robots)}
        for hardware, local in (*_units_of(node), (NODE, 0)):
            held = ranks.get((node.rank, hardware, local), {})
            if hardware != NODE or held or bare:
                users = tuple(User(component, tuple(held_ranks)) for component, held_ranks in held.items())
                kind = hardware if hardware in own_kinds else ACCELERATOR
                index, address = numbers.get((node.rank, kind, local), local), _address(node, kind, local)
                cells.append(Cell(kind, index, users, address, node.rank, hardware, local))
    return cells


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
    cells: dict[int, list[Cell]] = {}
    for cell in unit_cells(topology, placements):
        cells.setdefault(cell.node_rank, []).append(cell)
    hosts = hosts_by_rank(cluster)
    grouped: dict[tuple[str, ...], list[Card]] = {}
    for node in topology.nodes:
        units = cells.get(node.rank, [])
        # Processes placed on a node itself get a cell if the node has no units; otherwise they are loose.
        whole = [cell for cell in units if cell.kind == NODE and len(units) > 1]
        loose = tuple(user for cell in whole for user in cell.users)
        own = tuple(cell for cell in units if cell not in whole)
        card = Card((node.rank,), hosts.get(node.rank), own, loose)
        grouped.setdefault(labels_of(topology, node.rank), []).append(card)
    sections = tuple(_section(labels, cards, topology) for labels, cards in grouped.items())
    sizes = tuple((name, len(component_placements)) for name, component_placements in placements.items())
    subtitle = headline(topology, sum(size for _, size in sizes), mode, len(cluster.spare_ranks))
    return Picture(title, subtitle, sizes, sections)


def headline(topology: ClusterTopology, processes: int, mode: str, spares: int = 0) -> str:
    """Return the headline, as in `18 nodes · 1 spare · 128 accelerators · 530 processes · disaggregated`."""
    accelerators = sum(node.num_accelerators or 0 for node in topology.nodes)
    robots = sum(len(node.robots) for node in topology.nodes)
    parts = [counted(topology.num_nodes, "node"), *([counted(spares, "spare")] if spares else [])]
    if accelerators:
        parts.append(counted(accelerators, "accelerator"))
    if robots:
        parts.append(counted(robots, "robot"))
    unknown = [node.rank for node in topology.nodes if node.num_accelerators is None]
    if unknown:
        parts.append(f"accelerators not declared ({nodes_text(unknown)})")
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
    """Return a count with its noun, as in `1 node`, `2 nodes` or `2 processes`."""
    if count == 1:
        return f"1 {name}"
    return f"{count} {name}{'es' if name.endswith('s') else 's'}"


def hosts_by_rank(cluster: ClusterConfig) -> dict[int, str]:
    """Return the ssh destination of every node that has one."""
    hosts = dict(enumerate(cluster.hosts))
    for group in cluster.node_groups:
        hosts.update(zip(group.node_ranks.resolve(cluster.num_nodes), group.hosts, strict=False))
    return hosts


def _address(node: NodeInfo, kind: str, local: int) -> str:
    """Return the hosts of a robot, without their ports."""
    units = [robot.config for robot in node.robots if robot.type == kind]
    hosts = dict.fromkeys(host for host, _ in units[local].addresses()) if local < len(units) else {}
    return ", ".join(hosts)


def _section(labels: tuple[str, ...], cards: Sequence[Card], topology: ClusterTopology) -> Section:
    ranks = [rank for card in cards for rank in card.ranks]
    nodes = nodes_text(ranks)
    contents = dict.fromkeys(_content(topology.nodes[rank]) for rank in ranks)
    content = f"{next(iter(contents))}{' each' if len(ranks) > 1 else ''}" if len(contents) == 1 else "unlike nodes"
    about = nodes if contents.keys() == {""} else f"{nodes} · {content}"
    without = "in no group" if topology.groups.keys() - RESERVED_LABELS else CLUSTER_LABEL
    return Section(" + ".join(labels) or without, about, tuple(cards))


def _content(node: NodeInfo) -> str:
    """Return a node's units, as in `8 × A800`, `1 Franka` or `no accelerators`; empty if unknown."""
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

"""Placements of processes, the base of placement strategies, and the conversion from resources to placements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self, TypeAlias, cast

from rlinf_core.config.ranks import format_ranks
from rlinf_core.errors import PlacementError
from rlinf_core.hardware.accelerators import get_accelerator
from rlinf_core.placement.resolve import select
from rlinf_core.placement.selection import Location, Selection
from rlinf_core.suggest import as_index, quoted, short_repr
from rlinf_core.topology import ClusterTopology, NodeInfo, Unit, UnitKind

# The visibility variable for vendors without their own.
DEFAULT_VISIBILITY_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of one process of a component.

    Attributes:
        rank: its rank among the component's `world_size` processes.
        cluster_node_rank: the rank of its node in the cluster.
        placement_node_rank: the index of its node among the nodes that this component uses, in order of first use.
        local_rank: its index among the `local_world_size` processes of this component on its node.
        local_accelerator_rank: the index on its node of the first accelerator assigned to it, or None without one.
        accelerator_type: the vendor of its node's accelerators, as in `NVIDIA`; None if none or unknown.
        visible_accelerators: the accelerators that it sees, as indices on its node: the assigned ones, or all of the
            node if it has none or is not isolated.
        visible_device_ids: their names in the visibility variable, if these are not the indices; else empty.
        isolate_accelerator: whether it sees only its assigned accelerators, if any.
        hardware_type: the accelerators' vendor, a robot's `hardware.type`, or `node`.
        local_hardware_ranks: its units among the node's units of that type; empty if it was placed on nodes regardless
            of hardware.
        node_group_label: the group that selected its node.
    """

    rank: int
    world_size: int
    cluster_node_rank: int
    placement_node_rank: int
    local_rank: int
    local_world_size: int
    local_accelerator_rank: int | None
    accelerator_type: str | None
    visible_accelerators: tuple[int, ...]
    visible_device_ids: tuple[str, ...]
    isolate_accelerator: bool
    hardware_type: str
    local_hardware_ranks: tuple[int, ...]
    node_group_label: str

    @property
    def visibility_variable(self) -> str:
        """The environment variable that lists the visible accelerators."""
        if self.accelerator_type is None:
            return DEFAULT_VISIBILITY_VARIABLE
        return get_accelerator(self.accelerator_type).visibility_variable or DEFAULT_VISIBILITY_VARIABLE

    def without_devices(self) -> Self:
        """Return the same placement for a process that uses no accelerator."""
        return replace(self, accelerator_type=None, local_accelerator_rank=None)

    def environment(self) -> dict[str, str]:
        """Return the variables of this process that depend on its placement, except MASTER_ADDR and MASTER_PORT.

        A process that sees only its own accelerators has `LOCAL_RANK` 0 of 1, since frameworks use `LOCAL_RANK` as the
        device index. `NODE_LOCAL_RANK` always counts the component's processes on the node. A process without
        accelerators keeps its node's visibility variable.
        """
        local_rank, local_world_size = self.local_rank, self.local_world_size
        if self.local_accelerator_rank is not None:
            if self.isolate_accelerator:
                local_rank, local_world_size = 0, 1
            else:
                local_rank = self.local_accelerator_rank
        variables = {
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "NODE_RANK": str(self.placement_node_rank),
            "NODE_LOCAL_RANK": str(self.local_rank),
        }
        if self.local_accelerator_rank is not None:
            visible = self.visible_device_ids or self.visible_accelerators
            variables[self.visibility_variable] = ",".join(map(str, visible))
        return variables


class HasTopology(Protocol):
    """The interface of a cluster that placement needs."""

    @property
    def topology(self) -> ClusterTopology: ...


# The node of a process, the group that selected it, and its units on that node.
ProcessUnits: TypeAlias = tuple[int, str, tuple[int, ...]]
ClusterLike: TypeAlias = "ClusterTopology | HasTopology"


def topology_of(cluster: ClusterLike) -> ClusterTopology:
    """Return the topology of a cluster.

    Raises:
        PlacementError: `cluster` is neither a cluster nor a topology.
    """
    topology = cluster if isinstance(cluster, ClusterTopology) else getattr(cluster, "topology", None)
    if not isinstance(topology, ClusterTopology):
        raise PlacementError(f"{short_repr(cluster)} is not a cluster", help="give a `Cluster`, or a `ClusterTopology`")
    return topology


def number(value: object, name: str, where: str) -> int:
    """Return a strategy's argument as an int.

    Raises:
        PlacementError: `value` is not an integer.
    """
    number = as_index(value)
    if number is None:
        raise PlacementError(f"`{name}` is {short_repr(value)}", where=where, help="give an integer")
    return number


def numbers(values: object, name: str, where: str) -> tuple[int, ...]:
    """Return a strategy's argument as ranks; `name` and `where` are for the error.

    Raises:
        PlacementError: `values` is not an iterable of integers.
    """
    listed = items(values)
    ranks = None if listed is None else [as_index(value) for value in listed]
    if ranks is None or None in ranks:
        raise PlacementError(
            f"{name} are {short_repr(values)}", where=where, help="give a list of ranks, which are integers"
        )
    return tuple(number for number in ranks if number is not None)


def items(values: object) -> tuple[object, ...] | None:
    """Return an argument as a list; None if it is not list-like, such as text."""
    if isinstance(values, str | bytes | Mapping):
        return None
    try:
        return tuple(cast("Iterable[object]", values))
    except TypeError:
        return None


class PlacementStrategy(ABC):
    """The base of strategies that place the processes of a component."""

    @abstractmethod
    def get_placement(self, cluster: ClusterLike, isolate_accelerator: bool = True) -> list[Placement]:
        """Return one placement for each process, by rank.

        Args:
            cluster: a cluster, or a topology alone.
            isolate_accelerator: whether a process with accelerators sees only these, instead of all of its node.

        Raises:
            PlacementError: the cluster cannot hold the processes as requested.
        """


def split_labels(labels: str | int | Iterable[str | int] | None) -> tuple[str, ...]:
    """Return `"a,b"`, `["a", "b"]`, `4090` or None as a tuple of labels.

    Raises:
        PlacementError: a list is empty.
    """
    if labels is None:
        return ()
    listed = items(labels)
    if listed == ():
        raise PlacementError("the list names no node group", help="write None to mean every node")
    return tuple(str(label).strip() for label in (str(labels).split(",") if listed is None else listed))


def select_or_raise(topology: ClusterTopology, labels: Sequence[str], where: str) -> Selection:
    """Return the units of the groups `labels`.

    Raises:
        PlacementError: a group does not exist, groups do not fit together, or their units are unknown.
    """
    selected = select(topology, labels, "the placement")
    if selected.problems:
        raise selected.problems[0].error(where)
    if selected.selection is None:
        raise unknown_accelerators(selected.unknown, where)
    return selected.selection


def unknown_accelerators(labels: Sequence[str], where: str) -> PlacementError:
    return PlacementError(
        f"the accelerators of {quoted(labels)} are unknown",
        where=where,
        help="declare `accelerators: {per_node: 8}` in the node group (`per_node: 0` for none), assume them"
        " (`--assume 8`), or probe the nodes",
    )


def place(
    selection: Selection, processes: Iterable[Sequence[int]], isolate_accelerator: bool, where: str
) -> list[Placement]:
    """Return the placements of processes that hold these resource ranks.

    Raises:
        PlacementError: a resource does not exist, is listed twice for one process, or is on another node than the rest.
    """
    held: list[ProcessUnits] = []
    for rank, resources in enumerate(processes):
        locations = [_locate(selection, resource, rank, where) for resource in resources]
        if len(locations) > 1:
            _check_together(selection, rank, resources, locations, where)
        first = locations[0]
        units = () if selection.ignores_hardware else tuple(location.local_rank for location in locations)
        held.append((first.node, first.label, units))
    return number_processes(selection.topology, selection.unit, held, isolate_accelerator)


def _locate(selection: Selection, resource: int, rank: int, where: str) -> Location:
    if 0 <= resource < selection.count:
        return selection.locate(resource)
    plural = len(selection.groups) > 1
    raise PlacementError(
        f"process {rank} asks for resource {resource}, but {selection.name} {'have' if plural else 'has'} "
        f"{selection.exist}",
        where=where,
        help=selection.describe(),
    )


def _check_together(
    selection: Selection, rank: int, resources: Sequence[int], locations: Sequence[Location], where: str
) -> None:
    nodes = sorted({location.node for location in locations})
    if len(nodes) > 1:
        raise PlacementError(
            f"process {rank} would hold resources {','.join(map(str, resources))} of {selection.name}, "
            f"which are on nodes {format_ranks(nodes)}",
            where=where,
            help=f"a process runs on one node ({selection.describe()}): choose resources of one node",
        )
    if len(set(resources)) < len(resources):
        twice = next(resource for resource, count in Counter(resources).items() if count > 1)
        raise PlacementError(f"process {rank} has resource {twice} twice", where=where, help="list it once")


def number_processes(
    topology: ClusterTopology, unit: Unit, held: Sequence[ProcessUnits], isolate_accelerator: bool
) -> list[Placement]:
    """Return the placements of processes with known nodes and units, with their local ranks."""
    with_accelerators = unit.kind is UnitKind.ACCELERATOR
    placements: list[Placement] = []
    for (node, label, units), ranks in zip(held, _ranks_on([node for node, _, _ in held]), strict=True):
        info = topology.nodes[node]
        is_isolated = with_accelerators and isolate_accelerator
        visible = units if is_isolated else tuple(range(info.num_accelerators or 0))
        placements.append(
            Placement(
                *ranks,
                local_accelerator_rank=units[0] if with_accelerators else None,
                accelerator_type=info.accelerator_type,
                visible_accelerators=visible,
                visible_device_ids=tuple(info.accelerator_ids[index] for index in visible)
                if info.accelerator_ids
                else (),
                isolate_accelerator=isolate_accelerator,
                hardware_type=hardware_type(unit, info),
                local_hardware_ranks=units,
                node_group_label=label,
            )
        )
    return placements


def renumbered(placements: Sequence[Placement]) -> list[Placement]:
    """Return placements with their ranks and counts renumbered, as if the component had no other processes."""
    ranks = _ranks_on([placement.cluster_node_rank for placement in placements])
    return [replace(placement, **own._asdict()) for placement, own in zip(placements, ranks, strict=True)]


class _Ranks(NamedTuple):
    """The ranks of a process; see `Placement`."""

    rank: int
    world_size: int
    cluster_node_rank: int
    placement_node_rank: int
    local_rank: int
    local_world_size: int


def _ranks_on(nodes: Sequence[int]) -> Iterator[_Ranks]:
    """Yield the ranks of each process, given its node."""
    order = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    sizes, before = Counter(nodes), Counter[int]()
    for rank, node in enumerate(nodes):
        yield _Ranks(rank, len(nodes), node, order[node], before[node], sizes[node])
        before[node] += 1


def hardware_type(unit: Unit, node: NodeInfo) -> str:
    """Return the hardware type of a process that holds units of kind `unit` on `node`."""
    if unit.kind is UnitKind.ACCELERATOR:
        return node.accelerator_type or str(unit.kind)
    return unit.robot or str(unit.kind)

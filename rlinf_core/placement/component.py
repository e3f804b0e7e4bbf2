"""The placements of a job's components from `cluster.component_placement`, with or without lost nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, cast

from pydantic import ValidationError

from rlinf_core.config.ranks import merge_ranges
from rlinf_core.config.sections.cluster import ClusterConfig, PlacementEntry
from rlinf_core.errors import PlacementError
from rlinf_core.placement.resolve import Coverage, Resolution, resolve
from rlinf_core.placement.strategy import (
    ClusterLike,
    Placement,
    PlacementStrategy,
    place,
    renumbered,
    topology_of,
    unknown_accelerators,
)
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.topology import CLUSTER_LABEL, ClusterTopology, UnitKind

Divides: TypeAlias = Callable[[int], bool]
"""A function that returns whether a component's work can be divided among a number of processes."""


def nodes_of_components(cluster: ClusterConfig) -> dict[str, frozenset[int]]:
    """Return the nodes of each component; all nodes of its groups if accelerators are not declared."""
    topology = ClusterTopology.from_config(cluster)
    used: dict[str, frozenset[int]] = {}
    for name, entry in cluster.component_placement.items():
        resolution = resolve(name, entry.rank_map, entry.node_group, topology)
        # A map with mistakes counts as one with unknown units: all nodes of its groups.
        nodes = (resolution._replace(selection=None) if resolution.problems else resolution).nodes()
        used[name] = frozenset(rank for pieces in nodes.values() for piece in pieces for rank in piece)
    return used


def needed_nodes(cluster: ClusterConfig) -> frozenset[int]:
    """Return the nodes of all components that are not elastic, and the head."""
    used = nodes_of_components(cluster)
    fixed = (nodes for name, nodes in used.items() if not cluster.component_placement[name].elastic)
    return frozenset({0}).union(*fixed)


def can_lack(cluster: ClusterConfig, absent: Collection[int]) -> bool:
    """Return whether the job can run without the nodes `absent`: elastic components keep a process, others keep all."""
    if not needed_nodes(cluster).isdisjoint(absent):
        return False
    used = nodes_of_components(cluster)
    return all(not nodes or not nodes <= set(absent) for nodes in used.values())


def without_nodes(
    component: str, placements: Sequence[Placement], absent: Collection[int], divides: Divides | None
) -> list[Placement]:
    """Return the placements of an elastic component's remaining processes, renumbered.

    Args:
        component: its name, for the error.
        placements: the placements on all nodes, by rank.
        absent: the lost nodes.
        divides: whether its work can be divided among a number of processes: as many as possible are kept.

    Raises:
        PlacementError: no process remains.
    """
    left = [placement for placement in placements if placement.cluster_node_rank not in absent]
    while left and divides is not None and not divides(len(left)):
        left.pop()
    if not left:
        raise PlacementError(
            f"no process of component `{component}` is left: the nodes that it is placed on are lost",
            help="start them again by `rlinf up FILE`",
        )
    return renumbered(left)


_SECTION = "cluster.component_placement"


class PlacementMode(StrEnum):
    """The way in which components share hardware."""

    COLLOCATED = "collocated"
    DISAGGREGATED = "disaggregated"
    HYBRID = "hybrid"


class HasCluster(Protocol):
    """The part of a job's configuration that placement needs."""

    @property
    def cluster(self) -> Any: ...


ConfigLike: TypeAlias = "ClusterConfig | HasCluster | Mapping[str, Any]"


class ComponentPlacement:
    """The placement of every component of a job.

    Args:
        config: a cluster configuration, a job's configuration (anything with `.cluster.component_placement`), or plain
            data `{"cluster": {"component_placement": {...}}}`.
        cluster: a cluster, or a topology alone.

    Raises:
        PlacementError: a component cannot be placed. It has only the first mistake; `rlinf validate` shows all.
    """

    def __init__(self, config: ConfigLike, cluster: ClusterLike) -> None:
        self._topology = topology = topology_of(cluster)
        self._entries = _entries(config, topology)
        self._check_groups(config)
        self._resolutions = {
            name: _resolve(name, entry, topology, f"{_SECTION}.{name}") for name, entry in self._entries.items()
        }
        if not isinstance(cluster, ClusterTopology):  # a real cluster, on which the job is about to run
            self._warn_of_missing_accelerators()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {resolution.world_size}" for name, resolution in self._resolutions.items())
        return f"<{type(self).__name__}: {sizes or 'no component'}, {self.placement_mode}>"

    def _check_groups(self, config: ConfigLike) -> None:
        """Raise a PlacementError for a group of the configuration that the cluster was made without."""
        section = getattr(config, "cluster", config)
        groups = section.node_groups if isinstance(section, ClusterConfig) else ()
        known = {group.label for group in groups} - self._topology.groups.keys()
        for name, entry in self._entries.items():
            for label in known.intersection(entry.node_group):
                raise PlacementError(
                    f"component `{name}` is placed on node group `{label}`, without which the cluster was made",
                    where=f"{_SECTION}.{name}",
                    help="make it with the configuration: `Cluster(cluster_cfg=cfg)`",
                )

    def _warn_of_missing_accelerators(self) -> None:
        names = [name for name, resolution in self._resolutions.items() if resolution.lacks_accelerators]
        if names:
            import logging  # `rlinf validate`, which has no cluster, starts without it

            logging.getLogger("rlinf").warning(
                "NO ACCELERATOR FOUND: %s %s placed by accelerator rank, and will run on the CPU. `rlinf doctor`"
                " shows each node's accelerators; write `node_group: node` to run on the CPU.",
                quoted(names),
                "are" if len(names) > 1 else "is",
            )

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the components, in the order written."""
        return tuple(self._entries)

    def get_strategy(self, name: str, divides: Divides | None = None) -> PlacementStrategy:
        """Return the strategy that lays out the processes of a component.

        Args:
            name: the component.
            divides: whether its work can be divided among a number of processes, for an `elastic` component that lost
                nodes. By default any number is valid.

        Raises:
            PlacementError: the job has no such component.
        """
        self._resolution(name)
        return _MappedStrategy(name, self._entries[name], f"{_SECTION}.{name}", divides)

    def get_world_size(self, name: str) -> int:
        """Return the number of a component's processes, without those on lost nodes.

        Raises:
            PlacementError: the job has no such component.
        """
        whole = self._resolution(name).world_size
        return len(self.get_strategy(name).get_placement(self._topology)) if self._topology.lost else whole

    def get_hardware_ranks(self, name: str) -> list[int]:
        """Return the resource ranks of a component, ascending, local to its node groups.

        Raises:
            PlacementError: the job has no such component.
        """
        return [rank for block in self._resolution(name).blocks for rank in block.resources]

    @property
    def placement_mode(self) -> PlacementMode:
        """The way in which the components share hardware; COLLOCATED if fewer than two hold distinct units."""
        return placement_mode(self._resolutions.values())

    def _resolution(self, name: str) -> Resolution:
        resolution = self._resolutions.get(name)
        if resolution is None:
            choices = f"the components are {quoted(self.components)}" if self.components else "no component is placed"
            help = did_you_mean(name, self.components) or choices
            raise PlacementError(f"component `{name}` is not placed", where="cluster.component_placement", help=help)
        return resolution


class HybridComponentPlacement(ComponentPlacement):
    """`ComponentPlacement` under another name, for programs whose components may share any of their accelerators."""


class _MappedStrategy(PlacementStrategy):
    def __init__(self, name: str, entry: PlacementEntry, where: str, divides: Divides | None = None) -> None:
        self._name, self._entry, self._where, self._divides = name, entry, where, divides

    def __repr__(self) -> str:
        groups = ",".join(self._entry.node_group) or CLUSTER_LABEL
        return f"<placement of {self._name}: `{self._entry.rank_map}` on {groups}>"

    def get_placement(self, cluster: ClusterLike, isolate_accelerator: bool = True) -> list[Placement]:
        topology = topology_of(cluster)
        resolution = _resolve(self._name, self._entry, topology, self._where)
        if resolution.selection is None:
            raise unknown_accelerators(resolution.unknown, self._name)
        placements = place(resolution.selection, resolution.processes(), isolate_accelerator, self._name)
        if topology.lost.isdisjoint(placement.cluster_node_rank for placement in placements):
            return placements
        return without_nodes(self._name, placements, topology.lost, self._divides)


def mapped_strategy(name: str, written: str | Mapping[str, Any]) -> PlacementStrategy:
    """Return the strategy of an entry written as under `cluster.component_placement`.

    Args:
        name: the component, for messages.
        written: a rank map such as `0:0-3`, or a mapping `{"placement": "0-3", "node_group": "a800"}`.

    Raises:
        PlacementError: `written` is not a valid entry.
    """
    where = f"placement of `{name}`"
    try:
        entry = PlacementEntry.model_validate(_plain(written))
    except ValidationError as failure:
        error = _refusal(failure)
        error.where = where
        raise error from None
    return _MappedStrategy(name, entry, where)


def placement_mode(resolutions: Iterable[Resolution]) -> PlacementMode:
    """Return the way in which components share their units.

    Nodes count only if no component has an accelerator or a robot, and never those of groups that ignore hardware.
    """
    held: list[Coverage] = []
    for resolution in resolutions:
        covered = resolution.coverage()
        if covered and resolution.selection and not resolution.selection.ignores_hardware:
            held.append(covered)
    hardware = [covered for covered in held if covered.unit.kind is not UnitKind.NODE] or held
    distinct = set(hardware)
    if len(distinct) < 2:
        return PlacementMode.COLLOCATED
    if len(distinct) == len(hardware) and all(
        _disjoint(hardware, unit) for unit in {coverage.unit for coverage in hardware}
    ):
        return PlacementMode.DISAGGREGATED
    return PlacementMode.HYBRID


def _disjoint(coverages: Sequence[Coverage], unit: object) -> bool:
    ours = [covered for covered in coverages if covered.unit == unit]
    together = merge_ranges(piece for covered in ours for piece in covered.ranges)
    return sum(map(len, together)) == sum(map(len, ours))


def _resolve(name: str, entry: PlacementEntry, topology: ClusterTopology, where: str) -> Resolution:
    resolution = resolve(name, entry.rank_map, entry.node_group, topology)
    where = f"{where}, map `{entry.rank_map}`"
    if resolution.problems:
        raise resolution.problems[0].error(where)
    if resolution.selection is None:
        raise unknown_accelerators(resolution.unknown, where)
    return resolution


def _entries(config: ConfigLike, topology: ClusterTopology) -> Mapping[str, PlacementEntry]:
    if isinstance(config, ClusterConfig):
        return config.component_placement
    written: Any = config
    for name in ("cluster", "component_placement"):
        is_data = isinstance(written, Mapping)
        written = cast("Mapping[str, Any]", written).get(name) if is_data else getattr(written, name, None)
    if not isinstance(written, Mapping):
        help = "add `cluster.component_placement`"
        if cast("object", config) is None:  # as of a job whose file selects no recipe
            help = "of a file without `recipe`, pass the job's `cluster`"
        raise PlacementError("the configuration does not place any component", help=help)
    entries = cast("Mapping[Any, Any]", written)
    if all(isinstance(entry, PlacementEntry) for entry in entries.values()):
        return cast("Mapping[str, PlacementEntry]", entries)
    return _read(entries, topology)


def _read(written: Mapping[Any, Any], topology: ClusterTopology) -> Mapping[str, PlacementEntry]:
    """Return entries from plain data, for programs with their own mapping."""
    data = {str(names): _plain(entry) for names, entry in written.items()}
    seen: set[str] = set()
    for names in data:
        for name in (part.strip() for part in names.split(",")):
            if name in seen:
                message = f"component `{name}` is placed twice"
                raise PlacementError(message, where="cluster.component_placement", help="write one entry per component")
            seen.add(name)
    try:
        cluster = ClusterConfig.model_validate({"num_nodes": topology.num_nodes, "component_placement": data})
    except ValidationError as failure:
        raise _refusal(failure) from None
    return cluster.component_placement


def _refusal(failure: ValidationError) -> PlacementError:
    """Return the first error of pydantic, in our words."""
    first = failure.errors(include_url=False, include_input=False)[0]
    path = [str(segment) for segment in first["loc"] if segment != "[key]"]
    message, help = first["msg"], first.get("ctx", {}).get("help")
    if first["type"] == "extra_forbidden":
        keys = tuple(PlacementEntry.model_fields)
        message, help = (
            f"unknown key `{path.pop()}`",
            did_you_mean(str(first["loc"][-1]), keys) or f"known: {quoted(keys)}",
        )
    elif first["type"] == "missing":
        message, help = f"`{path.pop()}` is missing", "add a rank map, as in `placement: 0-7`"
    return PlacementError(message, where=".".join(("cluster", *path)), help=help)


def _plain(value: Any) -> Any:
    """Return mappings and lists of any type as dict and list."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value

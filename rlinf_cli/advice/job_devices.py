"""The accelerators of a job as kinds, and its placement as an arrangement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlinf_core.advice.arrangements import Arrangement, DeviceGroup, DeviceSpan
from rlinf_core.errors import PlacementError
from rlinf_core.placement.environment import process_environment
from rlinf_core.topology import CLUSTER_LABEL, NODES

if TYPE_CHECKING:
    from rlinf_core.config.machines.cluster import ClusterConfig
    from rlinf_core.placement.strategy import Placement
    from rlinf_core.topology import ClusterTopology

# The model of an accelerator that nobody names.
UNNAMED = "accelerator"


class DevicePlace(NamedTuple):
    """The place of a process: its node, and its accelerator there."""

    cluster_node_rank: int
    local_accelerator_rank: int | None


class JobDevices(NamedTuple):
    """The accelerators of a job and their holders.

    Attributes:
        kinds: the accelerators, by the label of their group; of groups with the same ones, by the first.
        seats: the seats of each component of the flow.
        fixed: components that stay where they are: on machines, robots, or out of the flow.
        groups: the kinds that each component may be on, and the group through which it is placed there: its own, and
            those with the same interpreter; none without an accelerator.
    """

    kinds: Mapping[str, DeviceGroup]
    seats: Mapping[str, DeviceSpan]
    fixed: tuple[str, ...]
    groups: Mapping[str, Mapping[str, str]]

    def kinds_for(self, name: str) -> list[DeviceGroup]:
        """Return the kinds that a component may be on."""
        return [self.kinds[kind] for kind in self.groups.get(name, ())]

    def placed(self, name: str, seats: DeviceSpan) -> dict[str, str]:
        """Return seats of a component as its entry in `cluster.component_placement`; it has accelerators."""
        return {"placement": ranks_of(seats), "node_group": self.groups[name][seats.kind or ""]}

    @property
    def models(self) -> dict[str, str]:
        """The model of the accelerators of each kind."""
        return {label: kind.model for label, kind in self.kinds.items()}

    def places(self, seats: DeviceSpan, topology: ClusterTopology) -> list[DevicePlace]:
        """Return the place of each process of a component with accelerators."""
        kind = self.kinds[seats.kind or ""]
        nodes = topology.group(kind.label).node_ranks
        units = range(seats.first, seats.first + seats.size)
        return [DevicePlace(nodes[unit // kind.per_node], unit % kind.per_node) for unit in units]

    def now(self, components: Sequence[str], stages: int, staleness: int) -> Arrangement:
        """Return today's arrangement."""
        return Arrangement(tuple((name, self.seats[name]) for name in components), stages, staleness)


def devices_of(
    cluster: ClusterConfig,
    topology: ClusterTopology,
    placements: Mapping[str, Sequence[Placement]],
    components: Sequence[str],
) -> JobDevices:
    """Return the kinds and seats of a job's components.

    Raises:
        PlacementError: a component is missing, has processes with several accelerators or in several ranges, or two
            groups share some of their nodes: the model has no such placements.
    """
    kinds: dict[str, DeviceGroup] = {}
    seats: dict[str, DeviceSpan] = {}
    fixed: list[str] = []
    # The groups that have the accelerators of a kind, which differ in interpreters and variables.
    alike: dict[str, list[str]] = {}
    own: dict[str, str] = {}
    for name in components:
        if name not in placements:
            raise PlacementError(f"the file places no component `{name}`, so there is nothing to advise on")
        labels = [*cluster.component_placement[name].node_group] or [CLUSTER_LABEL]
        group = topology.group(labels[0])
        if len(labels) > 1 or group.unit is None or group.unit == NODES or group.unit.robot:
            if len(labels) > 1 and any(process.accelerator_type for process in placements[name]):
                raise _not_modelled(name, "lies on several node groups")
            seats[name] = DeviceSpan(None, 0, len(placements[name]))
            fixed.append(name)
            continue
        label = labels[0]
        kind_label = next((other for other in kinds if topology.group(other).node_ranks == group.node_ranks), label)
        if kind_label != label and kinds[kind_label].units != group.num_units:
            raise _not_modelled(name, f"is placed through `{label}`, which has other accelerators of `{kind_label}`")
        for other in kinds:
            if other != kind_label and set(group.node_ranks) & set(topology.group(other).node_ranks):
                raise _not_modelled(name, f"is placed through `{label}`, which shares nodes with `{other}`")
        if kind_label not in kinds:
            node = topology.nodes[group.node_ranks[0]]
            model = node.accelerator_model or UNNAMED
            kinds[label] = DeviceGroup(label, group.num_units, node.num_accelerators or 1, model)
        alike.setdefault(kind_label, []).append(label)
        own[name] = label
        seats[name] = _seats(name, kinds[kind_label], placements[name], list(group.node_ranks))

    def interpreter(label: str) -> str | None:
        return process_environment(cluster, topology.group(label).node_ranks[0], label).interpreter

    def through(name: str, kind: str) -> str | None:
        """Return the group through which a component may be placed on a kind."""
        if kind == seats[name].kind:
            return own[name]
        return next((label for label in alike[kind] if interpreter(label) == interpreter(own[name])), None)

    groups = {name: {kind: label for kind in kinds if (label := through(name, kind)) is not None} for name in own}
    return JobDevices(kinds, seats, tuple(fixed), groups)


def ranks_of(seats: DeviceSpan) -> str:
    """Return `0-3`, or `2`."""
    last = seats.first + seats.size - 1
    return str(seats.first) if seats.size == 1 else f"{seats.first}-{last}"


def _seats(name: str, kind: DeviceGroup, processes: Sequence[Placement], nodes: Sequence[int]) -> DeviceSpan:
    numbers: list[int] = []
    for process in processes:
        if len(process.local_hardware_ranks) != 1:
            raise _not_modelled(name, f"has {len(process.local_hardware_ranks)} accelerators a process")
        numbers.append(nodes.index(process.cluster_node_rank) * kind.per_node + process.local_hardware_ranks[0])
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise _not_modelled(name, "is not on one range of accelerators with a process on each")
    return DeviceSpan(kind.label, numbers[0], len(numbers))


def _not_modelled(name: str, what: str) -> PlacementError:
    return PlacementError(
        f"no advice on this placement: `{name}` {what}",
        why="the model knows one process on each accelerator of one range of one group",
        help="place it so, or judge it by a run of its own",
    )

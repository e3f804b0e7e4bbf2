"""The accelerators of a job by group, its placement as an arrangement, and the accelerators that are free now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import ClusterError, PlacementError
from rlinf_core.hardware.accelerators import accelerator_names
from rlinf_core.job.arrangements import Arrangement, DeviceGroup, DeviceSpan
from rlinf_core.node.device_claims import HolderInfo, listing
from rlinf_core.node.environment import process_environment
from rlinf_core.node.holder_words import device_label, device_words, job_words, progress_words
from rlinf_core.topology import CLUSTER_LABEL, NODES, ClusterTopology

if TYPE_CHECKING:
    from rlinf_cli.job.job_file import SoundJob
    from rlinf_core.placement.strategy import Placement

# The model of an accelerator whose model is unknown.
UNNAMED = "accelerator"


class DevicePlace(NamedTuple):
    """The place of a process: its node, and its accelerator there."""

    cluster_node_rank: int
    local_accelerator_rank: int | None


class JobDevices(NamedTuple):
    """The accelerators of a job and their use by components.

    Attributes:
        kinds: the accelerators, by the label of their group; groups with the same nodes are one kind, named after the
            first.
        seats: the accelerators of each component of the flow.
        fixed: components whose placement is not changed, because they count nodes or robots or use several groups.
        groups: the kinds that each component may use, each with the label of the group that places it there: its own
            group, or one with the same interpreter. Components without accelerators are absent.
    """

    kinds: Mapping[str, DeviceGroup]
    seats: Mapping[str, DeviceSpan]
    fixed: tuple[str, ...]
    groups: Mapping[str, Mapping[str, str]]

    def kinds_for(self, name: str) -> list[DeviceGroup]:
        """Return the kinds that a component may use."""
        return [self.kinds[kind] for kind in self.groups.get(name, ())]

    def placed(self, name: str, seats: DeviceSpan) -> dict[str, str]:
        """Return the entry of a component with accelerators in `cluster.component_placement`."""
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
        """Return the present arrangement."""
        return Arrangement(tuple((name, self.seats[name]) for name in components), stages, staleness)


def devices_of(
    cluster: ClusterConfig,
    topology: ClusterTopology,
    placements: Mapping[str, Sequence[Placement]],
    components: Sequence[str],
) -> JobDevices:
    """Return the accelerators of a job's components.

    Raises:
        PlacementError: the model does not cover the placement: a component is missing, has several accelerators per
            process or several ranges, or two groups share only some of their nodes.
    """
    kinds: dict[str, DeviceGroup] = {}
    seats: dict[str, DeviceSpan] = {}
    fixed: list[str] = []
    # The groups with the accelerators of a kind, which may differ in interpreters and variables.
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
    """Return the ranks as text, as in `0-3` or `2`."""
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


class FreeDevices(NamedTuple):
    """The free accelerators of each kind.

    Attributes:
        ranges: the longest free range of each kind, by its label; empty if all are held.
        held: the ranks of the held accelerators, by kind.
        holders: lines on the holders.
    """

    ranges: Mapping[str, range]
    held: Mapping[str, frozenset[int]]
    holders: Sequence[str]

    def blocks(self, arrangement: Arrangement) -> bool:
        """Return whether another job holds an accelerator of an arrangement."""
        return any(
            device is not None and device[1] in self.held.get(device[0], frozenset())
            for _, seats in arrangement.seats
            for device in seats.devices
        )


def free_of(devices: JobDevices, topology: ClusterTopology, by_node: Mapping[int, Sequence[HolderInfo]]) -> FreeDevices:
    """Return the free accelerators of a job's kinds.

    Args:
        devices, topology: the accelerators of the job, and their nodes.
        by_node: the holders of devices, by the rank of their node.

    Raises:
        PlacementError: no accelerator is free.
        ClusterError: a held accelerator is identified other than by its number, such as a part of one.
    """
    numbers = {(rank, number) for rank, held in by_node.items() for number in map(_number, held) if number is not None}
    held: dict[str, frozenset[int]] = {}
    ranges: dict[str, range] = {}
    for label, kind in devices.kinds.items():
        nodes = topology.group(label).node_ranks
        taken = [(nodes[unit // kind.per_node], unit % kind.per_node) in numbers for unit in range(kind.units)]
        held[label] = frozenset(unit for unit, is_taken in enumerate(taken) if is_taken)
        ranges[label] = _longest(taken)
    words = [
        f"{device_words(one)} of node {rank}: {', '.join(filter(None, (job_words(one), progress_words(one))))}"
        for rank, holders in sorted(by_node.items())
        for one in holders
    ]
    if not any(ranges.values()):
        raise PlacementError("no accelerator of the file is free", why="; ".join(words) or None, help="advise later")
    return FreeDevices(ranges, held, words)


def holders_of(job: SoundJob, file: str) -> dict[int, Sequence[HolderInfo]]:
    """Return the holders of devices on the nodes of a file, by rank.

    Raises:
        ClusterError: the file's machines are not up, or one of them does not answer.
    """
    from rlinf_cli import console
    from rlinf_cli.cluster import identity
    from rlinf_cli.cluster.status import State, ask_all
    from rlinf_cli.cluster.transport import Transport, run
    from rlinf_core import env_vars
    from rlinf_core.node import attach, cluster_records

    record = cluster_records.load(env_vars.CLUSTER.get() or identity.cluster_name(file))
    if record is None:
        if attach.may_be_embedded(job.cluster.num_nodes, job.cluster):
            return {0: [HolderInfo(**one) for one in listing()["claims"]]}
        raise ClusterError(
            "the file's machines are not up, so that nobody knows what is free there",
            where=job.name,
            help="run `rlinf up FILE`, or set `RLINF_CLUSTER` to the cluster that is meant",
        )
    report = run(ask_all(record, Transport(), console.message))
    for node in report.nodes:
        if node.state in (State.UNREACHABLE, State.BROKEN):
            raise ClusterError(f"node {node.rank} does not say what is free there", why=node.detail, help=node.help)
    return {node.rank: node.holdings for node in report.nodes}


def _number(one: HolderInfo) -> int | None:
    """Return the number of a held accelerator; None for another device.

    Raises:
        ClusterError: the accelerator has no number.
    """
    vendor, _, name = device_label(one).partition(":")
    if name.isascii() and name.isdecimal():
        return int(name)
    if vendor in accelerator_names():
        raise ClusterError(f"`{device_words(one)}` is a part of an accelerator, which advice does not know")
    return None


def _longest(taken: Sequence[bool]) -> range:
    """Return the longest free range, the first of equally long ones."""
    best, first = range(0), 0
    for at, is_taken in enumerate([*taken, True]):
        if is_taken:
            if at - first > len(best):
                best = range(first, at)
            first = at + 1
    return best

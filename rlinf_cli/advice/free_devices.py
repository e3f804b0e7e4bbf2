"""The accelerators of a job that no job holds now, by the nodes' own word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlinf_core.errors import ClusterError, PlacementError
from rlinf_core.hardware.accelerators import accelerator_names
from rlinf_core.node.device_claims import HolderInfo, listing
from rlinf_core.node.holder_words import device_label, device_words, job_words, progress_words

if TYPE_CHECKING:
    from rlinf_cli.advice.job_devices import JobDevices
    from rlinf_cli.job.job_file import SoundJob
    from rlinf_core.advice.arrangements import Arrangement
    from rlinf_core.topology import ClusterTopology


class FreeDevices(NamedTuple):
    """The accelerators of each kind that are free.

    Attributes:
        ranges: the longest free range of each kind, by its label; empty where all are held.
        held: the numbers of those that are held, by kind.
        holders: who holds them, in words.
    """

    ranges: Mapping[str, range]
    held: Mapping[str, frozenset[int]]
    holders: Sequence[str]

    def blocks(self, arrangement: Arrangement) -> bool:
        """Return whether an arrangement has an accelerator that another job holds."""
        return any(
            device is not None and device[1] in self.held.get(device[0], frozenset())
            for _, seats in arrangement.seats
            for device in seats.devices
        )


def free_of(devices: JobDevices, topology: ClusterTopology, by_node: Mapping[int, Sequence[HolderInfo]]) -> FreeDevices:
    """Return the accelerators of a job's kinds that are free.

    Args:
        devices, topology: the accelerators of the job, and their nodes.
        by_node: who holds devices, by the rank of their node.

    Raises:
        PlacementError: none is free.
        ClusterError: a device is named by other means than its number.
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
    """Return who holds devices on the nodes of a file, by rank.

    Raises:
        ClusterError: its machines are not up, or one of them does not answer.
    """
    from rlinf_cli.cluster import identity
    from rlinf_cli.cluster.status import State, ask_all
    from rlinf_cli.cluster.transports.transport import Transport, run
    from rlinf_cli.console import console
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
    """Return the number of an accelerator; None for another device.

    Raises:
        ClusterError: it has another name.
    """
    vendor, _, name = device_label(one).partition(":")
    if name.isascii() and name.isdecimal():
        return int(name)
    if vendor in accelerator_names():
        raise ClusterError(f"`{device_words(one)}` is a part of an accelerator, which advice does not know")
    return None


def _longest(taken: Sequence[bool]) -> range:
    """Return the longest range that is not taken, the first of several."""
    best, first = range(0), 0
    for at, is_taken in enumerate([*taken, True]):
        if is_taken:
            if at - first > len(best):
                best = range(first, at)
            first = at + 1
    return best

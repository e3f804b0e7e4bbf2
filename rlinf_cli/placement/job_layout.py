"""The layout of a job's processes on its declared or assumed hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlinf_cli.job.job_file import SoundJob
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.secrets import MASK, is_secret, mask_text, mask_urls
from rlinf_core.config.tree import ScalarNode, find
from rlinf_core.errors import PlacementError
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.strategy import Placement
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.topology import CLUSTER_LABEL, ClusterTopology


@dataclass(frozen=True)
class JobLayout:
    """The node and the units of every process.

    Attributes:
        placements: the placements by component, in the order of the file.
        resources: the resources by component, as in `accelerators 0-63`.
        mode: `collocated`, `disaggregated` or `hybrid`.
    """

    placements: Mapping[str, Sequence[Placement]]
    resources: Mapping[str, str]
    mode: str


def lay_out(
    job: SoundJob, command: str, file: str, component: str | None = None, arguments: Sequence[str] = ()
) -> JobLayout:
    """Return the layout of all components, or of a single one.

    Args:
        command, file, arguments: the user's command line (`arguments` follow the file), for the remedy of an error.

    Raises:
        PlacementError: the accelerators are unknown, or there is no such component.
    """
    cluster = job.cluster if component is None else _only(job.cluster, component)
    _check_known(cluster, job.topology, ("rlinf", "inspect", command, file, *arguments))
    placement = ComponentPlacement(cluster, job.topology)
    placements = {name: placement.get_strategy(name).get_placement(job.topology) for name in placement.components}
    resources = {
        name: _resources(placement.get_hardware_ranks(name), cluster, name, job.topology)
        for name in placement.components
    }
    return JobLayout(placements, resources, str(placement.placement_mode))


def secret_texts(job: SoundJob) -> list[str]:
    """Return the values that references copied from secret keys, to be masked wherever they appear."""
    nodes = (find(job.tree, path) for path in job.secret)
    return [node.raw for node in nodes if isinstance(node, ScalarNode) and node.raw]


def masked(name: str, value: str, secrets: Iterable[str]) -> str:
    """Return a variable's value, masked for printing."""
    if value and is_secret(name, value):
        return MASK
    for secret in secrets:
        value = value.replace(secret, MASK)
    return mask_urls(value)


def _only(cluster: ClusterConfig, component: str) -> ClusterConfig:
    entry = cluster.component_placement.get(component)
    if entry is None:
        components = list(cluster.component_placement)
        listed = f"the components are {quoted(components)}" if components else "the file places no component"
        raise PlacementError(
            f"the file does not place a component `{component}`", help=did_you_mean(component, components) or listed
        )
    return cluster.model_copy(update={"component_placement": {component: entry}})


def _check_known(cluster: ClusterConfig, topology: ClusterTopology, asked: Sequence[str]) -> None:
    waiting: dict[str, list[str]] = {}
    for name, entry in cluster.component_placement.items():
        for label in entry.node_group or (CLUSTER_LABEL,):
            if topology.group(label).unit is None:
                waiting.setdefault(label, []).append(name)
    if not waiting:
        return
    components = dict.fromkeys(name for names in waiting.values() for name in names)
    import shlex

    needs_cluster = CLUSTER_LABEL in waiting
    assumptions = ("8",) if needs_cluster else tuple(f"{label}=8" for label in waiting)
    better = shlex.join(
        (*map(mask_text, asked), *(word for assumption in assumptions for word in ("--assume", assumption)))
    )
    where = "the nodes" if needs_cluster else quoted(waiting)
    raise PlacementError(
        f"the accelerators of {where} are unknown, so {quoted(components)} cannot be laid out",
        help=f"give the number per node: `{better}`,\n"
        "or probe the nodes with `--live`, or declare `accelerators: {per_node: 8}` in the node group"
        " (`per_node: 0` for one without GPUs)",
    )


def _resources(ranks: Sequence[int], cluster: ClusterConfig, name: str, topology: ClusterTopology) -> str:
    """Return `accelerators 0-63`, `Franka 0-1`, `node 3`."""
    label = next(iter(cluster.component_placement[name].node_group), CLUSTER_LABEL)
    unit = topology.group(label).unit
    if unit is None:
        return format_ranks(ranks)
    return f"{unit.robot or unit.kind}{'s' if len(ranks) > 1 and not unit.robot else ''} {format_ranks(ranks)}"

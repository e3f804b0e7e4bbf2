"""The placement rules applied to a file: every mistake at its exact position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.machines.cluster import RESERVED_LABELS, ClusterConfig, NodeGroup
from rlinf_core.config.ranks import nodes_text
from rlinf_core.config.reading import COMPONENT_PLACEMENT as PLACEMENT
from rlinf_core.config.source import Span
from rlinf_core.config.tree import MappingNode, Path, ScalarNode, SequenceNode, find, name_pieces, part, place
from rlinf_core.config.validating.pruning import Validated
from rlinf_core.placement.resolve import Resolution, resolve
from rlinf_core.placement.selection import PlacementProblem
from rlinf_core.topology import CLUSTER_LABEL, ClusterTopology

GROUPS: Path = ("cluster", "node_groups")


def component_paths(tree: MappingNode) -> dict[str, Path]:
    """Return the path of each component's entry."""
    section = find(tree, PLACEMENT)
    entries = section.entries if isinstance(section, MappingNode) else ()
    return {entry.key.raw: (*PLACEMENT, entry.key.raw) for entry in entries}


def map_path(tree: MappingNode, entry: Path) -> Path:
    """Return the path of the rank map in a component's entry, or of the entry if that is a bare rank map."""
    return (*entry, "placement") if isinstance(find(tree, entry), MappingNode) else entry


def problem_span(tree: MappingNode, entry: Path, problem: PlacementProblem) -> Span:
    """Return the span to underline for a problem of the component entry at `entry`."""
    if problem.label is not None:
        return _label_span(tree, entry, problem.label)
    path = map_path(tree, entry)
    if problem.part is None:
        return place(tree, path)
    if problem.part.item is not None:
        path = (*path, problem.part.item)
    return part(find(tree, path), problem.part.start, problem.part.end) or place(tree, path)


def _label_span(tree: MappingNode, entry: Path, index: int) -> Span:
    path = (*entry, "node_group")
    node = find(tree, path)
    if isinstance(node, SequenceNode):
        return place(tree, (*path, index))
    if isinstance(node, ScalarNode):
        _, start, end = name_pieces(node.raw)[index]
        return part(node, start, end) or node.span
    return place(tree, map_path(tree, entry))


# The fields that determine a group's units.
_UNITS_FOLLOW_FROM: tuple[Path, ...] = (
    *(("label",), ("node_ranks",), ("hardware", "configs"), ("accelerators",), ("ignore_hardware",)),
)


def check_placement(
    view: Validated[Any], cluster: ClusterConfig, topology: ClusterTopology, diagnostics: Diagnostics
) -> dict[str, Resolution]:
    """Report every mistake in `cluster.component_placement`.

    Args:
        view: the whole file. Entries that depend on wrong values are not checked.
        cluster: the model of its `cluster` section, without wrong values.
        topology: the hardware to place on; of unknown accelerators only the form of the map is checked.
        diagnostics: receives the findings.

    Returns:
        The resolution of each rank map that could be checked, by component.
    """
    if view.damaged(("cluster", "num_nodes")):
        return {}
    doubtful = _doubtful_labels(view, cluster)
    resolutions: dict[str, Resolution] = {}
    for name, path in component_paths(view.whole).items():
        entry = cluster.component_placement.get(name)
        if entry is None or view.damaged(path) or doubtful.intersection(entry.node_group or (CLUSTER_LABEL,)):
            continue
        resolutions[name] = resolution = resolve(name, entry.rank_map, entry.node_group, topology)
        for problem in resolution.problems:
            help = problem.help
            if help and problem.code == "placement-out-of-range" and cluster.spare_nodes:
                help += f" No process is placed on spares (`cluster.spare_nodes`): {nodes_text(cluster.spare_ranks)}."
            diagnostics.error(problem.code, problem.message, problem_span(view.whole, path, problem), path, help)
    return resolutions


def _doubtful_labels(view: Validated[Any], cluster: ClusterConfig) -> set[str]:
    """Return the labels of groups whose units may be wrong because of reported mistakes."""
    doubtful: set[str] = set()
    groups = find(view.whole, GROUPS)
    if view.damaged(GROUPS) and not isinstance(groups, SequenceNode):
        return set(_all_labels(cluster))
    for index, group in enumerate(groups.items if isinstance(groups, SequenceNode) else ()):
        path: Path = (*GROUPS, index)
        if not any(view.damaged((*path, *below)) for below in _UNITS_FOLLOW_FROM):
            continue
        label = find(group, ("label",))
        if not isinstance(label, ScalarNode):
            return set(_all_labels(cluster)) | doubtful
        doubtful |= {label.raw, CLUSTER_LABEL} if view.damaged((*path, "accelerators")) else {label.raw}
    label_counts = Counter(group.label for group in cluster.node_groups)
    return doubtful | {
        group.label
        for group in cluster.node_groups
        if label_counts[group.label] > 1 or _contradictory(group, cluster.num_nodes)
    }


def _all_labels(cluster: ClusterConfig) -> Iterator[str]:
    """Yield the labels that components name, except reserved ones, and the labels of the groups."""
    for entry in cluster.component_placement.values():
        yield from (label for label in entry.node_group if label not in RESERVED_LABELS)
    yield from (group.label for group in cluster.node_groups)


def _contradictory(group: NodeGroup, num_nodes: int) -> bool:
    """Return whether the cluster rules report a mistake in the units of the group."""
    ranks = group.node_ranks
    beyond = any(piece.stop > num_nodes for piece in ranks.ranges or ())
    units = group.hardware.configs if group.hardware else ()
    return beyond or any(unit.node_rank not in ranks or unit.node_rank >= num_nodes for unit in units)

"""Positions of components, rank maps and node groups in a file."""

from __future__ import annotations

from rlinf_core.config.composing.merge import COMPONENT_PLACEMENT as PLACEMENT
from rlinf_core.config.names import name_pieces
from rlinf_core.config.places import part, place
from rlinf_core.config.source import Span
from rlinf_core.config.tree import MappingNode, Path, ScalarNode, SequenceNode, find
from rlinf_core.placement.selection import PlacementProblem

GROUPS: Path = ("cluster", "node_groups")


def component_paths(tree: MappingNode) -> dict[str, Path]:
    """Return the path of each component's entry."""
    section = find(tree, PLACEMENT)
    entries = section.entries if isinstance(section, MappingNode) else ()
    return {entry.key.raw: (*PLACEMENT, entry.key.raw) for entry in entries}


def map_path(tree: MappingNode, entry: Path) -> Path:
    """Return the path of the rank map of a component's entry, which may be the whole entry."""
    return (*entry, "placement") if isinstance(find(tree, entry), MappingNode) else entry


def problem_span(tree: MappingNode, entry: Path, problem: PlacementProblem) -> Span:
    """Return the span to underline for a problem of the entry at a path."""
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

"""Positions of components, rank maps and node groups in a file."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_core.config.names import name_pieces
from rlinf_core.config.places import part, place
from rlinf_core.config.source import Span
from rlinf_core.config.tree import MappingNode, Path, ScalarNode, SequenceNode, find
from rlinf_core.placement.selection import PlacementProblem

PLACEMENT: Path = ("cluster", "component_placement")
GROUPS: Path = ("cluster", "node_groups")


def components_of(tree: MappingNode) -> Iterator[tuple[str, Path, Span]]:
    """Return every component of the file, with the path of its entry and the span of its name."""
    section = find(tree, PLACEMENT)
    for entry in section.entries if isinstance(section, MappingNode) else ():
        for name, start, end in name_pieces(entry.key.raw):
            if name:  # `a,,b`, which the model reports
                yield name, (*PLACEMENT, entry.key.raw), part(entry.key, start, end) or entry.key.span


def component_paths(tree: MappingNode) -> dict[str, Path]:
    """Return the path of each component's entry, the first one if it is placed twice."""
    paths: dict[str, Path] = {}
    for name, path, _ in components_of(tree):
        paths.setdefault(name, path)
    return paths


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

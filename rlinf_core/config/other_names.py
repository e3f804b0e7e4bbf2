"""Aliases of keys: names of related projects, replaced by ours before validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from typing import NamedTuple

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.model import ConfigModel
from rlinf_core.config.model_fields import alternatives, model_of, sections, step, written_fields
from rlinf_core.config.tree import Entry, MappingNode, Node, Path, ScalarNode, SequenceNode


class Renamed(NamedTuple):
    """A tree in which every key has our name.

    Attributes:
        tree: the tree; keys keep their spans.
        paths: the paths of renamed keys, with our names above them, and the name each had.
    """

    tree: MappingNode
    paths: dict[Path, str]

    def path(self, path: Path) -> Path:
        """Return the path in `tree` of what stood at `path` before."""
        found: Path = ()
        for segment in path:
            ours = next((new[-1] for new, old in self.paths.items() if old == segment and new[:-1] == found), segment)
            found = (*found, ours)
        return found


def with_our_names(model: type[BaseModel], tree: MappingNode, diagnostics: Diagnostics) -> Renamed:
    """Return `tree` with our names. A key that is given by both names is reported; an override wins over a file."""
    renamer = _Renamer(diagnostics)
    renamed = renamer.mapping(tree, [model], ())
    return Renamed(renamed, renamer.paths)


def _sections_of(annotations: Iterable[object]) -> Iterator[type[ConfigModel]]:
    for section in map(model_of, annotations):
        if section is not None and issubclass(section, ConfigModel):
            yield section


def other_names_of(annotations: Iterable[object]) -> dict[str, str]:
    """Return the further names of the fields of all sections among `annotations`."""
    names: dict[str, str] = {}
    for section in _sections_of(annotations):
        known = written_fields(section)
        names |= {other: ours for other, ours in section.other_names.items() if ours in known}
    return names


def places_of_other_name(model: type[BaseModel], name: str) -> list[tuple[str, str]]:
    """Return the sections in which `name` is another name of a field, by path and shallowest first, with the field."""
    return [(place, ours[name]) for place, section in sections(model) if name in (ours := other_names_of([section]))]


def moved_keys(annotations: Iterable[object]) -> dict[str, str]:
    """Return the keys of related projects that stand in another section than those among `annotations`, with their
    paths.
    """
    return {key: path for section in _sections_of(annotations) for key, path in section.moved.items()}


def unavailable_keys(annotations: Iterable[object]) -> dict[str, str]:
    """Return the keys of related projects that the sections among `annotations` lack, each with what to do instead."""
    return {key: instead for section in _sections_of(annotations) for key, instead in section.not_available.items()}


class _Renamer:
    def __init__(self, diagnostics: Diagnostics) -> None:
        self.diagnostics = diagnostics
        self.paths: dict[Path, str] = {}

    def mapping(self, node: MappingNode, annotations: list[object], path: Path) -> MappingNode:
        names = other_names_of(annotations)
        entries: list[Entry] = []
        for entry in self._without_twins(node, names, path):
            ours = names.get(entry.key.raw)
            if ours is not None:
                self.paths[(*path, ours)] = entry.key.raw
                entry = Entry(ScalarNode(entry.key.span, ours, ours, entry.key.plain), entry.value)
            key = entry.key.raw
            value = self._node(entry.value, _below(annotations, key), (*path, key))
            entries.append(entry if value is entry.value else Entry(entry.key, value))
        if len(entries) == len(node.entries) and all(map(is_, entries, node.entries)):
            return node
        return MappingNode(node.span, tuple(entries))

    def _without_twins(self, node: MappingNode, names: dict[str, str], path: Path) -> list[Entry]:
        """Return the entries of a mapping, of two that mean the same the one that holds."""
        left = {entry.key.raw: entry for entry in node.entries}
        for other, ours in names.items():
            entry, twin = left.get(other), left.get(ours)
            if entry is None or twin is None:
                continue
            if _is_override(twin) == _is_override(entry):
                self._report_both(entry, twin, (*path, other))
            del left[ours if _is_override(entry) and not _is_override(twin) else other]
        return list(left.values())

    def _node(self, node: Node, annotations: list[object], path: Path) -> Node:
        if isinstance(node, MappingNode) and annotations:
            return self.mapping(node, annotations, path)
        if isinstance(node, SequenceNode) and annotations:
            below = _below(annotations, 0)
            items = tuple(self._node(item, below, (*path, index)) for index, item in enumerate(node.items))
            return node if items == node.items else SequenceNode(node.span, items)
        return node

    def _report_both(self, entry: Entry, twin: Entry, path: Path) -> None:
        name, ours = entry.key.raw, twin.key.raw
        self.diagnostics.error(
            "duplicate-key",
            f"`{name}` is another name of `{ours}`, which is given too",
            entry.key.span,
            path,
            f"keep `{ours}`",
            ((twin.key.span, f"`{ours}` is given at"),),
        )


def _is_override(entry: Entry) -> bool:
    return entry.key.span.source.kind == "overrides"


def _below(annotations: list[object], segment: str | int) -> list[object]:
    return [
        member for annotation in annotations for below in step(annotation, segment) for member in alternatives(below)
    ]

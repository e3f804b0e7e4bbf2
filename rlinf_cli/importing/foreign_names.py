"""Key names of related projects: aliases are renamed before validation, other keys get a specific message.

The tables are in `foreign_names.toml`; they are loaded for an unknown key, and by `rlinf import`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from operator import is_
from pathlib import Path as FilePath
from typing import Final, NamedTuple

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.tree import Entry, MappingNode, Node, Path, ScalarNode, SequenceNode
from rlinf_core.config.validating.foreign_names import Renamed
from rlinf_core.config.validating.model_fields import alternatives, model_of, sections, step, written_fields

TABLES: Final = FilePath(__file__).with_suffix(".toml")
OURS: Final = ("rlinf_core", "recipes")


class SectionNames(NamedTuple):
    """Key names of related projects for one section.

    Attributes:
        names: aliases of fields, each with its field.
        moved: keys that are in another section here, each with its path.
        unavailable: keys that have no counterpart here, each with what to do instead.
    """

    names: Mapping[str, str]
    moved: Mapping[str, str]
    unavailable: Mapping[str, str]


@cache
def tables() -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads(TABLES.read_text(encoding="utf-8"))


@cache
def names_of(section: type[BaseModel]) -> SectionNames:
    """Return the names for a section: those of its class and of the sections that it extends."""
    merged: dict[str, dict[str, str]] = {kind: {} for kind in SectionNames._fields}
    for base in reversed(section.__mro__):
        # A user-defined section may have the name of one of ours.
        if base.__module__.partition(".")[0] in OURS:
            for kind, entries in tables().get(base.__name__, {}).items():
                merged[kind] |= entries
    fields = written_fields(section)
    names = {other: ours for other, ours in merged["names"].items() if ours in fields and other not in fields}
    moved = {other: path for other, path in merged["moved"].items() if other not in fields}
    known = {*fields, *names}
    return SectionNames(names, moved, {key: text for key, text in merged["unavailable"].items() if key not in known})


def with_our_names(model: type[BaseModel], tree: MappingNode, diagnostics: Diagnostics) -> Renamed:
    """Return `tree` with aliases renamed. A key given under both names is reported; an override wins over a file."""
    renamer = _Renamer(diagnostics)
    renamed = renamer.mapping(tree, [model], ())
    return Renamed(renamed, renamer.paths)


def _names_among(annotations: Iterable[object]) -> Iterator[SectionNames]:
    return (names_of(section) for section in map(model_of, annotations) if section is not None)


def other_names_of(annotations: Iterable[object]) -> dict[str, str]:
    """Return the aliases of the fields of all sections among `annotations`."""
    return {other: ours for section in _names_among(annotations) for other, ours in section.names.items()}


def places_of_other_name(model: type[BaseModel], name: str) -> list[tuple[str, str]]:
    """Return the sections in which `name` is an alias of a field, with the field, shallowest path first."""
    return [
        (place, names_of(section).names[name]) for place, section in sections(model) if name in names_of(section).names
    ]


def moved_keys(annotations: Iterable[object]) -> dict[str, str]:
    """Return the keys that belong to a section outside `annotations`, with their paths."""
    return {key: path for section in _names_among(annotations) for key, path in section.moved.items()}


def unavailable_keys(annotations: Iterable[object]) -> dict[str, str]:
    """Return the keys that the sections among `annotations` lack, each with what to do instead."""
    return {key: instead for section in _names_among(annotations) for key, instead in section.unavailable.items()}


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
        """Return the entries of a mapping without duplicates by alias; the effective one is kept."""
        remaining = {entry.key.raw: entry for entry in node.entries}
        for other, ours in names.items():
            entry, twin = remaining.get(other), remaining.get(ours)
            if entry is None or twin is None:
                continue
            if _is_override(twin) == _is_override(entry):
                self._report_both(entry, twin, (*path, other))
            del remaining[ours if _is_override(entry) and not _is_override(twin) else other]
        return list(remaining.values())

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
            f"`{name}` is an alias of `{ours}`, which is set too",
            entry.key.span,
            path,
            f"keep `{ours}`",
            ((twin.key.span, f"`{ours}` is set at"),),
        )


def _is_override(entry: Entry) -> bool:
    return entry.key.span.source.kind == "overrides"


def _below(annotations: list[object], segment: str | int) -> list[object]:
    return [
        member for annotation in annotations for below in step(annotation, segment) for member in alternatives(below)
    ]
